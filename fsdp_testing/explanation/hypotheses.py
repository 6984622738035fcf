"""What would one process have to do to give these wrong numbers?

The oracle runs the program again with one operation left out. Where the implementation's numbers are, within the bound,
what the oracle gives then, that operation had no effect, such as a step that the weights in use do not show. The same for
units that kept their weights over a step while others did not. A wrong gradient is taken apart into the terms that it is
the sum of (`contributions`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from fsdp_testing.checkers import agreement, gathered_state
from fsdp_testing.checkers.comparison import Comparison
from fsdp_testing.checkers.gathered_state import GatheredState
from fsdp_testing.checkers.quantities import Expectation, Expected, ExpectedPoint, Quantity
from fsdp_testing.explanation.contributions import Contributions, contributions
from fsdp_testing.explanation.norms import norm_of_what
from fsdp_testing.explanation.patterns import Pattern, pattern_of
from fsdp_testing.programs.gradient_terms import GradientTerm
from fsdp_testing.records import UNIT_ROUNDOFF, Case, FailureKind, Freeze, Mismatch, RankObservation

Oracle = Callable[[Case], Expectation]
"""Runs a case in one process, freely, and looks after every operation."""

Terms = Callable[[Case, int], Sequence[GradientTerm]]
"""What each backward added to gradients up to an operation, in one process."""

UnshardedUnits = Callable[[int], Mapping[str, Sequence[str]]]
"""Units that are gathered when an operation begins, with the names of their parameters."""

Values = dict[Quantity, Expected]

_SUMS = (Mismatch.NUMBERS, Mismatch.NONE, Mismatch.NOT_NONE)
"""In what a gradient differs that is another sum; of no terms at all, where it is None."""


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """What the wrong numbers are equal to.

    Attributes:
        left_out: Index of the operation without which one process gives the same; -1 if gradients are another sum.
        kinds: Sorts of the quantities that are alike (`result`, `gradient`, `value`, ...).
        units: Units for which alone the step `left_out` had no effect; empty if for all.
        contributions: What wrong gradients are the sum of.
        pattern: What they are like, element by element.
    """

    left_out: int
    kinds: frozenset[str]
    units: tuple[str, ...] = ()
    contributions: Contributions | None = None
    pattern: Pattern | None = None


def contradict(one: Hypothesis | None, other: Hypothesis | None) -> bool:
    """Return whether both are known and cannot be the same defect, on schedules of the same shape."""
    if one is None or other is None:
        return False
    mine, theirs = (
        (like.left_out, like.kinds, like.contributions and like.contributions.shape, like.pattern and like.pattern.kind)
        for like in (one, other)
    )
    return mine != theirs


class WrongNumbers:
    """The numbers of the first divergence of a case, and what they are compared with.

    Args:
        case: A case that diverges.
        ranks: What each rank reported, with a snapshot after every operation.
        comparison: How the check compares.
        oracle: Runs a case in one process.
        terms: Takes its gradients apart.
    """

    def __init__(
        self, case: Case, ranks: Sequence[RankObservation], comparison: Comparison, oracle: Oracle, terms: Terms
    ) -> None:
        self._case = case
        self._ranks = ranks
        self._comparison = comparison
        self._oracle = oracle
        self._terms = terms
        self._truth = oracle(case)
        self._index, self._wrong = agreement.wrong_numbers(self._truth, ranks, comparison)
        points = (p for p in self._truth.points if p.index == self._index and set(self._wrong) <= set(p.quantities))
        self._point = next(points, None) if self._wrong else None
        self._kinds = frozenset(quantity.kind for quantity in self._wrong)
        self._gradients = self._wrong_gradients()

    def hypothesis(self, unsharded: UnshardedUnits) -> Hypothesis | None:
        """Return what the numbers are equal to, or None if to nothing that is tried.

        In lockstep no operation is left out: each begins with the state that the implementation was in.

        Args:
            unsharded: Which units were gathered when an operation began.
        """
        found = self._contributions()
        if found is not None or self._point is None:
            return found
        if not self._comparison.lockstep:
            found = self._without_effect(self._point) or self._stale_units(self._point, unsharded)
        return found or self._norm(self._point) or self._pattern(self._point)

    def _wrong_gradients(self) -> dict[str, Expected]:
        """What the gradients should be that differ first: numbers, or zeros for None; empty if something else differs too."""
        divergences = agreement.compare(self._truth, self._ranks, self._comparison).divergences
        if any(one.quantity.kind != "gradient" or one.mismatch not in _SUMS for one in divergences):
            return {}
        names = {one.quantity for one in divergences if one.kind is not FailureKind.MISSING}
        point = next((p for p in self._truth.points if names and p.index == divergences[0].index and p.snapshot), None)
        if point is None:
            return {}
        self._index = point.index
        bound = max(float(torch.as_tensor(one.bound).max()) for one in point.quantities.values())
        return {
            quantity.name: Expected(torch.zeros(self._truth.shapes[quantity.name]), bound) if one.value is None else one
            for quantity, one in point.quantities.items()
            if quantity in names
        }

    def _contributions(self) -> Hypothesis | None:
        if not self._gradients:
            return None
        found = contributions(
            self._index, self._gradients, self._ranks, self._terms(self._case, self._index), self._unit_roundoff()
        )
        return None if found is None else Hypothesis(-1, frozenset({"gradient"}), contributions=found)

    def _unit_roundoff(self) -> float:
        """That of the narrowest dtype of a reduction; 0 where bounds allow for any order of the same sum."""
        if not self._comparison.lockstep:
            return 0.0
        asked, stored = self._case.mixed_precision, self._case.model.dtype
        wire = stored if asked is None else asked.reduce_dtype or asked.param_dtype or stored
        return max(UNIT_ROUNDOFF[stored], UNIT_ROUNDOFF[wire])

    def _without_effect(self, point: ExpectedPoint) -> Hypothesis | None:
        for left_out in range(min(self._index, len(self._case.program) - 1), -1, -1):
            if left_out == point.index and not point.snapshot:
                continue  # an operation that is left out gives no result
            other = self._oracle(self._case.without_operation(left_out))
            if self._agrees(self._values_at(other, point, point.index - 1), point):
                return Hypothesis(left_out, self._kinds)
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
                return Hypothesis(step, self._kinds, tuple(units))
        return None

    def _norm(self, point: ExpectedPoint) -> Hypothesis | None:
        """Of which gradients a total norm is; the same on every rank where it is wrong."""
        if self._comparison.lockstep or any(quantity.name != "total_norm" for quantity in self._wrong):
            return None
        before = next((p for p in self._truth.points if p.snapshot and p.index == point.index - 1), None)
        norm_type = getattr(self._case.program[point.index], "norm_type", None)
        if before is None or before.pending or norm_type is None:
            return None
        gradients = {q.name: one.value for q, one in before.quantities.items() if q.kind == "gradient"}
        measured = {fqn: value for fqn, value in gradients.items() if value is not None and value.numel()}
        found = set()
        for quantity in self._wrong:
            got, due = self._got(quantity, point, None), point.quantities[quantity]
            if got is None or due.value is None:
                return None
            bound = float(torch.as_tensor(due.bound).max())
            found.add(norm_of_what(float(got), float(due.value), bound, norm_type, measured))
        if len(found) != 1 or not any(found):
            return None
        return Hypothesis(-1, self._kinds, pattern=Pattern("norm", found.pop()))

    def _pattern(self, point: ExpectedPoint) -> Hypothesis | None:
        """What every quantity that is wrong is like, if all are like the same."""
        state = gathered_state.states(self._ranks).get(point.index)
        found: list[Pattern] = []
        for quantity in self._wrong:
            got = self._got(quantity, point, state)
            like = None if got is None else pattern_of(quantity, got, point.quantities[quantity], point.quantities)
            if like is None or (found and like.kind != found[0].kind):
                return None
            found.append(like)
        return Hypothesis(-1, self._kinds, pattern=found[0]) if found else None

    def _got(self, quantity: Quantity, point: ExpectedPoint, state: GatheredState | None) -> torch.Tensor | None:
        """The numbers that the ranks have, put together; None if they have none or contradict one another."""
        if quantity.kind == "result":
            results = (one for one in self._ranks[quantity.rank].results if one.index == point.index)
            return next((one.values.get(quantity.name) for one in results), None)
        if state is None or quantity.kind == "buffer":
            return None if state is None else state.buffers[quantity.rank].get(quantity.name)
        if quantity.kind == "optimizer":
            entry = (state.optimizer or {}).get(quantity.name, {}).get(quantity.part)
            return entry if isinstance(entry, torch.Tensor) else None
        return (state.gradients if quantity.kind == "gradient" else state.values).get(quantity.name)

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
