"""What would one process have to do to give these wrong numbers?

The oracle runs the program again with one operation left out. Where the implementation's numbers are, within the bound,
what the oracle gives then, that operation had no effect: a step that the weights in use do not show, a micro-batch whose
gradient is lost. The same for gradients that are a sum, or divided twice, and for units that kept their weights over a
step while others did not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from fsdp_testing.checkers import agreement
from fsdp_testing.checkers.comparison import Comparison
from fsdp_testing.checkers.quantities import Expectation, Expected, ExpectedPoint, Quantity
from fsdp_testing.records import Case, Freeze, RankObservation

Oracle = Callable[[Case], Expectation]
"""Runs a case in one process, freely, and looks after every operation."""

UnshardedUnits = Callable[[int], Mapping[str, Sequence[str]]]
"""Units that are gathered when an operation begins, with the names of their parameters."""

Values = dict[Quantity, Expected]


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """What the wrong numbers are equal to.

    Attributes:
        left_out: Index of the operation without which one process gives the same; -1 if it is a factor.
        factor: The factor between the numbers and what is due; 1 if an operation had no effect.
        kinds: Sorts of the quantities that are alike (`result`, `gradient`, `value`, ...).
        units: Units for which alone the step `left_out` had no effect; empty if for all.
        rank: The rank whose inputs do not count; -1 if all do.
    """

    left_out: int
    factor: float
    kinds: frozenset[str]
    units: tuple[str, ...] = ()
    rank: int = -1


def contradict(one: Hypothesis | None, other: Hypothesis | None) -> bool:
    """Return whether both are known and cannot be the same defect, on schedules of the same shape."""
    if one is None or other is None:
        return False
    mine, theirs = ((like.left_out, like.factor, like.kinds, like.rank) for like in (one, other))
    return mine != theirs


class WrongNumbers:
    """The numbers of the first divergence of a case, and what they are compared with.

    Args:
        case: A case that diverges.
        ranks: What each rank reported, with a snapshot after every operation.
        comparison: How the check compares.
        oracle: Runs a case in one process.
    """

    def __init__(self, case: Case, ranks: Sequence[RankObservation], comparison: Comparison, oracle: Oracle) -> None:
        self._case = case
        self._ranks = ranks
        self._comparison = comparison
        self._oracle = oracle
        self._truth = oracle(case)
        self._index, self._wrong = agreement.wrong_numbers(self._truth, ranks, comparison)
        points = (p for p in self._truth.points if p.index == self._index and set(self._wrong) <= set(p.quantities))
        self._point = next(points, None) if self._wrong else None
        self._kinds = frozenset(quantity.kind for quantity in self._wrong)

    def hypothesis(self, unsharded: UnshardedUnits) -> Hypothesis | None:
        """Return what the numbers are equal to, or None if to nothing that is tried (in lockstep nothing is).

        Args:
            unsharded: Which units were gathered when an operation began.
        """
        if self._point is None or self._comparison.lockstep:
            return None
        point = self._point
        return (
            self._factor(point)
            or self._without_effect(point)
            or self._without_rank(point)
            or self._stale_units(point, unsharded)
        )

    def _factor(self, point: ExpectedPoint) -> Hypothesis | None:
        size = float(self._case.world.size)
        due = [(quantity, point.quantities[quantity]) for quantity in self._wrong]
        for factor in (size, 1.0 / size) if self._kinds == {"gradient"} else ():
            values = {
                quantity: Expected(
                    None if one.value is None else one.value * factor, one.bound * factor, one.derivation
                )
                for quantity, one in due
            }
            if self._agrees(values, point):
                return Hypothesis(-1, factor, self._kinds)
        return None

    def _without_effect(self, point: ExpectedPoint) -> Hypothesis | None:
        for left_out in range(min(self._index, len(self._case.program) - 1), -1, -1):
            if left_out == point.index and not point.snapshot:
                continue  # an operation that is left out gives no result
            other = self._oracle(self._case.without_operation(left_out))
            if self._agrees(self._values_at(other, point, point.index - 1), point):
                return Hypothesis(left_out, 1.0, self._kinds)
        return None

    def _without_rank(self, point: ExpectedPoint) -> Hypothesis | None:
        size = self._case.world.size
        for silent in range(size) if self._kinds == {"gradient"} and size > 1 else ():
            program = tuple(operation.without_rank(silent, size) for operation in self._case.program)
            other = self._oracle(replace(self._case, program=program))
            if self._agrees(self._values_at(other, point, point.index), point):
                return Hypothesis(-1, 1.0, self._kinds, rank=silent)
        return None

    def _stale_units(self, point: ExpectedPoint, unsharded: UnshardedUnits) -> Hypothesis | None:
        """Whether some units alone took no part in a step: those that were gathered when it was made.

        One process is made to do that by freezing their parameters before the gradients of this step come into being.
        """
        steps = [i for i, operation in enumerate(self._case.program[: self._index]) if operation.steps]
        for number, step in reversed(list(enumerate(steps))):
            units = unsharded(step)
            fqns = tuple(fqn for names in units.values() for fqn in names)
            if not fqns or self._kinds != {"result"}:
                continue
            begin = steps[number - 1] + 1 if number else 0
            program = (*self._case.program[:begin], Freeze(fqns), *self._case.program[begin:])
            other = self._oracle(replace(self._case, program=program))
            if self._agrees(self._values_at(other, point, point.index + 1), point):
                return Hypothesis(step, 1.0, self._kinds, tuple(units))
        return None

    def _values_at(self, other: Expectation, point: ExpectedPoint, index: int) -> Values:
        """What another run of the oracle says at the place of `point`, which has the number `index` there."""
        places = [p for p in other.points if p.snapshot == point.snapshot and p.index == index]
        if not places or not set(self._wrong) <= set(places[-1].quantities):
            return {}
        return {quantity: places[-1].quantities[quantity] for quantity in self._wrong}

    def _agrees(self, values: Values, point: ExpectedPoint) -> bool:
        if not values or any(expected.value is None for expected in values.values()):
            return False
        only = replace(self._truth, points=(replace(point, quantities=values),))
        return agreement.agrees(only, self._ranks, self._comparison)
