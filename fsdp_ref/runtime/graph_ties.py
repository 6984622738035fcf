"""How do a unit and the autograd graph know of each other without keeping each other alive for ever?

The collector does not see references that go through autograd's nodes, so a cycle through one is never freed. Hence:
units hold nothing that leads to a graph (views are remembered weakly; the graph's own hooks hold them), and a graph
holds its units only until backward has gone through it, or the forward that made it has failed (:class:`GraphTie`): a
model may be dropped before backward, and a module may store a tensor with its graph.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fsdp_ref import compat
from fsdp_ref.errors import FsdpRuntimeError
from fsdp_ref.storage.precision import map_tensors

if TYPE_CHECKING:
    from fsdp_ref.runtime.unit import Unit


class GraphTie:
    """What the graph of one forward pass holds of one unit."""

    __slots__ = ("_held", "_unit")

    def __init__(self, unit: Unit) -> None:
        self._unit = weakref.ref(unit)
        self._held: Unit | None = unit

    @property
    def fast(self) -> bool:
        """Whether the tie keeps its unit alive."""
        return self._held is not None

    def loosen(self) -> None:
        """A backward pass went through the graph: do not keep the unit alive any longer."""
        self._held = None

    def unit(self) -> Unit:
        """Return the unit, for a backward pass that runs now; the pass loosens the tie when it ends.

        Raises:
            FsdpRuntimeError: the model is gone.
        """
        unit = self._unit()
        if unit is None:
            raise FsdpRuntimeError(
                "backward through a sharded module: expected the model to be alive, got one that was deleted after an "
                "earlier backward pass through the same graph, or after the forward pass that made it had failed. "
                "Keep a reference to the model."
            )
        if unit.root is not None:
            unit.root.went_through(self)
        return unit


class PassRecord:
    """What one unit needs of one forward pass for as long as the graph of it lives; hooks on its outputs hold it.

    Attributes:
        views: the views of the full parameters that the pass computed with.
        round: the forward pass of the whole tree.
        tracked: whether autograd tracks the views.
        watch: tells when the gradients of the inputs are there, for units that train nothing.
    """

    __slots__ = ("__weakref__", "round", "tracked", "views", "watch")

    def __init__(self, views: list[Tensor], of_round: int, *, tracked: bool) -> None:
        self.views = views
        self.round = of_round
        self.tracked = tracked
        self.watch: InputsWatch | None = None


class GraphSide:
    """What a unit holds of autograd graphs: the tie of the present forward pass, and its record as long as that lives."""

    __slots__ = ("_record", "_tie", "_unit")

    def __init__(self, unit: Unit) -> None:
        self._unit = unit
        self._tie: GraphTie | None = None
        self._record: weakref.ref[PassRecord] | None = None

    def tie(self) -> GraphTie:
        """Return what the graph of the present forward pass holds of the unit."""
        if self._tie is None or not self._tie.fast:
            self._tie = GraphTie(self._unit)
        return self._tie

    def loosen(self) -> None:
        """The forward pass was given up: what is left of its graph does not keep the unit alive."""
        if self._tie is not None:
            self._tie.loosen()

    def new_round(self) -> None:
        """A new forward of the whole tree begins: it makes a graph of its own."""
        self._tie = None

    @property
    def record(self) -> PassRecord | None:
        """The latest forward pass, while its graph lives: the unit may run again in it, and backward may run it again."""
        return None if self._record is None else self._record()

    def remember(self, record: PassRecord) -> None:
        """Know a forward pass for as long as somebody else (an open call, the graph) holds its record."""
        self._record = weakref.ref(record)

    def forget(self) -> None:
        """Compute with other views from now on."""
        self._record = None


class TakenInputs:
    """The inputs of one forward call that require grad, to know them again among its outputs."""

    __slots__ = ("_taken",)

    def __init__(self, *values: Any) -> None:
        self._taken: dict[int, tuple[Tensor, int]] = {}
        if torch.is_grad_enabled():
            for value in values:
                map_tensors(value, self._take)

    def _take(self, tensor: Tensor) -> Tensor:
        if tensor.requires_grad:
            self._taken[id(tensor)] = tensor, tensor._version
        return tensor

    def gives_back(self, output: Tensor) -> bool:
        """Whether an output is one of the inputs as it came; one that was changed in place since is not."""
        _, version = self._taken.get(id(output), (None, -1))
        return version == output._version


class OutputHook:
    """Runs when the gradient of an output is there."""

    __slots__ = ("_pre_backward", "_record", "_tie")

    def __init__(self, tie: GraphTie, record: PassRecord | None, pre_backward: Callable[[Unit], None]) -> None:
        self._tie = tie
        self._record = record
        self._pre_backward = pre_backward

    def __call__(self, grad: Tensor) -> None:
        self._pre_backward(self._tie.unit())


class InputsWatch:
    """Tells once per backward pass when the gradients of all inputs of a unit have arrived.

    The hooks on the inputs hold the watch weakly, and they go with it: an input may outlive the graph (a prompt that
    is trained in front of a frozen model is the same tensor in every step). They run before whatever else waits for
    the same gradients, which may need memory that this unit gives back.

    Args:
        tie: the unit.
        tensors: its inputs that require grad.
        done: what to do then.
    """

    def __init__(self, tie: GraphTie, tensors: list[Tensor], done: Callable[[Unit], None]) -> None:
        self._tie = tie
        self._done = done
        distinct = list({id(tensor): tensor for tensor in tensors}.values())
        self._all = frozenset(range(len(distinct)))
        self._missing = set(self._all)
        self._task = -1
        me = weakref.ref(self)
        self._handles = [
            compat.hook_first(tensor, functools.partial(_tell, me, index)) for index, tensor in enumerate(distinct)
        ]

    def arrived(self, index: int) -> None:
        """The gradient of input ``index`` is there."""
        task = compat.graph_task_id()
        if task != self._task:
            self._task = task
            self._missing = set(self._all)
        self._missing.discard(index)
        if not self._missing:
            self._done(self._tie.unit())

    def __del__(self) -> None:
        for handle in self._handles:
            handle.remove()


def _tell(watch: weakref.ref[InputsWatch], index: int, grad: Tensor) -> None:
    found = watch()
    if found is not None:
        found.arrived(index)
