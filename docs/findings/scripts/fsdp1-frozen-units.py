"""FSDP1: three ways in which a frozen unit makes a backward raise.

Run with torch alone: python fsdp1-frozen-units.py
"""

import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.fsdp import BackwardPrefetch
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP


class Skipped(nn.Module):
    """Gives its input back unless it is used."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor, used: bool) -> torch.Tensor:
        return self.layer(x) if used else x


class Model(nn.Module):
    def __init__(self, frozen: bool, options: dict) -> None:
        super().__init__()
        self.first = nn.Linear(2, 2)
        self.unit = FSDP(Skipped().requires_grad_(not frozen), **options)

    def forward(self, x: torch.Tensor, used: bool = True, kept: bool = True) -> torch.Tensor:
        x = self.first(x)
        y = self.unit(x, used)
        return y if kept else x


def outcome(frozen: bool = True, before: str = "", thaw: bool = False, prefetch: bool = True, **how: bool) -> str:
    """What comes of a backward, maybe after a forward or a step and after thawing the unit."""
    ahead = BackwardPrefetch.BACKWARD_PRE if prefetch else None
    options = {"use_orig_params": True, "backward_prefetch": ahead, "device_id": torch.device("cpu")}
    model, x = FSDP(Model(frozen, options), **options), torch.ones(2, 2)
    if before:
        with torch.set_grad_enabled(before != "no_grad"):
            y = model(x)
        if before == "step":
            y.sum().backward()
    model.module.unit.requires_grad_(thaw or not frozen)
    try:
        model(x, **how).sum().backward()
    except (AssertionError, AttributeError, ValueError) as error:
        return type(error).__name__
    return "runs"


def main(rank: int, path: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=2)
    outcomes = {
        "a frozen unit that gives its input back": (outcome(used=False), "ValueError"),
        "a trainable one": (outcome(frozen=False, used=False), "runs"),
        "a frozen one that is used": (outcome(), "runs"),
        "a frozen unit whose output is not in the loss": (outcome(kept=False), "AttributeError"),
        "a trainable one, not in the loss": (outcome(frozen=False, kept=False), "runs"),
        "a frozen one without backward_prefetch": (outcome(kept=False, prefetch=False), "runs"),
        "a unit thawed after a forward without backward": (outcome(before="forward", thaw=True), "AssertionError"),
        "after a forward under no_grad": (outcome(before="no_grad", thaw=True), "runs"),
        "after a whole step": (outcome(before="step", thaw=True), "runs"),
    }
    for name, (got, expected) in outcomes.items():
        assert got == expected, f"{name}: {got}, expected {expected} of torch 2.13"
    if rank == 0:
        print("\n".join(f"{name}: {got}" for name, (got, _) in outcomes.items()))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(main, (f"{folder}/store",), nprocs=2, start_method="fork")
