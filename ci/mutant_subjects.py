"""Whose code ci/sampled_mutants.py changes, and which implementations are judged then."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True, slots=True)
class Subject:
    """What is changed, and who is judged then.

    Attributes:
        package: That is copied; what it is called when it is imported.
        files: Patterns of files in it.
        names: Implementations made of it.
        module: One of its modules, of which every process says where it comes from.
    """

    package: str
    files: tuple[str, ...]
    names: tuple[str, ...]
    module: str

    def source(self) -> Path:
        """The folder of the package that is copied: in this repository, or where it is installed."""
        if self.package == "fsdp_ref":
            return ROOT / "fsdp_ref"
        import torch

        return Path(torch.__file__).parent.joinpath(*self.package.split(".")[1:])


SUBJECTS = {
    "fsdp_ref": Subject(
        "fsdp_ref",
        tuple(
            f"{room}/*.py"
            for room in ["runtime", "handle", "comm", "checkpoint", "training", "replicas", "build", "storage"]
        ),
        ("fsdp_ref-composable", "fsdp_ref-wrapper"),
        "fsdp_ref.comm.collectives",
    ),
    "torch-fsdp2": Subject(
        "torch.distributed.fsdp",
        ("_fully_shard/*.py",),
        ("torch-fsdp2",),
        "torch.distributed.fsdp._fully_shard._fsdp_param",
    ),
    "torch-fsdp1": Subject(
        "torch.distributed.fsdp",
        tuple(
            f"{file}.py"
            for file in (
                "fully_sharded_data_parallel",
                "_flat_param",
                "_runtime_utils",
                "_init_utils",
                "_state_dict_utils",
                "_optim_utils",
                "_unshard_param_utils",
                "_exec_order_utils",
            )
        ),
        ("torch-fsdp1",),
        "torch.distributed.fsdp._flat_param",
    ),
}
