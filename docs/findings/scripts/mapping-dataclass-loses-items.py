"""FSDP1 and FSDP2: a dataclass that is a mapping too loses the items that are no fields, where inputs are cast.

Run with torch alone: python mapping-dataclass-loses-items.py
"""

import tempfile
from collections import OrderedDict
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import MixedPrecision, MixedPrecisionPolicy, fully_shard


@dataclass
class Batch(OrderedDict):
    values: torch.Tensor | None = None

    def __post_init__(self) -> None:
        # Or from pairs, as a mapping is made, and as FSDP makes it where it moves inputs.
        pairs = [("values", self.values)] if isinstance(self.values, torch.Tensor) else list(self.values)
        self.update(pairs)
        self.values = self["values"]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, batch: Batch) -> torch.Tensor:
        return self.layer(batch.values) + batch.get("bias", 0.0)


def output(wrap) -> float:
    torch.manual_seed(0)
    batch = Batch(torch.zeros(1, 4))
    batch["bias"] = torch.full((4,), 8.0)
    return float(wrap(Model())(batch).detach().float().mean())


def main(rank: int, path: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=2)
    low, policy = MixedPrecision(param_dtype=torch.bfloat16), MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    expected = output(lambda model: model)
    for name, wrap in (
        ("FSDP1", lambda model: FSDP(model, device_id=torch.device("cpu"), mixed_precision=low)),
        ("FSDP2", lambda model: fully_shard(model, mp_policy=policy)),
    ):
        got = output(wrap)
        if rank == 0:
            print(f"{name}: the mean output is {got:.2f}, expected {expected:.2f}")
        assert abs(got - expected) > 7, "fixed in this torch"
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(main, (f"{folder}/store",), nprocs=2, start_method="fork")
