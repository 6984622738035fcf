"""The link between a unit and the autograd graph, which must not keep each other alive forever.

The collector does not see references that go through autograd's nodes, so a cycle through one is never freed. Hence:
units hold nothing that leads to a graph (views are remembered weakly; the graph's own hooks hold them), and a graph
holds its units only until backward has gone through it, or the forward that made it has failed (:class:`GraphTie`): a
model may be dropped before backward, and a module may store a tensor with its graph.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fsdp_ref.compat import version_of
from fsdp_ref.errors import FsdpRuntimeError

if TYPE_CHECKING:
    from fsdp_ref.autograd.graph_hooks import InputsWatch
    from fsdp_ref.runtime.unit import Unit


class GraphTie:
    """The reference of one forward pass's graph to one unit.

    Attributes:
        held: the unit, which the tie keeps alive; None once a backward pass has gone through the graph.
    """

    __slots__ = ("_unit", "held")

    def __init__(self, unit: Unit) -> None:
        self._unit = weakref.ref(unit)
        # Strongly until a backward has run: a function may build a model, and return only its loss.
        self.held: Unit | None = unit

    def loosen(self) -> None:
        """A backward pass went through the graph: do not keep the unit alive any longer."""
        self.held = None

    def unit(self) -> Unit:
        """Return the unit, for a backward pass that runs now; the pass loosens the tie when it ends.

        Raises:
            FsdpRuntimeError: the model was deleted.
        """
        unit = self._unit()
        if unit is None:
            raise FsdpRuntimeError(
                "backward through a sharded module: expected the model to be alive, got one that was deleted after an "
                "earlier backward pass through the same graph, or after the forward pass that made it had failed. "
                "Keep a reference to the model."
            )
        # Loosened at the end of the pass, not now: a pass may reach one unit several times.
        if unit.root is not None:
            unit.root.went_through(self)
        return unit


class PassRecord:
    """The state of one unit's forward pass, as long as its graph lives; hooks on its outputs hold it.

    Attributes:
        views: the views of the full parameters that the pass computed with.
        round: the forward pass of the whole tree.
        tracked: whether autograd tracks the views.
        aliases: what the views consist of: plain tensors over the full buffer.
        watch: reports when the gradients of the inputs have arrived, for units that train nothing.
    """

    __slots__ = ("__weakref__", "_nodes", "_versions", "aliases", "round", "tracked", "views", "watch")

    def __init__(self, views: list[Tensor], aliases: list[Tensor], of_round: int, *, tracked: bool) -> None:
        self.views = views
        self.aliases = aliases
        self._versions = [version_of(alias) for alias in aliases]
        self._nodes = [alias.grad_fn for alias in aliases]
        self.round = of_round
        self.tracked = tracked
        self.watch: InputsWatch | None = None

    def edited(self) -> list[int]:
        """Return which originals forward changed in place since the pass began, or since :meth:`accept_edits`."""
        return [i for i, (alias, was) in enumerate(zip(self.aliases, self._versions)) if version_of(alias) != was]

    def leads_to(self, tensor: Tensor) -> bool:
        """Return whether the views come from the node that this tensor comes from: it is one of them."""
        # A view of an extension (a DTensor) has a node of its own behind that of its alias.
        return any(tensor.grad_fn is node for node in (*self._nodes, *(view.grad_fn for view in self.views)))

    def tracked_anew(self, index: int) -> bool:
        """Return whether autograd tracked a change of this original, which was trained."""
        return self._nodes[index] is not None and self.aliases[index].grad_fn is not self._nodes[index]

    def accept_edits(self) -> None:
        """Accept the changes so far."""
        self._versions = [version_of(alias) for alias in self.aliases]


class GraphSide:
    """The unit's side of its link to autograd: the current tie, and weak references to the records of the latest passes."""

    __slots__ = ("_gradient_record", "_record", "_tie", "_unit")

    def __init__(self, unit: Unit) -> None:
        self._unit = unit
        self._tie: GraphTie | None = None
        self._record: weakref.ref[PassRecord] | None = None
        self._gradient_record: weakref.ref[PassRecord] | None = None

    def tie(self) -> GraphTie:
        """Return the tie of the current forward pass's graph."""
        # One for all graphs of a round: one backward through any of them loosens it, and a later forward makes a new one.
        if self._tie is None or self._tie.held is None:
            self._tie = GraphTie(self._unit)
        return self._tie

    def loosen(self) -> None:
        """The forward pass was abandoned: the rest of its graph does not keep the unit alive."""
        if self._tie is not None:
            self._tie.loosen()

    def new_round(self) -> None:
        """A new forward of the whole tree begins: it makes a graph of its own."""
        self._tie = None

    @property
    def record(self) -> PassRecord | None:
        """The latest forward pass, while its graph lives: the unit may run again in it."""
        return None if self._record is None else self._record()

    @property
    def gradient_record(self) -> PassRecord | None:
        """The latest forward pass that ran with gradients on, while its graph lives: backward may run it again."""
        return None if self._gradient_record is None else self._gradient_record()

    def remember(self, record: PassRecord) -> None:
        """Remember a forward pass as long as an open call or the graph holds its record."""
        # Weakly: the unit must not lead to a graph (see above).
        self._record = weakref.ref(record)
        # A pass under no_grad has no backward: it leaves alone what the backward of an earlier pass runs again.
        if torch.is_grad_enabled():
            self._gradient_record = self._record

    def forget(self) -> None:
        """Compute with other views from now on; backward of an earlier pass still runs that pass again."""
        self._record = None
