"""Computations with a unit's parameters outside of its forward: calls of its modules by another method, and gradients.

torch would say that some matrix has the wrong shape. A hook on the modules that have sharded parameters says which
parameters these are, which method was called, and how to register it. What a method computes with parameters themselves,
without calling a module, reaches no hook.

A gradient that came from outside of forward would stay on one rank. Autograd would add it to ``.grad`` there, and silently: a
method other than ``forward`` finds whole parameters where nothing is sharded, and in a summon.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import unserializable_hook

from fsdp_ref.annotations import OWNERS_KEY
from fsdp_ref.compat import in_backward, method_called_on
from fsdp_ref.errors import FsdpRuntimeError, listing
from fsdp_ref.handle.originals import OwnHook, Shown

if TYPE_CHECKING:
    from fsdp_ref.runtime.unit import Unit


def watch_modules(unit: Unit) -> None:
    """Watch calls of the modules whose parameters the unit shards; copies of them are watched too."""
    if not unit.handle.sharded:
        return
    for module in {site.module: None for managed in unit.handle.originals.managed for site in managed.sites}:
        module.register_forward_pre_hook(_refuse_sharded)


def _refuse_sharded(module: nn.Module, args: Any) -> None:
    if torch.compiler.is_compiling():
        return
    for unit, names in module.__dict__.get(OWNERS_KEY, {}).items():
        handle = unit.handle
        if not names or handle.originals.shown is not Shown.SHARDED:
            continue
        fqns = [site.fqn for managed in handle.originals.managed for site in managed.sites if site.module is module]
        method = method_called_on((unit.holder, unit.module, *unit.modules))
        if in_backward():
            raise FsdpRuntimeError(
                f"{type(module).__name__}, run again in backward (activation checkpointing): expected full parameters, "
                f"got sharded ones: {listing(fqns)}. {unit!r} gathers them at the first gradient of one of its outputs, "
                f"and no tensor was seen in these. Return tensors from forward, or "
                f"tuples, lists, dicts or dataclasses of them, not objects of other classes; or make the "
                f"checkpointed module a unit."
            )
        raise FsdpRuntimeError(
            f"{type(unit.module).__name__}.{method or 'forward of a module inside'}: expected full parameters, which "
            f"{unit!r} has in its forward and in registered methods, got sharded ones: {listing(fqns)}. Call "
            f"register_fsdp_forward_method(module, {method or 'name'!r}) once after sharding, or call it inside "
            f"summon_full_params if no gradient is needed."
        )


@unserializable_hook
class OutsideGradient(OwnHook):
    """A hook on what users see as a parameter: no computation outside of its unit's forward may give it a gradient."""

    __slots__ = ("_name",)

    def __init__(self, name: str) -> None:
        self._name = name

    def __call__(self, grad: Tensor | None) -> None:
        """Refuse a gradient; a backward that only passes by brings none.

        Raises:
            FsdpRuntimeError: there is a gradient.
        """
        if grad is None:
            return
        raise FsdpRuntimeError(
            f"gradient of {self._name!r}: expected one that comes through the forward of its unit, to be averaged over "
            "ranks, got one from outside of it, which would stay on this rank. Register methods other than "
            "forward with register_fsdp_forward_method(module, name), and compute penalties on parameters in forward."
        )


def refuse_outside_gradients(param: nn.Parameter, name: str) -> None:
    """Hook ``param``, which must not be frozen now; the hook stays when it is frozen or thawed."""
    wanted = param.requires_grad
    param.requires_grad_(True).register_hook(OutsideGradient(name))
    param.requires_grad_(wanted)
