"""Stops torch's checkpoint functions from saving or loading the raw state of an optimizer of sharded parameters.

``torch.distributed.checkpoint.state_dict`` recognises torch's own sharded classes, and takes the state of any other model's
optimizer for whole values: saved that way, it is one rank's pieces under the names of whole parameters. Its functions are
refused here. They are noticed by hooks on the optimizer, which is known from its first step on: torch's functions make a
step themselves where there is no state yet.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any, Final
from weakref import WeakSet

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from fsdp_ref.compat import calls_of
from fsdp_ref.errors import UnsupportedError
from fsdp_ref.storage.views import is_held_by_us

if TYPE_CHECKING:
    from fsdp_ref.runtime.unit import Unit

_TORCH: Final = "torch.distributed.checkpoint.state_dict"
_known: Final[WeakSet[Optimizer]] = WeakSet()


def watch_optimizers(_: Unit) -> None:
    """From now on detect optimizers of sharded parameters when they step."""
    _watch_once()


@cache
def _watch_once() -> None:
    register_optimizer_step_pre_hook(guard)


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
