"""An operation of a user on the gradients of some parameters, while other gradients stay."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

from fsdp_testing.cases.operations import user_code
from fsdp_testing.cases.operations.operation import GRADIENTS_ALIKE, OfPatterns, Operation, matching
from fsdp_testing.errors import InvalidRecord

if TYPE_CHECKING:
    from fsdp_testing.cases.drawing.features import Swarm
    from fsdp_testing.cases.drawing.operation_drawer import OperationDrawer
    from fsdp_testing.oracle.execute import RankProgram
    from fsdp_testing.oracle.replay import Replay

EDITS = ("zeros", "none", "halved", "replaced", "given")


@dataclass(frozen=True, slots=True)
class EditGradients(OfPatterns):
    """Changes the reduced gradients of the parameters that match; other gradients stay.

    Attributes:
        patterns: Patterns of the parameters' names.
        edit: `zeros` and `halved` in place; `none` by `p.grad = None`; `replaced` by a new tensor with half the numbers; `given`
            by a new tensor of constants, also where there was no gradient.
    """

    kind: ClassVar[str] = "edit_gradients"
    needs: ClassVar[frozenset[str]] = frozenset({"gradient_edits"})
    passes: ClassVar[int | None] = 0
    forbidden_while_pending: ClassVar[str] = GRADIENTS_ALIKE
    edit: str = "zeros"

    def __post_init__(self) -> None:
        if self.edit not in EDITS:
            raise InvalidRecord(f"EditGradients.edit: expected one of {EDITS}, got {self.edit!r}. Choose one of them.")

    @classmethod
    def weight(cls, swarm: Swarm) -> int:
        return 0  # so that a campaign's seed still gives the same case; `run --pairs` asks every pair

    @classmethod
    def draw(cls, drawer: OperationDrawer) -> EditGradients:
        return cls(drawer.patterns(), drawer.choices.pick(EDITS))

    def simpler(self) -> Iterator[Operation]:
        yield replace(self, patterns=("*",))
        yield replace(self, edit="zeros")

    def token(self) -> str:
        return f"{self.kind}[{self.edit}]"

    def run(self, program: RankProgram) -> None:
        if "full_gradients" in program.case.wrapping.settings:
            with program.adapter.full_parameters(program.model, writeback=True) as full:
                gathered: Any = matching(full.items(), self.patterns)
                user_code.edit_gradients([parameter for _, parameter in gathered], self.edit)
            return
        chosen = matching(program.adapter.named_parameters(program.model), self.patterns)
        user_code.edit_gradients([parameter for _, parameter in chosen], self.edit)

    def replay(self, replay: Replay) -> None:
        chosen = matching(replay.parameters.items(), self.patterns)
        user_code.edit_gradients([parameter for _, parameter in chosen], self.edit)
