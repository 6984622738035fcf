"""What may vary in a case besides its model and its program: each axis is one class that holds everything about it.

An axis defines the capabilities of its values, the legal values, how it is drawn, its names in tags, sentences and scripts,
how it becomes simpler, whether the numbers of one process depend on it, and what an implementation is told about it.
Drawing, shrinking, reporting and running go through `AXES` (`cases/records/axes`). Facts that depend on the modules of a tree
(which layouts have a meaning, which units are optional) are in `cases/drawing` and `judging/tags.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from fsdp_testing.cases.drawing.choices import Choices
    from fsdp_testing.cases.drawing.features import Swarm
    from fsdp_testing.cases.records.case import Case

Step = tuple[tuple[Any, ...], "Case"]
"""One simplification: a key that no other step of the case has, and the simpler case."""


class Axis:
    """Base of all axes; the methods' defaults change nothing.

    Attributes:
        features: Features that must be on to draw a value that is not plain, each with the capabilities that it needs.
        rare: Its features are switched on less often: they make others unreachable, or slow.
        over_one_axis: Its features are not drawn when several ranks share one model.
        scripted: Scripts that show a failure with torch alone support the values that need a capability.
    """

    features: Mapping[str, tuple[str, ...]] = {}
    rare: ClassVar[bool] = False
    over_one_axis: ClassVar[bool] = False
    scripted: ClassVar[bool] = False

    def needs(self, case: Case) -> Iterable[str]:
        """Return the capabilities that the case's value needs."""
        return ()

    def problems(self, case: Case) -> Iterable[str]:
        """Return what is wrong with the case's value: `field: expected ..., got ...`."""
        return ()

    def draw(self, case: Case, choices: Choices, swarm: Swarm) -> Case:
        """Return the case with a drawn value."""
        return case

    def tags(self, case: Case) -> Iterable[str]:
        """Return the words that rules and reports have for the value."""
        return ()

    def simpler(self, case: Case) -> Iterable[Step]:
        """Return the ways in which the value becomes simpler, the boldest first."""
        return ()

    def plain(self, case: Case) -> Case:
        """Return the case with the simplest value, if that leaves the model and its units unchanged."""
        return case

    def for_oracle(self, case: Case) -> Case:
        """Return the case with the simplest value, if the numbers of one process do not depend on it."""
        return case

    def text(self, case: Case) -> str:
        """Return the value's name in a sentence; empty for a usual value."""
        return ""

    def setup(self, case: Case) -> Mapping[str, Any]:
        """Return the fields of `adapters.protocol.Setup` that tell an implementation the value."""
        return {}


def demand(name: str, value: Any, known: Iterable[Any]) -> Iterator[str]:
    """Yield what is wrong with a field unless its value is a known one."""
    if value not in known:
        yield f"{name}: expected one of {', '.join(known)}, got {value!r}"


def planned(case: Case, **changes: Any) -> Case:
    """Return the case with fields of its wrapping plan changed."""
    return replace(case, wrapping=replace(case.wrapping, **changes))


@dataclass(frozen=True)
class Option(Axis):
    """An option of wrapping: one field of `WrappingPlan`, which needs one capability.

    Attributes:
        field: Field of the plan.
        claim: The capability.
        values: The plain one first.
        feature: Its feature when drawn; empty for an option that only checks use.
        meaning: Meaning of the capability, if `CAPABILITIES` lacks it.
        told: A field of `Setup` has the same name and value.
    """

    field: str
    claim: str
    values: tuple[Any, ...] = (False, True)
    feature: str = ""
    meaning: str = ""
    told: bool = True
    rare: ClassVar[bool] = True
    over_one_axis: ClassVar[bool] = True  # ranks of one model begin alike, and on the CPU

    @property
    def features(self) -> Mapping[str, tuple[str, ...]]:  # type: ignore[override]  # a property in place of an attribute that nobody sets
        return {self.feature: (self.claim,)} if self.feature else {}

    def value(self, case: Case) -> Any:
        return getattr(case.wrapping, self.field)

    def needs(self, case: Case) -> Iterable[str]:
        return (self.claim,) if self.value(case) != self.values[0] else ()

    def problems(self, case: Case) -> Iterable[str]:
        return demand(f"wrapping.{self.field}", self.value(case), self.values)

    def draw(self, case: Case, choices: Choices, swarm: Swarm) -> Case:
        if self.feature not in swarm:
            return case
        others = self.values[1:]
        return planned(case, **{self.field: choices.pick(others) if len(others) > 1 else others[0]})

    def tags(self, case: Case) -> Iterable[str]:
        return (f"{self.field}:{self.value(case)}",) if len(self.values) > 2 and list(self.needs(case)) else ()

    def simpler(self, case: Case) -> Iterable[Step]:
        if self.value(case) != self.values[0]:
            yield ("wrapping", f".{self.field}"), planned(case, **{self.field: self.values[0]})

    def setup(self, case: Case) -> Mapping[str, Any]:
        return {self.field: self.value(case)} if self.told else {}
