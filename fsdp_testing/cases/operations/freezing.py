"""Freezing and thawing parameters while training goes on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Self

from fsdp_testing.cases.operations.operation import OfPatterns, matching

if TYPE_CHECKING:
    from fsdp_testing.cases.drawing.operation_drawer import OperationDrawer
    from fsdp_testing.oracle.execute import RankProgram
    from fsdp_testing.oracle.replay import Replay


@dataclass(frozen=True, slots=True)
class Freeze(OfPatterns):
    """Sets `requires_grad=False` on the parameters whose name matches one of the patterns (fnmatch)."""

    kind: ClassVar[str] = "freeze"
    needs: ClassVar[frozenset[str]] = frozenset({"frozen_parameters", "thawed_parameters"})
    passes: ClassVar[int | None] = 0
    features: ClassVar[Mapping[str, tuple[str, ...]]] = {"op.freeze": ("frozen_parameters", "thawed_parameters")}
    flag: ClassVar[bool] = False

    def requires_grad_change(self) -> tuple[tuple[str, ...], bool] | None:
        return self.patterns, self.flag

    @classmethod
    def draw(cls, drawer: OperationDrawer) -> Self:
        return cls(drawer.patterns())

    def script_lines(self, name: str) -> list[str] | None:
        return [f"for p in matching(one.named(), {self.patterns!r}):", f"    p.requires_grad_({self.flag})"]

    def run(self, program: RankProgram) -> None:
        program.set_requires_grad(self.patterns, self.flag)

    def replay(self, replay: Replay) -> None:
        for fqn, parameter in matching(replay.parameters.items(), self.patterns):
            parameter.requires_grad_(self.flag)
            replay.compute[fqn].requires_grad_(self.flag)


@dataclass(frozen=True, slots=True)
class Thaw(Freeze):
    """Sets `requires_grad=True` on the parameters whose name matches one of the patterns (fnmatch)."""

    kind: ClassVar[str] = "thaw"
    needs: ClassVar[frozenset[str]] = frozenset({"thawed_parameters"})
    flag: ClassVar[bool] = True

    def changes_ignored(self) -> tuple[str, ...]:
        return self.patterns
