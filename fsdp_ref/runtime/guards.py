"""The moments at which the core lets guards look at a tree of units.

A guard finds mistakes of users: ranks that run different units, modules that come after sharding, edits that would be lost.
It raises or it does nothing; no number depends on one. The core knows this protocol and no guard. ``fsdp_ref.fence`` has the
guards and puts them into :data:`TREE_GUARDS` and :data:`UNIT_WATCHES`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from fsdp_ref.autograd.graph_ties import PassRecord
    from fsdp_ref.runtime.root import Root
    from fsdp_ref.runtime.unit import Unit


class Traffic(IntEnum):
    """What a unit sends to other ranks."""

    GATHER = 0
    REDUCE = 1


class Guard:
    """Watches one tree. A moment that a class does not override is never called, so it costs nothing.

    Args:
        root: the tree. Its units are known by now.
    """

    def __init__(self, root: Root) -> None:
        self.root = root

    def tree_used(self) -> None:
        """A forward of the tree begins, or a user asks for full parameters; nothing was gathered for it yet."""

    def forward_begins(self) -> None:
        """The outermost forward of the tree begins; before :meth:`tree_used`."""

    def unit_begins(self, unit: Unit) -> None:
        """A forward of ``unit`` begins, and is the latest in the recorded order; its gather comes next."""

    def sends(self, unit: Unit, traffic: Traffic) -> None:
        """A collective of ``unit`` over several ranks was issued."""

    def unit_computed(self, unit: Unit, record: PassRecord) -> None:
        """The module's forward has returned; its edits of parameters are not kept yet."""

    def edits_kept(self, unit: Unit, edited: Sequence[int]) -> None:
        """In-place edits of these parameters, made in forward, were written to the shard; full parameters are still there."""

    def unit_ends(self, unit: Unit) -> None:
        """The forward of ``unit`` ended, well or not; full parameters that it computed with are still there."""

    def reductions_issued(self) -> None:
        """All reductions of a backward pass are under way. What is sent now travels behind them."""

    def gradients_ready(self) -> None:
        """Gradients are reduced and not yet shown to users."""

    def backward_failed(self) -> None:
        """A backward pass died; what it left under way has been waited for."""


TREE_GUARDS: Final[list[Callable[[Root], Guard]]] = []
"""Makers of the guards of a tree, called when its root is made."""

UNIT_MADE: Final[list[Callable[[Unit], None]]] = []
"""Called with each unit when it is made, by layers above that give it what is theirs (the hooks of state dicts)."""

UNIT_WATCHES: Final[list[Callable[[Unit], None]]] = []
"""The same for guards."""


class Guards:
    """The guards of one tree (``members``), and for each moment the methods to call, in the order of :data:`TREE_GUARDS`."""

    def __init__(self, guards: Sequence[Guard] = ()) -> None:
        self.members = tuple(guards)
        # By name, once for each tree: an unwatched moment is an empty list in the hot path.
        self.tree_used = [g.tree_used for g in guards if _overrides(g, "tree_used")]
        self.forward_begins = [g.forward_begins for g in guards if _overrides(g, "forward_begins")]
        self.unit_begins = [g.unit_begins for g in guards if _overrides(g, "unit_begins")]
        self.sends = [g.sends for g in guards if _overrides(g, "sends")]
        self.unit_computed = [g.unit_computed for g in guards if _overrides(g, "unit_computed")]
        self.edits_kept = [g.edits_kept for g in guards if _overrides(g, "edits_kept")]
        self.unit_ends = [g.unit_ends for g in guards if _overrides(g, "unit_ends")]
        self.reductions_issued = [g.reductions_issued for g in guards if _overrides(g, "reductions_issued")]
        self.gradients_ready = [g.gradients_ready for g in guards if _overrides(g, "gradients_ready")]
        self.backward_failed = [g.backward_failed for g in guards if _overrides(g, "backward_failed")]


def _overrides(guard: Guard, moment: str) -> bool:
    return getattr(type(guard), moment) is not getattr(Guard, moment)
