"""Gradients of computations outside of a unit's forward, which would stay on one rank.

Autograd would add one to ``.grad`` on this rank alone, and silently: a method other than ``forward`` finds whole parameters
where nothing is sharded, and in a summon.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.utils.hooks import unserializable_hook

from fsdp_ref.errors import FsdpRuntimeError
from fsdp_ref.handle.originals import OwnHook


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
