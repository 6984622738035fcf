"""Clipping gradients by their total norm."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from fsdp_testing.cases.operations.operation import GRADIENTS_ALIKE, Operation

if TYPE_CHECKING:
    from fsdp_testing.cases.drawing.normal_form import ProgramContext
    from fsdp_testing.cases.drawing.operation_drawer import OperationDrawer
    from fsdp_testing.oracle.execute import RankProgram, Values
    from fsdp_testing.oracle.replay import Replay, Results

_NORMS = (2.0, 1.0, math.inf, 3.0)


@dataclass(frozen=True, slots=True)
class Clip(Operation):
    """Clips the gradients by their total norm; `norm_type` is any p >= 1, infinity included."""

    kind: ClassVar[str] = "clip"
    needs: ClassVar[frozenset[str]] = frozenset({"clip_grad_norm"})
    passes: ClassVar[int | None] = None
    features: ClassVar[Mapping[str, tuple[str, ...]]] = {"op.clip": ("clip_grad_norm",)}
    share: ClassVar[int] = 2
    forbidden_while_pending: ClassVar[str] = GRADIENTS_ALIKE
    max_norm: float
    norm_type: float = 2.0

    @classmethod
    def draw(cls, drawer: OperationDrawer) -> Clip:
        return cls(drawer.choices.pick((0.5, 0.01, 1e6)), drawer.choices.pick(_NORMS))

    def normalise(self, context: ProgramContext) -> Operation | None:
        # torch's own clipping of plain tensors knows no largest element of none.
        return replace(self, norm_type=2.0) if math.isinf(self.norm_type) and context.has_empty else self

    def simpler(self) -> Iterator[Operation]:
        yield Clip(0.5, 2.0)

    def token(self) -> str:
        return f"{self.kind}[inf]" if math.isinf(self.norm_type) else self.kind

    def script_lines(self, name: str) -> list[str] | None:
        return [f"yield {name!r}, one.clip({self.max_norm!r}, float({str(self.norm_type)!r}))"]

    def run(self, program: RankProgram) -> Values:
        norm = program.adapter.clip_grad_norm(program.model, self.max_norm, self.norm_type)
        return {"total_norm": norm.detach().clone()}

    def replay(self, replay: Replay) -> Results:
        from torch.nn.utils import clip_grad_norm_

        parameters = [parameter for parameter in replay.parameters.values() if parameter.grad is not None]
        norm = clip_grad_norm_(parameters, self.max_norm, self.norm_type)
        count = sum(parameter.numel() for parameter in parameters)
        replay.disturbance.clip(parameters, count)
        unit = replay.unit_roundoff(norm)
        why = f"{count} elements in the norm, in any order"
        values: Results = {}
        for rank in range(replay.size):
            values |= replay.result(rank, "total_norm", norm)
            replay.allow("result", "total_norm", float(norm.detach().abs()) * (count + 4) * unit, why, rank=rank)
        for fqn, parameter in replay.parameters.items():
            if parameter.grad is not None:
                replay.allow("gradient", fqn, parameter.grad.detach().abs() * ((count + 8) * unit), why)
        return values
