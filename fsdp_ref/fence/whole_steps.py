"""Refuses shards to optimizers whose step needs whole parameters.

A rank steps the elements that it holds. That equals the step of one process if each element depends only on its own gradient
and state. An optimizer that uses norms, rows or products of whole parameters would step each shard by that shard's own,
silently (Zhao et al., "PyTorch FSDP", section 7.2.1). Torch's optimizers of this kind are refused; others cannot be recognised.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any, Final

from torch.optim import LBFGS, Adafactor, Muon, Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from fsdp_ref.errors import UnsupportedError
from fsdp_ref.handle.marked_parameter import FlatParameter
from fsdp_ref.storage.views import is_shard

if TYPE_CHECKING:
    from fsdp_ref.runtime.unit import Unit

_NEEDS_WHOLE: Final = (Adafactor, LBFGS, Muon)


def watch_steps(_: Unit) -> None:
    """From now on check optimizers before they step."""
    _watch_once()


@cache
def _watch_once() -> None:
    register_optimizer_step_pre_hook(refuse_shards)


def refuse_shards(optim: Optimizer, *_: Any) -> None:
    """Refuse a step that would treat shards, or several parameters in a flat one, as whole parameters.

    Raises:
        UnsupportedError: ``optim`` is Adafactor, LBFGS or Muon, and has such a parameter.
    """
    if not isinstance(optim, _NEEDS_WHOLE):
        return
    params = [param for group in optim.param_groups for param in group["params"]]
    # LBFGS joins all parameters to one vector anyway.
    if any(is_shard(param) or (isinstance(param, FlatParameter) and not isinstance(optim, LBFGS)) for param in params):
        name = type(optim).__name__
        raise UnsupportedError(
            f"{name}.step over parameters sharded by fsdp_ref: expected whole parameters, by whose norms, rows or products it "
            "steps, got shards, or several parameters in a flat one. Use an optimizer that steps each element by itself (SGD, "
            "Adam, AdamW and their like), or shard with NO_SHARD and use_orig_params=True."
        )
