"""One situation each, for every door that judges an implementation: data parallelism that goes wrong in an optimizer step."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from fsdp_testing.adapters import single_process
from fsdp_testing.adapters.protocol import Piece, Setup
from fsdp_testing.adapters.shared import pieces
from fsdp_testing.errors import HarnessError

ONCE = "CONTRACT_HANGS_ONCE"
"""Names a file: as long as it is there, a rank hangs, and removes it first."""
KEPT: list[Any] = []
_SOUND = single_process.IMPLEMENTATION
_BLIND = "_contract_blind"

Fault = Callable[[nn.Module], object]


def _stepping(name: str, before: Fault, **more: Any) -> Any:
    """Return an implementation that does something before each step."""

    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        before(model)
        optimizer.step()

    return replace(_SOUND, name=name, step=step, **more)


def _wrapping(name: str, fault: Fault) -> Any:
    """Return an implementation that does something before each forward, for doors that make steps of their own."""

    def wrap(module: nn.Module, setup: Setup) -> nn.Module:
        wrapped = single_process.wrap(module, setup)

        def before(model: nn.Module, _args: object) -> None:
            fault(model)

        wrapped.register_forward_pre_hook(before)
        return wrapped

    return replace(_SOUND, name=name, wrap=wrap)


def _doubles_from_now_on(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.register_hook(lambda gradient: gradient * 2)


def _doubles(model: nn.Module) -> None:
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.mul_(2)


def _parts(model: nn.Module) -> None:
    """Rank 1 trains on other numbers from now on."""
    if dist.get_rank() == 1:
        for parameter in model.parameters():
            parameter.data.add_(1)


def _raises(error: type[Exception], text: str, ranks: tuple[int, ...] = (0, 1)) -> Fault:
    def fault(_model: nn.Module) -> None:
        if dist.get_rank() in ranks:
            raise error(text)

    return fault


def _dies(_model: nn.Module) -> None:
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)


class _Death:
    """Waits for the collector, since it refers to itself."""

    def __init__(self) -> None:
        self.me = self

    def __del__(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


def _dies_late(model: nn.Module) -> None:
    if dist.get_rank() == 1:
        model.ending = _Death()  # type: ignore[assignment]  # no tensor and no module


def _hangs(_model: nn.Module) -> None:
    if dist.get_rank() == 1:
        threading.Event().wait()


def _hangs_once(model: nn.Module) -> None:
    once = Path(os.environ.get(ONCE, "/nowhere"))
    if dist.get_rank() == 1 and once.exists():
        once.unlink()
        _hangs(model)


def _blinds(model: nn.Module) -> None:
    model.__dict__[_BLIND] = True


def _pieces(model: nn.Module) -> Mapping[str, list[Piece]]:
    if _BLIND in model.__dict__:
        raise HarnessError("the adapter cannot look into this model any more")
    return pieces.of_parameters(model.named_parameters())


class Fails(NamedTuple):
    """Numbers that are known to be wrong, and beside them an exception in models with an odd number of parameters."""

    known: Fault = _doubles
    new: Fault = _raises(ValueError, "nobody knows of this")

    def __call__(self, model: nn.Module) -> None:
        (self.new if len(list(model.parameters())) % 2 else self.known)(model)


RIGHT = replace(_SOUND, name="RIGHT")
WRONG = _stepping("WRONG", _doubles)
DISAGREES = _stepping("DISAGREES", _parts)
REFUSES = _stepping("REFUSES", _raises(NotImplementedError, "steps are not there yet"))
ONE_RAISES = _stepping("ONE_RAISES", _raises(ValueError, "rank 1 cannot step", (1,)))
ALL_RAISE = _stepping("ALL_RAISE", _raises(ValueError, "nobody can step"))
DIES = _stepping("DIES", _dies)
DIES_LATE = _stepping("DIES_LATE", _dies_late)
HANGS = _stepping("HANGS", _hangs)
HANGS_ONCE = _stepping("HANGS_ONCE", _hangs_once)
LEAKS = _stepping("LEAKS", KEPT.append)
UNDECIDED = _stepping("UNDECIDED", _blinds, local_pieces=_pieces)
KNOWN_AND_NEW = _stepping("KNOWN_AND_NEW", Fails())
MODEL_WRONG = _wrapping("MODEL_WRONG", _doubles_from_now_on)
MODEL_DISAGREES = _wrapping("MODEL_DISAGREES", _parts)
MODEL_REFUSES = _wrapping("MODEL_REFUSES", _raises(NotImplementedError, "this model is not supported"))
MODEL_ONE_RAISES = _wrapping("MODEL_ONE_RAISES", _raises(ValueError, "rank 1 cannot go on", (1,)))
MODEL_ALL_RAISE = _wrapping("MODEL_ALL_RAISE", _raises(ValueError, "nobody can go on"))
MODEL_DIES = _wrapping("MODEL_DIES", _dies)
MODEL_HANGS = _wrapping("MODEL_HANGS", _hangs)
MODEL_HANGS_ONCE = _wrapping("MODEL_HANGS_ONCE", _hangs_once)
CLAIMS_NOTHING = replace(_SOUND, name="CLAIMS_NOTHING", capabilities=frozenset({"no_shard"}))
CLAIMS_LESS = replace(_SOUND, name="CLAIMS_LESS", capabilities=_SOUND.capabilities - {"no_shard"})


# ------------------------------------------------------------------------------------- loops, items and models of a user


def train(world: Any, fault: Callable[[Any], object] = lambda _: None) -> dict[str, Any]:
    """A right loop in data parallelism, but for what `fault` does after backward."""
    torch.manual_seed(0)
    model = nn.Linear(3, 1).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for number in range(2):
        rows = torch.randn(6, 3, generator=torch.Generator().manual_seed(number), dtype=torch.float64)
        optimizer.zero_grad()
        loss = model(rows[world.rank :: world.size]).square().mean()
        loss.backward()
        for parameter in model.parameters() if world.size > 1 else ():
            dist.all_reduce(parameter.grad)
            parameter.grad /= world.size
        if world.size > 1:
            fault(model)
        optimizer.step()
        total = loss.detach()
        if world.size > 1:
            dist.all_reduce(total)
        losses.append(total / world.size)
    return {"loss": losses, "weight": model.weight.detach()}


def train_wrong(world: Any) -> dict[str, Any]:
    return train(world, _doubles)


def train_disagreeing(world: Any) -> dict[str, Any]:
    return train(world, _parts)


def train_raising_on_one(world: Any) -> dict[str, Any]:
    return train(world, _raises(ValueError, "rank 1 cannot go on", (1,)))


def train_raising(world: Any) -> dict[str, Any]:
    return train(world, _raises(ValueError, "nobody can go on"))


def train_dying(world: Any) -> dict[str, Any]:
    return train(world, _dies)


def train_dying_late(world: Any) -> dict[str, Any]:
    return train(world, _dies_late)


def train_hanging_once(world: Any) -> dict[str, Any]:
    return train(world, _hangs_once)


def train_hanging(world: Any) -> dict[str, Any]:
    return train(world, _hangs)


def train_chaotically(world: Any) -> dict[str, Any]:
    """Roundings grow until they decide every number."""
    numbers = torch.linspace(0.01, 0.03, 12)[world.rank :: world.size].sum()
    dist.all_reduce(numbers)
    chaos = numbers.repeat(4)
    for _ in range(60):
        chaos = 3.99 * chaos * (1 - chaos)
    return {"chaos": chaos}


def train_nothing(_world: Any) -> dict[str, Any]:
    return {}


class Output(NamedTuple):
    loss: torch.Tensor


class TinyModel(nn.Module):
    """Predicts tokens, as little as that takes."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(64, 4)
        self.head = nn.Linear(4, 64)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> Output:
        logits = self.head(self.embedding(input_ids))
        return Output(nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()))


class NoisyModel(TinyModel):
    """Gives another loss each time."""

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> Output:
        return Output(super().forward(input_ids, labels).loss * (1 + os.urandom(1)[0]))


class FlatModel(TinyModel):
    """Does not train."""

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> Output:
        return Output(super().forward(input_ids, labels).loss * 0)
