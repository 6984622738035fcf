"""FSDP2 in mixed precision: a micro-batch without synchronisation that leaves something out makes a backward raise.

Run with torch alone: python fsdp2-no-sync-then-unused-in-mixed-precision.py
"""

import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

POLICY = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


class Branches(nn.Module):
    """Two layers, the second of which a forward may leave out."""

    def __init__(self) -> None:
        super().__init__()
        self.always = nn.Linear(4, 4)
        self.sometimes = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, both: bool) -> torch.Tensor:
        x = self.always(x)
        return self.sometimes(x) if both else x


def outcome(mesh: dist.device_mesh.DeviceMesh, nested: bool) -> str:
    torch.manual_seed(0)
    model = Branches()
    if nested:
        fully_shard(model.sometimes, mesh=mesh, mp_policy=POLICY)
    fully_shard(model, mesh=mesh, mp_policy=POLICY)
    try:
        model.set_requires_gradient_sync(False)
        model(torch.ones(2, 4), both=False).sum().backward()
        model.set_requires_gradient_sync(True)
        model(torch.ones(2, 4), both=True).sum().backward()
    except (AttributeError, AssertionError) as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def main(rank: int, path: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=2)
    mesh = dist.device_mesh.init_device_mesh("cpu", (2,))
    unit, part = outcome(mesh, nested=True), outcome(mesh, nested=False)
    if rank == 0:
        print(f"a unit of its own is left out: {unit}")
        print(f"a part of a unit is left out: {part}")
    assert "_unsharded_param" in unit, "fixed in this torch: a unit that is left out"
    assert "uniform gradient dtype" in part, "fixed in this torch: a part of a unit that is left out"
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(main, (f"{folder}/store",), nprocs=2, start_method="fork")
