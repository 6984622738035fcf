"""A case determines a run exactly: one case is one value, and one value is one JSON document.

The same case gives the same collectives and the same numbers on every run. A case names no implementation: any
of them can run it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from fsdp_testing.base.document import Format, decode, register_union
from fsdp_testing.cases.operations import OPERATIONS, Operation
from fsdp_testing.cases.records.axes import AXES
from fsdp_testing.cases.records.specs import (
    LOW_DTYPES,
    MixedPrecisionSpec,
    ModelSpec,
    OptimizerSpec,
    WorldSpec,
    WrappingPlan,
)
from fsdp_testing.errors import InvalidRecord

FORMAT = Format("fsdp_testing/case", 1)

register_union(Operation, OPERATIONS.get)


@dataclass(frozen=True, slots=True)
class Case:
    """Everything that determines a run, except the implementation."""

    model: ModelSpec
    world: WorldSpec
    program: tuple[Operation, ...]
    seed: int = 0
    wrapping: WrappingPlan = WrappingPlan()
    strategy: str = "full_shard"
    mixed_precision: MixedPrecisionSpec | None = None
    cpu_offload: bool = False
    optimizer: OptimizerSpec = OptimizerSpec()

    def without_operation(self, index: int) -> Case:
        """Return this case without operation `index`; the result is always legal."""
        return replace(self, program=self.program[:index] + self.program[index + 1 :])

    def required(self) -> frozenset[str]:
        """Return the capabilities that an implementation must claim to run this case."""
        axes = (axis.needs(self) for axis in AXES)
        needs = frozenset().union(*axes, *(operation.required() for operation in self.program))
        return needs - {"unused_parameters_differ"} if "zeros_for_unused" in needs else needs

    @property
    def low_precision(self) -> bool:
        """Whether some numbers have few digits, so that each operation is judged from the state before it."""
        return self.mixed_precision is not None or self.model.dtype in LOW_DTYPES

    @property
    def identity(self) -> str:
        """Twelve hex digits that name this case in reports and file names."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()[:12]

    def to_json(self, *, indent: int | None = None) -> str:
        """Return the case as a JSON document; `Case.from_json` gives back an equal case."""
        return FORMAT.write(self, indent=indent)

    @classmethod
    def from_json(cls, document: str | Mapping[str, Any], where: str = "case") -> Case:
        """Read a case from text, or from parsed JSON.

        Raises:
            InvalidRecord: The document is damaged, newer than this version, or describes no legal case.
        """
        case = decode(cls, FORMAT.read(document, where), where)
        check_case(case, where)
        return case


def check_case(case: Case, where: str = "case") -> None:
    """Check what must hold for a case as a whole, whatever its program.

    Raises:
        InvalidRecord: Every offender is listed.
    """
    problems = [problem for axis in AXES for problem in axis.problems(case)]
    if problems:
        raise InvalidRecord(f"{where}.{'; '.join(problems)}. Fix the document.")
