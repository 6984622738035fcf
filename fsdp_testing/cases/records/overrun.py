"""What an operation costs beyond what the strategy promises: facts, of which the sentence is made."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from fsdp_testing.base.document import ADDED_LATER
from fsdp_testing.cases.records.failure import FailureKind


class Measure(enum.StrEnum):
    """What is counted."""

    KEPT_PARAMETERS = "kept_parameters"
    """Bytes of full parameters that are in memory when the operation is over."""
    UNIT_GATHERS = "unit_gathers"
    """How often one unit is gathered."""
    GATHERED_BYTES = "gathered_bytes"
    """Bytes that all-gathers give on one rank."""
    REDUCTIONS = "reductions"
    """How often gradients are reduced."""


_QUANTITIES = {
    Measure.KEPT_PARAMETERS: "full parameters",
    Measure.UNIT_GATHERS: "gathers",
    Measure.GATHERED_BYTES: "gathers",
    Measure.REDUCTIONS: "reductions",
}


@dataclass(frozen=True, slots=True)
class Overrun:
    """More memory or communication than one operation may take.

    Attributes:
        measure: What is counted.
        operation: In which operation, or after which for memory; -1 for wrapping.
        rank: On which rank.
        measured: How much it is, in bytes or times; 0 for memory whose bytes nobody knows.
        limit: How much there may be, in the same unit.
        units: Units concerned (FQN, the root's is empty), each with its bytes (0: not known); empty where the whole
            model is meant.
        before: All of `units` were gathered when the operation began, and it gathered none of them itself.
    """

    measure: Measure
    operation: int
    rank: int
    measured: int
    limit: int
    units: tuple[tuple[str, int], ...] = ()
    before: bool = field(default=False, metadata=ADDED_LATER)

    @property
    def kind(self) -> FailureKind:
        """Kind of failure: `kept` (memory) or `excess` (communication)."""
        return FailureKind.KEPT if self.measure is Measure.KEPT_PARAMETERS else FailureKind.EXCESS

    @property
    def quantity(self) -> str:
        """Of what there is too much: `full parameters`, `gathers`, `reductions`."""
        return _QUANTITIES[self.measure]

    @property
    def sentence(self) -> str:
        """All of it in words."""
        if self.measure is Measure.KEPT_PARAMETERS:
            units = ", ".join(f"{unit or '(root)'}{f' ({size} bytes)' if size else ''}" for unit, size in self.units)
            return f"full parameters stay gathered on rank {self.rank}: {units}"
        if self.measure is Measure.UNIT_GATHERS:
            unit = self.units[0][0] or "(root)"
            return f"unit {unit} is gathered {self.measured} times on rank {self.rank}, {self.limit} would do"
        if self.measure is Measure.GATHERED_BYTES:
            most = f"{self.limit} with all padding would do"
            return f"{self.measured} bytes are gathered on rank {self.rank}, {most}"
        return f"{self.measured} reductions are issued on rank {self.rank}, {self.limit} would do"

    @property
    def more(self) -> str:
        """By how much, whatever the unit and the rank; empty for memory."""
        times = self.measured - self.limit
        stays = "what was gathered before the operation stays" if self.before else "what the operation gathers stays"
        return {
            Measure.KEPT_PARAMETERS: stays,
            Measure.UNIT_GATHERS: f"a unit is gathered {times} times more than would do",
            Measure.GATHERED_BYTES: f"{times} bytes more are gathered than would do",
            Measure.REDUCTIONS: f"gradients are reduced {times} times more than would do",
        }[self.measure]
