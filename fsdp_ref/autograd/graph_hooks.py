"""Hooks that run when autograd reaches the outputs of a unit, or has the gradients of its inputs.

These hooks sit on tensors that users own and may keep, so they know their unit through its tie (see ``graph_ties``).
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fsdp_ref import compat
from fsdp_ref.storage.precision import tensors_in

if TYPE_CHECKING:
    from fsdp_ref.autograd.graph_ties import GraphTie
    from fsdp_ref.runtime.unit import Unit


class TakenInputs:
    """The inputs of one forward call that require grad, to recognise them among its outputs."""

    __slots__ = ("_taken",)

    def __init__(self, *values: Any) -> None:
        self._taken: dict[int, tuple[Tensor, int]] = {}
        if torch.is_grad_enabled():
            # Keep the tensors too, so that their ids are not reused.
            inputs = [t for t in tensors_in(*values) if t.requires_grad]
            self._taken = {id(t): (t, t._version) for taken in inputs for t in with_base(taken)}

    def gives_back(self, output: Tensor) -> bool:
        """Whether an output is an unchanged input, or the base of one; an input changed in place does not count."""
        # By object, not by memory: a view of an input is an output of its own, with a node that backward reaches first.
        _, version = self._taken.get(id(output), (None, -1))
        return version == output._version


def with_base(tensor: Tensor) -> list[Tensor]:
    """Return a tensor and, if it is a view, the tensor that it is a view of."""
    return [tensor] if tensor._base is None else [tensor, tensor._base]


class InputsWatch:
    """Reports once per backward pass when the gradients of all inputs of a unit have arrived.

    The hooks on the inputs hold the watch weakly, and they go with it: an input may outlive the graph (a prompt that
    is trained in front of a frozen model is the same tensor in every step). They run before whatever else waits for
    the same gradients, which may need memory that this unit gives back.

    Args:
        tie: the unit.
        tensors: its inputs that require grad.
        done: called then.
    """

    def __init__(self, tie: GraphTie, tensors: list[Tensor], done: Callable[[Unit], None]) -> None:
        self._tie = tie
        self._done = done
        # Each once: a tensor that is passed in several places has one gradient.
        distinct = list({id(tensor): tensor for tensor in tensors}.values())
        self._all = frozenset(range(len(distinct)))
        self._missing = set(self._all)
        self._task = -1
        me = weakref.ref(self)
        # First: later hooks on the same gradient may start the next gather, which needs the memory of this unit.
        self._handles = [
            compat.hook_first(tensor, functools.partial(_announce, me, index)) for index, tensor in enumerate(distinct)
        ]

    def arrived(self, index: int) -> None:
        """The gradient of input ``index`` has arrived."""
        task = compat.graph_task_id()
        # A pass that died, or that did not reach all inputs, leaves no count behind for the next one.
        if task != self._task:
            self._task = task
            self._missing = set(self._all)
        self._missing.discard(index)
        if not self._missing:
            self._done(self._tie.unit())

    def __del__(self) -> None:
        # An input may live on with the next step's graph: a hook that stays would be called there for nothing.
        for handle in self._handles:
            handle.remove()


def _announce(watch: weakref.ref[InputsWatch], index: int, grad: Tensor) -> None:
    found = watch()
    # None: the watch's graph has been freed, and this gradient comes from another use of the input.
    if found is not None:
        found.arrived(index)
