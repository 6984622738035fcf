"""Moving and casting a whole model that is already wrapped."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from fsdp_testing.cases.operations.operation import Operation

if TYPE_CHECKING:
    from fsdp_testing.cases.drawing.normal_form import ProgramContext
    from fsdp_testing.oracle.execute import RankProgram
    from fsdp_testing.oracle.replay import Replay


@dataclass(frozen=True, slots=True)
class Move(Operation):
    """`module.to` the device where it is already, which touches every parameter and must change none.

    Attributes:
        dtype: `module.to` this dtype as well, for good: inputs have it from here on. Gradients and the optimizer are
            not carried over, so it comes before both.
    """

    kind: ClassVar[str] = "move"
    passes: ClassVar[int | None] = None
    features: ClassVar[Mapping[str, tuple[str, ...]]] = {"op.move": (), "op.cast": ("dtype_cast", "late_optimizer")}
    drawn_with: ClassVar[tuple[str, ...]] = ("op.move",)
    dtype: str | None = None

    def required(self) -> frozenset[str]:
        return frozenset({"dtype_cast"} if self.dtype else ())

    def new_dtype(self) -> str | None:
        return self.dtype

    def normalise(self, context: ProgramContext) -> Operation | None:
        # Only what is the first thing done with a model has one meaning for everyone.
        return self if not self.dtype or (context.begins and context.may_be_cast(self.dtype)) else Move()

    def simpler(self) -> Iterator[Operation]:
        return iter(())

    def token(self) -> str:
        return f"{self.kind}[{self.dtype}]" if self.dtype else self.kind

    def script_lines(self, name: str) -> list[str] | None:
        return None if self.dtype else ['one.model.to("cpu")']

    def run(self, program: RankProgram) -> None:
        program.model.to(next(program.model.parameters()).device)
        if self.dtype is not None:
            program.case = replace(program.case, model=replace(program.case.model, dtype=self.dtype))
            program.model.to(program.dtype)

    def replay(self, replay: Replay) -> None:
        if self.dtype is not None:
            replay.case = replace(replay.case, model=replace(replay.case.model, dtype=self.dtype))
            replay.cast()
