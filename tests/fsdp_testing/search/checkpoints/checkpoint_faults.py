"""One fault of saving or loading each, in data parallelism without shards: what a table of checkpoints must show."""

from __future__ import annotations

import copy
import os
import signal
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from fsdp_testing.adapters import registry, single_process
from fsdp_testing.adapters.shared import replicated

_SOUND = single_process.IMPLEMENTATION
Change = Callable[[dict[str, Any]], object]


def _loading(name: str, change: Change) -> Any:
    """Return an implementation that loads the optimizer's state after a change to it."""

    def load(model: nn.Module, optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
        changed = copy.deepcopy(dict(state))
        change(changed)
        replicated.load_full_optimizer_state(model, optimizer, changed)

    return replace(_SOUND, name=name, load_full_optimizer_state=load)


def _swapped(state: dict[str, Any]) -> None:
    one, other = (state["state"][f"{name}.w.bias"] for name in ("outer", "outer.inner"))
    one["exp_avg"], other["exp_avg"] = other["exp_avg"], one["exp_avg"]


def _restarted(state: dict[str, Any]) -> None:
    for entries in state["state"].values():
        entries["step"] = torch.tensor(0.0)


def _with_own_rate(state: dict[str, Any]) -> None:
    for group in state["param_groups"]:
        group["lr"] = 0.3


def _first_rank_only(model: nn.Module, state: Mapping[str, torch.Tensor]) -> None:
    if dist.get_rank() == 0:
        replicated.load_full_state_dict(model, state)


def _all_but_one(model: nn.Module, state: Mapping[str, torch.Tensor]) -> None:
    own = replicated.full_state_dict(model)
    replicated.load_full_state_dict(model, {**state, "outer.w.weight": own["outer.w.weight"]})


def _one_element_off(model: nn.Module, optimizer: torch.optim.Optimizer) -> Mapping[str, Any]:
    state = replicated.full_optimizer_state(model, optimizer)
    moment = state["state"]["outer.w.bias"]["exp_avg"]
    moment[2] = torch.nextafter(moment[2], torch.tensor(9.0, dtype=moment.dtype))
    return state


def _trains_differently(model: nn.Module, state: Mapping[str, torch.Tensor]) -> None:
    """Load the right numbers, and double every gradient from now on."""
    replicated.load_full_state_dict(model, state)
    for parameter in model.parameters():
        parameter.register_hook(lambda gradient: gradient * 2)


def _draws_numbers(model: nn.Module) -> Mapping[str, torch.Tensor]:
    torch.rand(1)
    return replicated.full_state_dict(model)


def _clears_first(model: nn.Module, optimizer: torch.optim.Optimizer) -> Mapping[str, Any]:
    """Save what was cleared a moment before: state and file agree, and both are wrong."""
    for entries in optimizer.state.values():
        entries["exp_avg"].zero_()
    return replicated.full_optimizer_state(model, optimizer)


def _without_first_rate(state: dict[str, Any]) -> None:
    for group in state["param_groups"]:
        group.pop("initial_lr", None)


def _doubles_rate(model: nn.Module, optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
    """Load the right numbers, and have each step change the rates."""
    replicated.load_full_optimizer_state(model, optimizer, state)

    def double(*_: Any) -> None:
        for group in optimizer.param_groups:
            group["lr"] *= 2

    optimizer.register_step_post_hook(double)


def _narrow(model: nn.Module, optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
    replicated.load_full_optimizer_state(model, optimizer, state)
    for parameter, entries in optimizer.state.items():
        entries["exp_avg"] = entries["exp_avg"].to(parameter.dtype)


def _refuses(*_: Any) -> None:
    raise ValueError("this state is of another model")


def _refuses_on_one(model: nn.Module, state: Mapping[str, torch.Tensor]) -> None:
    if dist.get_rank() == 1:
        raise ValueError("this rank has no room")
    replicated.load_full_state_dict(model, state)


def _dies(*_: Any) -> None:
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)


def _hangs(*_: Any) -> None:
    if dist.get_rank() == 1:
        threading.Event().wait()


def _saves_differently(model: nn.Module) -> Mapping[str, torch.Tensor]:
    """Saving changes what is trained on: the loss of this is seen in the step after it only."""
    state = replicated.full_state_dict(model)
    for parameter in model.parameters():
        parameter.register_hook(lambda gradient: gradient * 2)
    return state


def _with_a_mask(model: nn.Module) -> Mapping[str, torch.Tensor]:
    return {**replicated.full_state_dict(model), "outer.mask": torch.ones(2)}


def _with_a_ghost(model: nn.Module, optimizer: torch.optim.Optimizer) -> Mapping[str, Any]:
    state = dict(replicated.full_optimizer_state(model, optimizer))
    return {**state, "state": {**state["state"], "ghost": {"exp_avg": torch.ones(2)}}}


def _thaws(model: nn.Module, state: Mapping[str, torch.Tensor]) -> None:
    replicated.load_full_state_dict(model, state)
    model.requires_grad_(True)


LOSES_MOMENT = _loading("loses-moment", lambda state: state["state"]["outer.w.weight"].pop("exp_avg"))
LOSES_STATE = _loading("loses-state", lambda state: state["state"].pop("outer.inner.w.bias"))
SWAPS_MOMENTS = _loading("swaps-moments", _swapped)
FORGETS_STEP = _loading("forgets-step", _restarted)
IGNORES_RATE = _loading("ignores-rate", _with_own_rate)
FIRST_RANK_ONLY = replace(_SOUND, name="first-rank-only", load_full_state_dict=_first_rank_only)
LEAVES_ONE_OUT = replace(_SOUND, name="leaves-one-out", load_full_state_dict=_all_but_one)
TRAINS_DIFFERENTLY = replace(_SOUND, name="trains-differently", load_full_state_dict=_trains_differently)
SAVES_WRONG = replace(_SOUND, name="saves-wrong", full_optimizer_state=_one_element_off)
SAVES_A_MASK = replace(_SOUND, name="saves-a-mask", full_state_dict=_with_a_mask)
SAVES_A_GHOST = replace(_SOUND, name="saves-a-ghost", full_optimizer_state=_with_a_ghost)
THAWS = replace(registry.load("torch-ddp"), name="thaws", load_full_state_dict=_thaws)
SAVES_DIFFERENTLY = replace(_SOUND, name="saves-differently", full_state_dict=_saves_differently)
CLEARS_FIRST = replace(_SOUND, name="clears-first", full_optimizer_state=_clears_first)
DRAWS_NUMBERS = replace(_SOUND, name="draws-numbers", full_state_dict=_draws_numbers)
FORGETS_FIRST_RATE = _loading("forgets-first-rate", _without_first_rate)
DOUBLES_RATE = replace(_SOUND, name="doubles-rate", load_full_optimizer_state=_doubles_rate)
NARROW_MOMENTS = replace(_SOUND, name="narrow-moments", load_full_optimizer_state=_narrow)
REFUSES = replace(_SOUND, name="refuses", load_full_optimizer_state=_refuses)
REFUSES_ON_ONE = replace(_SOUND, name="refuses-on-one", load_full_state_dict=_refuses_on_one)
DIES = replace(_SOUND, name="dies", load_full_state_dict=_dies)
HANGS = replace(_SOUND, name="hangs", load_full_state_dict=_hangs)
