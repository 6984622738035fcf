"""FSDP1 and FSDP2: a unit that ends in dropout, and a rank whose micro-batch is empty, gather in another order.

Run with torch alone: python empty-batch-behind-dropout.py
"""

import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard


class Outer(nn.Module):
    def __init__(self, probability: float) -> None:
        super().__init__()
        self.own = nn.Linear(4, 4)
        self.inner = nn.Linear(4, 2)
        self.dropout = nn.Dropout(probability)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.dropout(self.inner(self.own(x)))


def wrapped(kind: str, probability: float) -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 4), Outer(probability))
    if kind == "FSDP2":
        for unit in (model[1].inner, model[1], model):
            fully_shard(unit)
        return model

    def wrap(unit: nn.Module) -> nn.Module:
        return FullyShardedDataParallel(unit, use_orig_params=True, device_id=torch.device("cpu"))

    model[1].inner = wrap(model[1].inner)
    model[1] = wrap(model[1])
    return wrap(model)


def run(rank: int, path: str, kind: str, probability: float, rows: tuple[int, int]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=2)
    wrapped(kind, probability)(torch.randn(rows[rank], 4)).sum().backward()
    dist.barrier()


def fails(kind: str, probability: float, rows: tuple[int, int]) -> bool:
    with tempfile.TemporaryDirectory() as folder:
        arguments = (f"{folder}/store", kind, probability, rows)
        ranks = [mp.get_context("fork").Process(target=run, args=(rank, *arguments)) for rank in range(2)]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join(20)
        bad = any(process.exitcode != 0 for process in ranks)  # None of one that hangs
        for process in ranks:
            process.kill()
        return bad


if __name__ == "__main__":
    for kind in ("FSDP1", "FSDP2"):
        for probability in (0.0, 0.25):
            for rows in ((2, 2), (2, 0)):
                bad = fails(kind, probability, rows)
                print(
                    f"{kind}, dropout {probability}, rows of the ranks {rows}: {'fails' if bad else 'runs'}", flush=True
                )
                assert bad == (probability > 0 and 0 in rows), "another outcome than in torch 2.13"
