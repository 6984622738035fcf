"""Marked points of a program."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from fsdp_testing.cases.operations.operation import Silent

if TYPE_CHECKING:
    from fsdp_testing.oracle.execute import RankProgram
    from fsdp_testing.oracle.replay import Replay


@dataclass(frozen=True, slots=True)
class Observe(Silent):
    """A marked point: every rank reports its local pieces here, without communication or change of state."""

    kind: ClassVar[str] = "observe"
    features: ClassVar[Mapping[str, tuple[str, ...]]] = {"op.observe": ()}
    observes: ClassVar[bool] = True
    label: str = ""

    def script_lines(self, name: str) -> list[str] | None:
        return []

    def run(self, program: RankProgram) -> None:
        """Do nothing: who runs the program takes the snapshot."""

    def replay(self, replay: Replay) -> None:
        """Do nothing: who runs the program takes the snapshot."""
