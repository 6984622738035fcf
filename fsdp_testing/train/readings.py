"""Relates the losses of ranks, and the numbers that they log, to one process. Pure.

A rank's loss is that of its own rows. All ranks together have the loss of one process in one of a few ways: as the mean, as
a sum of parts, as a mean by rows, or, where one process makes more backward passes, as the mean of a pass. A number that is
the same on all ranks, though their rows are not, was reduced by the script, and has to be that of one process as it is.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

import torch

from fsdp_testing.train.comparison import CLEAR_ROUNDINGS, first_difference, floor
from fsdp_testing.train.quantities import LOSS, Kind, Quantities, Quantity
from fsdp_testing.train.surroundings import NumbersTaken
from fsdp_testing.train.whole import WholeRun

MEAN = "the mean over ranks"
_MOST_ROWS = 512
_NEAR_SIZE = 1e-3
_IF_USED = "If it sets a coefficient, a threshold or a schedule, take its mean over ranks."
READINGS = (MEAN, "the sum over ranks", "the mean over ranks by their rows", "the mean over ranks and backward passes")


def losses(run: WholeRun, reading: str) -> Quantities:
    """Return the loss of every step, read in one of `READINGS` from the ranks' own."""
    steps = []
    for step in range(run.steps):
        # Of a pipeline the last stage alone has a loss.
        ranks = [rank for rank, report in enumerate(run.ranks) if report.steps[step].losses] or range(run.size)
        seen = [run.ranks[rank].steps[step] for rank in ranks]
        own = torch.tensor([sum(one.losses) for one in seen], dtype=torch.float64)
        rows = torch.tensor([len(run.rows[step][rank]) for rank in ranks], dtype=torch.float64)
        passes = max(len(seen[0].losses), 1)
        value = dict(zip(READINGS, (own.mean(), own.sum(), (own * rows).sum() / rows.sum(), own.mean() / passes)))
        steps.append(value[reading].to(seen[0].loss_dtype))
    return {LOSS: steps}


def reading_of(reference: WholeRun, run: WholeRun) -> str:
    """Return how the ranks' losses come nearest to one process's; the mean where that is as near."""
    apart = {reading: _apart(losses(reference, reading), losses(run, reading)) for reading in READINGS}
    nearest = min(READINGS, key=lambda reading: apart[reading])
    close = first_difference(losses(reference, MEAN), losses(run, MEAN), CLEAR_ROUNDINGS) is None
    return MEAN if close else nearest


def is_some_mean(reference: WholeRun, run: WholeRun) -> bool:
    """Whether at each step the loss of one process lies between those of the ranks, so that weights might explain it."""
    for step in range(run.steps):
        own = [sum(rank.steps[step].losses) for rank in run.ranks]
        if not min(own) <= sum(reference.ranks[0].steps[step].losses) <= max(own):
            return False
    return True


@dataclass(frozen=True, slots=True)
class LoggedNumbers:
    """Classification of the numbers that a script logs.

    Attributes:
        reduced: By line, of both runs, those that have to be equal: the same on all ranks, or in one process the loss, and on
            ranks not their own. A constant is there only if it differs.
        own: Lines where each rank has numbers of its own, or only some ranks take any.
        uneven: Lines that take more or fewer numbers than in one process.
        carried: Lines whose numbers Python code multiplies or divides by an unknown factor.
    """

    reduced: Mapping[str, tuple[torch.Tensor, torch.Tensor]]
    own: tuple[str, ...]
    uneven: tuple[str, ...]
    carried: tuple[str, ...]


def logged(reference: WholeRun, run: WholeRun) -> LoggedNumbers:
    """Return which logged numbers of a world can be compared with those of one process."""
    reduced, own, uneven, carried = {}, [], [], []
    for line, taken in run.ranks[0].numbers.items():
        alone = reference.ranks[0].numbers.get(line, NumbersTaken())
        ranks = [rank.numbers[line].values for rank in run.ranks if line in rank.numbers]
        shared = len(ranks) == run.size and all(values == taken.values for values in ranks)
        pair = alone.tensor, taken.tensor
        if len(pair[0]) != len(pair[1]):
            uneven.append(line)
        elif not (alone.is_known and taken.is_known) and not _near(*pair):
            carried.append(line)
        elif shared and (all(value.is_integer() for value in taken.values) or (is_constant(pair[1]) and _near(*pair))):
            continue  # a count, which may be a rank's own and yet the same on all, or a constant
        elif shared or (is_loss(reference, 0, alone.plain) and not _are_own(run, line, pair[0])):
            reduced[line] = pair
        else:
            own.append(line)
    return LoggedNumbers(reduced, tuple(own), tuple(uneven), tuple(carried))


