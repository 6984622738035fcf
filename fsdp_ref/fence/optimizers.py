"""What optimizers of sharded parameters may not do: steps that need whole parameters, and raw state in torch's checkpoints.

A rank steps what it holds. That gives the step of one process if each element moves by its own gradient and state alone. An
optimizer that uses norms, rows or products of whole parameters would step each shard by that shard's own, silently (Zhao et
al., "PyTorch FSDP", section 7.2.1). Those of torch are known. An optimizer of another class is tried, once, on six numbers:
steps of a whole tensor have to be the steps of its two parts.

``torch.distributed.checkpoint.state_dict`` recognises torch's own sharded classes, and takes the state of any other model's
optimizer for whole values: saved that way, it is one rank's pieces under the names of whole parameters. Its functions are
refused here. They are noticed by hooks on the optimizer, which is known from its first step on: torch's functions make a
step themselves where there is no state yet.
"""

from __future__ import annotations

import inspect
import warnings
from functools import cache
from typing import TYPE_CHECKING, Any, Final
from weakref import WeakSet

import torch
from torch import Tensor
from torch.optim import LBFGS, Adafactor, Muon, Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from fsdp_ref.compat import calls_of
from fsdp_ref.errors import UnsupportedError
from fsdp_ref.handle.marked_parameter import FlatParameter
from fsdp_ref.storage.views import is_held_by_us, is_shard

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fsdp_ref.runtime.unit import Unit


_NEEDS_WHOLE: Final = (Adafactor, LBFGS, Muon)
_tried: Final[WeakSet[Optimizer]] = WeakSet()
_known: Final[WeakSet[Optimizer]] = WeakSet()
_TORCH: Final = "torch.distributed.checkpoint.state_dict"
_STEPS: Final = 2
_APART: Final = 1e-3
"""By what part of the largest change two right steps may differ. A norm of a part is far from the norm of the whole here."""
_OF_DEVICES: Final = {"fused", "capturable", "foreach"}


def watch_optimizers(_: Unit) -> None:
    """From now on check optimizers before they step, and detect those of sharded parameters."""
    _watch_once()


@cache
def _watch_once() -> None:
    register_optimizer_step_pre_hook(guard)
    register_optimizer_step_pre_hook(refuse_shards)


def refuse_shards(optim: Optimizer, *_: Any) -> None:
    """Refuse a step that would treat shards, or several parameters in a flat one, as whole parameters.

    Raises:
        UnsupportedError: ``optim`` has such a parameter, and is Adafactor, LBFGS or Muon, or was seen to need whole ones.

    Warns:
        UserWarning: ``optim`` is no optimizer of torch and cannot be tried; once for each.
    """
    known = isinstance(optim, _NEEDS_WHOLE)
    if not known and (type(optim).__module__.startswith("torch.optim.") or optim in _tried):
        return
    params = [param for group in optim.param_groups for param in group["params"]]
    # LBFGS joins all parameters to one vector anyway.
    shards = any(
        is_shard(param) or (isinstance(param, FlatParameter) and not isinstance(optim, LBFGS)) for param in params
    )
    if not shards:
        return
    name = type(optim).__name__
    if known or _needs_whole(optim):
        raise UnsupportedError(
            f"{name}.step over parameters sharded by fsdp_ref: expected whole parameters, by whose norms, rows or products it "
            "steps, got shards, or several parameters in a flat one. Use an optimizer that steps each element by itself (SGD, "
            "Adam, AdamW and their like), or shard with NO_SHARD and use_orig_params=True."
        )
    _tried.add(optim)


def _needs_whole(optim: Optimizer) -> bool:
    """Whether the class of ``optim``, made anew, steps a tensor of six numbers otherwise than its two parts."""
    whole = torch.linspace(-1, 1, 6)
    # No part has the norm, the mean or the largest number of the whole.
    grad = torch.tensor([1.0, 2.0, -3.0, 40.0, -50.0, 60.0])
    try:
        with torch.random.fork_rng(devices=[]), torch.enable_grad():
            before = torch.get_rng_state()
            together = _stepped(optim, (whole,), (grad,))
            parts = _stepped(optim, whole.split((2, 4)), grad.split((2, 4)))
            draws = not torch.equal(before, torch.get_rng_state())
    except Exception as error:  # noqa: BLE001 - whatever a foreign optimizer raises, its own step is not at fault
        _warn(optim, f"{type(error).__name__}: {error}")
        return False
    if draws:
        _warn(optim, "it draws random numbers")
        return False
    change = (together - whole).abs().max()
    if not change:
        _warn(optim, "it does not move a tensor of six numbers")
    return bool((together - parts).abs().max() > _APART * change)


def _stepped(optim: Optimizer, values: Sequence[Tensor], grads: Sequence[Tensor]) -> Tensor:
    """Return parameters, as one vector, after steps of an optimizer of the same class with the same settings."""
    names = inspect.signature(type(optim)).parameters
    takes_all = any(one.kind is inspect.Parameter.VAR_KEYWORD for one in names.values())
    settings = {
        key: value for key, value in optim.defaults.items() if key not in _OF_DEVICES and (key in names or takes_all)
    }
    if "lr" in settings:
        settings["lr"] = 0.01  # a warm-up may begin at zero
    params = [torch.nn.Parameter(value.clone()) for value in values]
    own = type(optim)(params, **settings)
    step_of = type(own).step
    if getattr(step_of, "hooked", False):  # by torch, which calls everybody's hooks around it: this is nobody's step
        step_of = getattr(step_of, "__wrapped__", step_of)
    for step in range(1, _STEPS + 1):
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad / step
        with torch.no_grad():
            step_of(own)
    return torch.cat([param.detach() for param in params])


def _warn(optim: Optimizer, why: str) -> None:
    name = type(optim).__name__
    warnings.warn(
        f"fsdp_ref cannot try whether {name} steps each element by itself ({why}). If it uses norms, rows or products of whole "
        "parameters, it steps shards by those of each shard, and trains wrongly.",
        UserWarning,
        stacklevel=2,
    )


def guard(optim: Optimizer, *_: Any) -> None:
    """Let torch's functions be refused the own state of ``optim`` if it is one of sharded parameters."""
    if torch.compiler.is_compiling() or optim in _known:
        return
    _known.add(optim)
    if any(is_held_by_us(param) for group in optim.param_groups for param in group["params"]):
        optim.register_state_dict_pre_hook(_refuse_torch)
        optim.register_load_state_dict_pre_hook(_refuse_torch)


def sends_from_rank0() -> bool:
    """Return whether torch's functions now load a state of rank 0 alone (``StateDictOptions(broadcast_from_rank0=True)``)."""
    return any(getattr(call.f_locals.get("options"), "broadcast_from_rank0", False) for call in calls_of(_TORCH))


def _refuse_torch(optim: Optimizer, *_: Any) -> None:
    if calls_of(_TORCH):
        raise UnsupportedError(
            f"{_TORCH} with {type(optim).__name__} of a model sharded by fsdp_ref: expected one of torch's own sharded "
            "models, or whole parameters, got an optimizer whose state is this rank's pieces of parameters. Save with "
            "fsdp_ref.optim_state_dict(model, optim) and load with fsdp_ref.optim_state_dict_to_load(model, optim, "
            "state, load_directly=True); for sharded values set StateDictType.SHARDED_STATE_DICT. For the model's "
            "own state, get_model_state_dict is right."
        )
