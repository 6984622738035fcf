"""FSDP1: three ways in which a frozen unit makes a backward raise.

Run with torch alone: python fsdp1-frozen-units.py
"""

import contextlib
import io
import tempfile
import warnings
from collections.abc import Callable

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
    def __init__(self, frozen: bool, prefetch: BackwardPrefetch | None = BackwardPrefetch.BACKWARD_PRE) -> None:
        super().__init__()
        self.first = nn.Linear(2, 2)
        unit = Skipped().requires_grad_(not frozen)
        self.unit = FSDP(unit, use_orig_params=True, backward_prefetch=prefetch, device_id=torch.device("cpu"))

    def forward(self, x: torch.Tensor, used: bool = True, kept: bool = True) -> torch.Tensor:
        x = self.first(x)
        y = self.unit(x, used)
        return y if kept else x


def wrap(frozen: bool, prefetch: BackwardPrefetch | None = BackwardPrefetch.BACKWARD_PRE) -> FSDP:
    model = Model(frozen, prefetch)
    return FSDP(model, use_orig_params=True, backward_prefetch=prefetch, device_id=torch.device("cpu"))


def gives_its_input_back(frozen: bool, used: bool) -> None:
    wrap(frozen)(torch.ones(2, 2), used=used).sum().backward()


def is_not_in_the_loss(frozen: bool, prefetch: BackwardPrefetch | None) -> None:
    wrap(frozen, prefetch)(torch.ones(2, 2), kept=False).sum().backward()


def is_thawed(after: str) -> None:
    model, x = wrap(frozen=True), torch.ones(2, 2)
    if after == "a forward":
        model(x)
    elif after == "a forward under no_grad":
        with torch.no_grad():
            model(x)
    elif after == "a step":
        model(x).sum().backward()
    for parameter in model.module.unit.parameters():
        parameter.requires_grad_(True)
    model(x).sum().backward()


def outcome(attempt: Callable[[], None]) -> str:
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            attempt()
    except Exception as error:  # noqa: BLE001 - what torch raises is what is shown
        return type(error).__name__
    return "runs"


PRE = BackwardPrefetch.BACKWARD_PRE
ATTEMPTS = {
    "a frozen unit that gives its input back": (lambda: gives_its_input_back(True, False), "ValueError"),
    "a trainable one": (lambda: gives_its_input_back(False, False), "runs"),
    "a frozen one that is used": (lambda: gives_its_input_back(True, True), "runs"),
    "a frozen unit whose output is not in the loss": (lambda: is_not_in_the_loss(True, PRE), "AttributeError"),
    "a trainable one ": (lambda: is_not_in_the_loss(False, PRE), "runs"),
    "a frozen one without backward_prefetch": (lambda: is_not_in_the_loss(True, None), "runs"),
    "a unit thawed after a forward without backward": (lambda: is_thawed("a forward"), "AssertionError"),
    "after a forward under no_grad": (lambda: is_thawed("a forward under no_grad"), "runs"),
    "after a whole step": (lambda: is_thawed("a step"), "runs"),
}


def main(rank: int, path: str) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=2)
    for name, (attempt, expected) in ATTEMPTS.items():
        got = outcome(attempt)
        if rank == 0:
            print(f"{name}: {got}")
        assert got == expected, f"expected {expected} of torch 2.13"
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(main, (f"{folder}/store",), nprocs=2, start_method="fork")