def _are_own(run: WholeRun, line: str, alone: torch.Tensor) -> bool:
    """Whether ranks log their own losses at a line, or parts whose mean one process logs."""
    tensors = {place: rank.numbers[line].tensor for place, rank in enumerate(run.ranks) if line in rank.numbers}
    if all(is_loss(run, place, run.ranks[place].numbers[line].plain) for place in tensors):
        return True
    if len(tensors) < run.size or any(numbers.shape != alone.shape for numbers in tensors.values()):
        return False
    return _near(torch.stack([*tensors.values()]).double().mean(0), alone)


def suspects(reference: WholeRun, run: WholeRun, step: int) -> str:
    """Return a hint at the first number read before a step that is a multiple of one process's, or each rank's own; or empty.

    What is read may set what is trained. A rank's loss is its own in a right script, too.
    """
    for line, taken in run.ranks[0].numbers.items():
        one = reference.ranks[0].numbers.get(line, NumbersTaken()).plain[:step].to(taken.dtype)
        ranks = [rank.numbers[line].plain[:step] for rank in run.ranks if line in rank.numbers]
        if len(ranks) < run.size or not len(one) or any(len(other) != len(one) for other in ranks):
            continue
        shared = all(torch.equal(ranks[0], each) for each in ranks)
        known = one.abs() > floor(taken.dtype, CLEAR_ROUNDINGS) ** 0.5 * one.abs().max()
        times = factor(one[known], ranks[0][known]) if shared and bool(known.any()) else None
        if times is not None and abs(times - run.size) < _NEAR_SIZE:
            return f"The number read at {line} before is {run.size} times that of one process: a sum over ranks. {_IF_USED}"
        losses = all(is_loss(run, place, numbers) for place, numbers in enumerate(ranks))
        if not shared and not losses:
            return f"The number read at {line} before is each rank's own. {_IF_USED}"
    return ""


def at_line(line: str, run: WholeRun) -> Quantities:
    """Return the numbers that rank 0 took at a line, as a quantity."""
    taken = run.ranks[0].numbers.get(line, NumbersTaken())
    return {Quantity(Kind.LOGGED, line): list(taken.tensor)}


def is_loss(run: WholeRun, rank: int, numbers: torch.Tensor) -> bool:
    """Whether numbers are the losses of a rank: of steps or of passes, in their order, or of each second one, and so on."""
    steps = [seen.losses for seen in run.ranks[rank].steps]
    for wanted in ([sum(step) for step in steps], [loss for step in steps for loss in step]):
        if any(_begins_with(logged, numbers, least) for logged, least in _logged_as(wanted, len(numbers))):
            return True
    return False


def _logged_as(wanted: Sequence[float], count: int) -> Iterator[tuple[Sequence[float], int]]:
    """Yield what `count` numbers may be: all, or every second one and so on; and how many have to agree.

    One number alone may be the loss of some step by chance.
    """
    yield wanted, 1
    # So many numbers are logged at few strides alone.
    for stride in range(2, len(wanted) // max(count - 1, 1) + 1):
        for first in range(min(stride, len(wanted))):
            if len(range(first, len(wanted), stride)) == count:
                yield wanted[first::stride], 2


def _begins_with(logged: Sequence[float], numbers: torch.Tensor, least: int) -> bool:
    count = min(len(logged), len(numbers))
    near = count and math.isclose(logged[0], float(numbers[0]), rel_tol=0.5)  # cheap, and rules out most
    return bool(near) and count >= least and _near(torch.tensor(logged[:count], dtype=torch.float64), numbers[:count])


def _near(one: torch.Tensor, other: torch.Tensor) -> bool:
    return bool(((one - other.double()).abs() <= floor(other.dtype, CLEAR_ROUNDINGS) * one.abs()).all())


def factor(one: torch.Tensor, other: torch.Tensor) -> float | None:
    """Return the one factor by which all numbers of `other` are larger, None without such a factor."""
    if not bool((one != 0).all()):
        return None
    ratios = other.double() / one.double()
    same = float(ratios.max() - ratios.min()) <= floor(one.dtype, CLEAR_ROUNDINGS) * float(ratios.abs().max())
    return float(ratios.mean()) if same else None


def is_constant(numbers: torch.Tensor) -> bool:
    """Whether it is one number, however often it was read."""
    return len(numbers.unique()) == 1


def is_summed_or_divided(one: torch.Tensor, other: torch.Tensor, size: int) -> bool:
    """Whether a constant of a world is `size` times that of one process, or its `size`th part; no ratio of two counts is."""
    for value in (float(one[0]), float(other[0])):
        if abs(float(Fraction(value).limit_denominator(_MOST_ROWS)) - value) <= torch.finfo(one.dtype).eps * abs(value):
            return False
    return any(_near(one.double() * times, other) for times in (size, 1 / size))


def _apart(reference: Quantities, run: Quantities) -> float:
    pairs = zip(reference[LOSS], run[LOSS])
    return max(float((one - two).abs() / one.abs().clamp_min(torch.finfo(one.dtype).tiny)) for one, two in pairs)
