"""Finds the first difference of two runs that roundings cannot explain. Pure comparison of named tensors, step by step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from fsdp_testing.cases.records.specs import UNIT_ROUNDOFF
from fsdp_testing.judging.checkers.divergence import DECISIVE
from fsdp_testing.oracle.models import roundoff
from fsdp_testing.oracle.tensors import difference
from fsdp_testing.train.disturbance import RUNS, STAGES, room
from fsdp_testing.train.quantities import Kind, Quantities, Quantity

Place = tuple[Quantity, int]
"""A quantity at a step."""
Room = Mapping[Place, torch.Tensor]
"""By quantity and step: how far roundings alone may move each number."""

ROUNDINGS = 8
"""Roundings of the largest number that pass at once. No disturbed run would convict them: the last rounding of a number alone,
moved by two units, admits four times as much (`disturbance.room`), and more the more numbers are compared."""
CLEAR_ROUNDINGS = 4096
"""More than roundings make of a short training in its own dtype. Hints look no closer; it decides nothing."""
FEW_ROUNDINGS = 4
"""The most of either for dtypes narrower than float32, in which that many roundings would admit anything."""
_ZERO = 4
"""Times a number may be moved by roundings that is zero but for these."""
_STILL = 2**-10
"""Part of the largest movement in a tensor below which a number counts as one that few disturbed runs have not moved."""


@dataclass(frozen=True, slots=True)
class Difference:
    """The first difference of two runs; `error` is its size if both have numbers there."""

    quantity: Quantity
    step: int
    steps: int
    sentence: str
    ratio: float | None = None
    numbers: int = 0
    error: float | None = None

    def __str__(self) -> str:
        at = f" at step {self.step}" if self.steps > 1 else ""
        return f"{self.quantity}{at} {self.sentence}"


@dataclass(slots=True)
class Decided:
    """How many of the compared numbers are decided: a number that roundings alone may move as far as training did is not.

    Attributes:
        numbers: How many numbers of each quantity were compared, all steps together.
        undecided: How many of them are undecided.
        open: A sentence on each quantity and step with undecided numbers that are off by more than their own rounding.
        excused: Quantities that may stay undecided, since they are zero but for roundings; of these there are no sentences.
        mostly: Quantities and steps of which most numbers have such a sentence.
        zeros: How many undecided numbers of each quantity are zero in both runs, but for roundings.
    """

    numbers: Counter[Quantity] = field(default_factory=Counter)
    undecided: Counter[Quantity] = field(default_factory=Counter)
    open: dict[Place, str] = field(default_factory=dict)
    excused: set[Quantity] = field(default_factory=set)
    mostly: set[Place] = field(default_factory=set)
    zeros: Counter[Quantity] = field(default_factory=Counter)

    @property
    def unknown(self) -> list[Quantity]:
        """Quantities with mostly undecided numbers: in places garbage is close to other garbage."""
        return [key for key, n in self.undecided.items() if 2 * n > self.numbers[key] and key not in self.excused]

    @property
    def enough(self) -> bool:
        """Whether some numbers of each quantity, and at least half of all numbers, are decided."""
        return not self.unknown and 2 * self.undecided.total() <= self.numbers.total()

    def add(self, other: Decided) -> None:
        """Add the counts of another comparison."""
        self.numbers += other.numbers
        self.undecided += other.undecided
        self.open |= {place: sentence for place, sentence in other.open.items() if place[0] not in self.excused}
        self.mostly |= {place for place in other.mostly if place[0] not in self.excused}
        self.zeros += other.zeros

    def excuse_zeros(self, key: Quantity) -> None:
        """Let a quantity stay undecided whose undecided numbers are all zero but for roundings, as a loss may be by design."""
        if 0 < self.undecided[key] == self.zeros[key]:
            self.excused.add(key)
            self.open = {place: sentence for place, sentence in self.open.items() if place[0] != key}
            self.mostly = {place for place in self.mostly if place[0] != key}


def first_difference(
    reference: Quantities,
    other: Quantities,
    roundings: float,
    admitted: Room | None = None,
    decided: Decided | None = None,
    start: Quantities | None = None,
) -> Difference | None:
    """Return the first difference in the order of steps, and among the quantities of one step in the order returned.

    Args:
        reference: The reference to compare with.
        other: What is judged.
        roundings: Admitted, in units of roundoff of a quantity's dtype times its largest number. 0 demands equality.
        admitted: The additional admitted difference, for each number.
        decided: Counts how much was compared, and how much of it is undecided.
        start: Quantities before the first step: these count as decided by how far the reference moved them.
    """
    for key in [*reference, *(key for key in other if key not in reference)]:
        if key not in reference or key not in other:
            return Difference(key, 0, 1, "is returned by only one of them")
        if len(reference[key]) != len(other[key]):
            return Difference(key, 0, 1, f"has {len(other[key])} steps, expected {len(reference[key])}")
    for key, step in in_order(reference):
        before = (start or {}).get(key, [None])[0]
        bound = _Bound(roundings, (admitted or {}).get((key, step), 0.0), before)
        difference = _compare((key, step), (reference[key], other[key]), bound, decided or Decided())
        if difference is not None:
            return difference
    return None


@dataclass(frozen=True, slots=True)
class _Bound:
    """How far a quantity may be off: roundings of its largest number, room for each number, and where it began."""

    roundings: float
    room: torch.Tensor | float
    start: torch.Tensor | None


def in_order(quantities: Quantities) -> list[Place]:
    """Return all pairs of quantity and step: first those recorded at every step, step by step, then final quantities."""
    recorded = {key: steps for key, steps in quantities.items() if len(steps) > 1}
    length = max((len(steps) for steps in recorded.values()), default=0)
    order = [(key, step) for step in range(length) for key, steps in recorded.items() if step < len(steps)]
    return order + [(key, 0) for key, steps in quantities.items() if len(steps) == 1]


Disturbed = Callable[[int], Iterable[tuple[Quantities, Quantities]]]
"""Given a seed, returns pairs of a run and the same run with roundings made differently."""


def difference_of(
    reference: Quantities,
    other: Quantities,
    disturbed: Disturbed,
    decided: Decided,
    start: Quantities,
    roundings: float = ROUNDINGS,
) -> Difference | None:
    """Return the first difference that roundings do not explain: small ones pass at once, larger ones need disturbed runs.

    Args:
        reference: The reference to compare with.
        other: What is judged.
        disturbed: Runs again.
        decided: Counts how much was compared, and how much of it is undecided.
        start: Quantities before the first step.
        roundings: What passes at once.
    """
    at_once = Decided()
    difference = first_difference(reference, other, roundings, None, at_once, start)
    if difference is None:
        decided.add(at_once)
    if difference is None or difference.error is None:
        return difference
    return beyond_roundings(reference, other, roundings, disturbed, decided, start)


def beyond_roundings(
    reference: Quantities,
    other: Quantities,
    roundings: float,
    disturbed: Disturbed,
    decided: Decided,
    start: Quantities | None = None,
) -> Difference | None:
    """Return the first difference larger than both runs' measured sensitivity to rounding.

    Args:
        reference: The reference to compare with.
        other: What is judged.
        roundings: As for `first_difference`.
        disturbed: Runs again.
        decided: Counts how much was compared, and how much of it is undecided.
        start: As for `first_difference`.
    """
    spread: dict[Place, torch.Tensor] = {}
    for seed in range(1, RUNS + 1):
        for here, there in disturbed(seed):
            for place in in_order(here):
                distance = _distance(there, here, place)
                # Of another shape in the world: a difference by itself, whatever the room.
                if distance.shape == spread.setdefault(place, distance).shape:
                    spread[place] = torch.maximum(spread[place], distance)
        if seed in STAGES:
            difference = first_difference(reference, other, roundings, _room_of(spread, seed), start=start)
            if difference is not None:
                return difference
        # Further runs only widen it: what the largest of all runs would admit with these alone is decided already.
        seen = Decided()
        if first_difference(reference, other, roundings, _room_of(spread, RUNS), seen, start) is None:
            decided.add(seen)
            break
    return None


_SET = (Kind.RATE, Kind.SETTING)


def _room_of(spread: Room, runs: int) -> Room:
    numbers = sum(tensor.numel() for tensor in spread.values())
    if runs < RUNS:
        # On a coarse grid a number may stay where it is by chance, or come to its negative before it is squared, beside others
        # that move: wait for more. A single number has none beside it; what an optimizer is set by is not rounded.
        still = {place: tensor < _STILL * _largest(tensor) for place, tensor in spread.items()}
        still |= {place: t == 0 for place, t in spread.items() if t.numel() == 1 and place[0].kind not in _SET}
        spread = {place: tensor.masked_fill(still[place], torch.inf) for place, tensor in spread.items()}
    return {place: room(tensor, numbers, runs) for place, tensor in spread.items()}


def _distance(there: Quantities, here: Quantities, place: Place) -> torch.Tensor:
    """Return the distance of a disturbed run from the run; infinite if it took a different path, so that nothing follows."""
    key, step = place
    value = here[key][step].double().reshape(-1)
    if len(there.get(key, [])) != len(here[key]) or there[key][step].numel() != value.numel():
        return torch.full_like(value, torch.inf)
    return (there[key][step].double().reshape(-1) - value).abs().nan_to_num(nan=torch.inf)


def _compare(
    place: Place,
    sides: tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]],
    bound: _Bound,
    decided: Decided,
) -> Difference | None:
    key, step = place
    left, right, steps = sides[0][step], sides[1][step], len(sides[0])
    if left.shape != right.shape or left.dtype != right.dtype:
        sentence = f"is {right.dtype}{list(right.shape)}, expected {left.dtype}{list(left.shape)}"
        return Difference(key, step, steps, sentence)
    if not left.numel():
        return None
    one, two = left.double().reshape(-1), right.double().reshape(-1)
    largest = _largest(one)
    # A weight is large whatever its training did: training shows in how far it moved.
    known = bound.start is not None and bound.start.numel() == one.numel()
    size = _largest(one - bound.start.double().reshape(-1)) if known and bound.start is not None else largest
    at_once = floor(left.dtype, bound.roundings) * max(largest, size)
    apart = difference(two, one, at_once + bound.room)
    if not apart.exceeded:
        decided.numbers[key] += one.numel()
        # As everywhere: numbers that roundings move by their own size decide nothing.
        # Nor does infinite room: with other roundings the run took a different path.
        endless = torch.as_tensor(bound.room).isinf() & ((one - two).abs() > at_once)
        undecided = ((one - two).abs() > DECISIVE * size) | endless
        if apart.error and bool(undecided.any()):
            decided.undecided[key] += int(undecided.sum())
            # Roundings may move it by several times what it is.
            zero = _ZERO * torch.maximum(one.abs(), two.abs()) <= bound.room
            decided.zeros[key] += int((undecided & ~endless & zero).sum())
            # A coarsely stored weight is known to one unit in its last place, which needs no report.
            count = int((undecided & ((one - two).abs() > 2 * part(roundoff(left.dtype), 1) * one.abs())).sum())
            where = f"{key} at step {step}" if steps > 1 else f"{key}"
            if count:
                decided.open[place] = f"{count} of {one.numel()} numbers of {where}, off by up to {apart.error:.3g}"
            # Of one or two numbers most are undecided by chance.
            if 2 * count > one.numel() > 2:
                decided.mostly.add(place)
        return None
    sentence = f"is off by {apart.error:.3g} (bound {apart.bound:.3g}), most in element {apart.position}: {apart.text}"
    return Difference(key, step, steps, sentence, _ratio(one, two), one.numel(), apart.error)


def _largest(numbers: torch.Tensor) -> float:
    finite = numbers[numbers.isfinite()].abs()
    return float(finite.max()) if finite.numel() else 0.0


def floor(dtype: torch.dtype, roundings: float) -> float:
    """Return the share of the largest number that this many roundings may amount to."""
    return part(roundoff(dtype), roundings)


def part(unit: float, roundings: float) -> float:
    """Return the share of the largest number that this many roundings of a unit may amount to."""
    few = unit > UNIT_ROUNDOFF["float32"]
    return min((min(roundings, FEW_ROUNDINGS) if few else roundings) * unit, DECISIVE)


def _ratio(one: torch.Tensor, two: torch.Tensor) -> float | None:
    """The factor between two tensors, if it is one factor for all elements."""
    filled = one.abs() > 1e-12 * float(one.abs().max())
    if not bool(filled.any()):
        return None
    ratios = two[filled] / one[filled]
    middle = float(ratios.median())
    return middle if bool(((ratios - middle).abs() <= 1e-6 * abs(middle)).all()) else None


def suggestion(difference: Difference, size: int) -> str:
    """Return what a difference from the reference world suggests, where the evidence shows no cause."""
    ratio = difference.ratio
    if ratio is not None and abs(ratio - size) < 1e-6 * size:
        return f"It is exactly {size} times as large: a sum over ranks instead of a mean."
    if ratio is not None and abs(ratio - 1 / size) < 1e-6:
        return f"It is exactly 1/{size} of it: divided by the world size once too often, or not summed."
    if ratio is not None and difference.numbers > 1:  # of one number, a ratio says nothing
        return f"Every element is {ratio:.6g} times as large: something is scaled by the number of ranks or steps."
    if difference.steps > 1 and difference.step > 0:
        return (
            f"Step {difference.step - 1} still agrees: look at what step {difference.step} does for the first time "
            "(a no_sync boundary, a micro-batch that is not reduced, a schedule that counts ranks), and at what its rows "
            "decide (a threshold, a choice of rows, a mask that a rank makes of its own)."
        )
    return (
        "Look for data that is not split evenly, a random number drawn per rank, a gradient that is not reduced, or a term of "
        "the loss (a penalty, a weight of a class, masked or lost targets) that ranks do not have alike."
    )


def side_by_side(
    reference: Sequence[tuple[float, float | None]], other: Sequence[tuple[float, float | None]], names: tuple[str, str]
) -> tuple[str, ...]:
    """Return lines with loss and norm of the gradient of two worlds, step by step.

    Args:
        reference: Loss and norm at each step; None where no norm was measured.
        other: Those of the other world.
        names: Names of both.
    """
    titles = [f"{what} ({name})" for what in ("loss", "norm") for name in names]
    rows = [
        (str(step), *("-" if x is None else f"{x:.6g}" for x in (a[0], b[0], a[1], b[1])))
        for step, (a, b) in enumerate(zip(reference, other))
    ]
    table = [("step", *titles), *rows]
    widths = [max(len(row[column]) for row in table) for column in range(len(table[0]))]
    return tuple("  ".join(cell.rjust(width) for cell, width in zip(row, widths)) for row in table)
