"""Judges a script on batches made from the rows of all ranks.

Differences that are due to padding, to a collator, to other rows or to more micro-batches alone are no verdict on the ranks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch

from fsdp_testing.train.batches import near
from fsdp_testing.train.comparison import Difference
from fsdp_testing.train.control import is_mean_of_passes
from fsdp_testing.train.deciding import Compared, decide
from fsdp_testing.train.feed import Feed, Source
from fsdp_testing.train.loaders import of_training
from fsdp_testing.train.on_rank import RunSettings
from fsdp_testing.train.pair import NEAR, Pair, each_rank
from fsdp_testing.train.parts import with_parts_in_place
from fsdp_testing.train.quantities import LOSS
from fsdp_testing.train.running import Failed, Undecided
from fsdp_testing.train.whole import WholeRun

_ALIKE = 1e-4
"""Losses that are farther apart, as parts of the larger one, are not those of the same rows."""
_COLLATED = (
    "trains as one process does on the ranks' own batches. But from the rows of all ranks together collate_fn makes other rows, "
    "and on these the training differs: {}. So each rank has its own statistic, of its batch or of earlier batches. "
    "Compute it over the rows of all ranks, or once in the dataset. If it is intended, mark the line after it: `x, y = "
    "fsdp_testing.batch(x, y)`."
)

_LOOSE = (
    "differs from one process: {}. But its batches have numbers beside their rows, such as a count, which are unknown for the "
    "rows of all ranks (collate_fn draws random numbers, or the dataset makes batches), so one process got those of rank 0. "
    "Compute them from the rows after this line: `x, y = fsdp_testing.batch(x, y)`."
)

_BETWEEN = (
    "not compared: what the script does with its rows between DataLoader and forward. The result differs for the rows of all "
    "ranks: random numbers, or a statistic of each rank's rows"
)


def decided_by_batches(pair: Pair) -> Compared:
    """Compare, and return what was compared; a difference due only to padding or a collator's statistic decides nothing.

    Raises:
        Failed: The world differs.
        Undecided: There is no verdict.
    """
    collated_apart = bool(pair.reference.ranks[0].taken.apart)
    try:
        compared = decide(pair)
        if collated_apart and not pair.feed.collates:
            _check_collated(pair)
        return replace(compared, lines=(*compared.lines, *_not_replayed(pair)))
    except Failed as why:
        if collated_apart and pair.feed.collates:
            decide(pair.collated(together=False))  # any remaining difference is not the collator's
            raise Undecided(_COLLATED.format(why.first or why)) from why
        if pair.feed.loose:
            raise Undecided(_LOOSE.format(why.first or why)) from why
        if pair.feed.blind and not _same_losses(pair, why.first):
            raise Undecided(
                f"{why} Forward is given rows along another dimension than the first, so it is not known whether one process "
                "got the same. Give it the rows first, and transpose inside it."
            ) from why
        if not (pair.feed.pads and same_count(pair.reference, pair.run, 0)):
            raise
    # Judged with batches that are padded together: any remaining difference is not due to padding.
    alike = with_parts_in_place(pair.reference, pair.runner.run(pair.run.size, RunSettings(feed=pair.feed)))
    decide(replace(pair, run=alike, own=pair.feed, kept={}))
    raise Undecided(
        "differs from one process only where rows are padded to another length: with the ranks' batches padded together it "
        "trains as one process does. Mask the padding in the model and in the loss, or pad to a fixed length."
    )


def _check_collated(pair: Pair) -> None:
    try:
        decide(pair.collated(together=True))
    except Failed as why:
        raise Undecided(_COLLATED.format(why.first or why)) from why


def _not_replayed(pair: Pair) -> list[str]:
    """Name what makes forward's rows, if it might make others from the rows of all ranks."""
    loaders = pair.run.ranks[0].taken.loaders
    used = [one for one, trains in zip(loaders, of_training(loaders)) if trains and one.passes]
    if pair.feed.source is Source.FORWARD and used:
        return [_BETWEEN]
    drawn = pair.feed.source is Source.LOADER and any(one.collates and one.draws for one in used)
    return ["not compared: what collate_fn makes of the rows of all ranks together: it draws random numbers"] * drawn


def _same_losses(pair: Pair, difference: Difference | None) -> bool:
    """Whether both have the same losses until their first difference, as equal rows give."""
    step = difference.step + 1 if difference is not None else 0
    one, other = (world.quantities.get(LOSS, [])[:step] for world in (pair.reference, pair.run))
    return bool(one) and len(one) == len(other) and all(map(torch.allclose, one, other))


def same_moments(one: WholeRun, run: WholeRun, *, counts: bool = True) -> bool:
    """Whether both made as many forwards until each step, after as many items of their loaders.

    Rows that are padded to the longest of another batch have other digests. There are as many of them, unless each batch is
    packed into one row.
    """
    for step in range(min(one.steps, run.steps)):
        mine, others = one.ranks[0], run.ranks
        if any(len(mine.steps[step].rows) != len(rank.steps[step].rows) for rank in others):
            return False
        if any(mine.taken.items[step] != rank.taken.items[step] for rank in others):
            return False
        forwards = [len(forward) for seen in (mine, *others) for forward in seen.steps[step].rows]
        if counts and not same_count(one, run, step) and {*forwards} != {1}:
            return False
    return True


def same_count(one: WholeRun, run: WholeRun, step: int) -> bool:
    """Whether both take as many rows at a step."""
    return one.union(step).total() == run.union(step).total()


def same_data(one: WholeRun, run: WholeRun) -> bool:
    """Whether both see the same rows at each step; an earlier end is a separate difference."""
    return _same_steps(one, run) == min(one.steps, run.steps)


def _same_steps(one: WholeRun, run: WholeRun) -> int:
    """Return for how many steps both see the same rows, but for roundings of rows that are made of a model's output."""
    steps = min(one.steps, run.steps)
    return next((step for step in range(steps) if not near(one.union(step), run.union(step))), steps)


class OtherRows(Undecided):
    """One process was given the rows of all ranks, and its forwards get others from some step on.

    Attributes:
        fed: The process that gets the same rows for longest, and what it was given.
        steps: So many steps have the same rows.
    """

    def __init__(self, tried: Sequence[tuple[WholeRun, Feed]], run: WholeRun) -> None:
        self.fed = max(tried, key=lambda pair: _same_steps(pair[0], run))
        self.steps = _same_steps(self.fed[0], run)
        given = f"one process was given the rows of all ranks ({', then '.join(str(feed) for _, feed in tried)})"
        if uneven := _taken_unevenly(run, self.steps):
            super().__init__(f"{given}, but {uneven}")
            return
        here, there = (world.union(self.steps).total() for world in (self.fed[0], run))
        if here != there:
            how = f"it trains on {here} rows where the ranks train on {there}: the script takes a fixed number of a batch's rows"
            advice = "Divide a batch by its length (`x.chunk(4)`), or mark the line"
        else:
            how = (
                "it trains on other rows: random numbers that are drawn between that point and forward (an augmentation in the "
                "loop) cannot be replayed, nor can what a rank makes of its own rows there (a statistic, a state that it carries)"
            )
            advice = "Mark the line"
        super().__init__(
            f"{given}, but at step {self.steps} {how}. {advice} where the script has its batch ready: "
            "`x, y = fsdp_testing.batch(x, y)`. A model that gets another model's output must get it unchanged: move changes of "
            "the output into a forward."
        )


def _taken_unevenly(run: WholeRun, step: int) -> str:
    """Return a sentence if ranks have taken other numbers of batches by a step, since one skips some or waits for more."""
    taken = [rank.taken.items[step] for rank in run.ranks if step < len(rank.taken.items)]
    if len({*taken}) < 2:
        return ""
    return (
        f"by step {step} ranks have taken different numbers of batches ({', '.join(map(str, taken))}, in the order of ranks): "
        "one skips a batch, or gathers more of them, by a decision of its own, such as a loss of its own that is not finite. "
        "Then which rows make a step depends on the number of ranks. Decide together: all-reduce what the decision depends on."
    )


def final_verdict(pair: Pair, why: Failed, other_rows: OtherRows | None) -> Failed | Undecided:
    """Return what a difference from one process means: nothing from the step on at which it has other rows.

    Args:
        pair: Both worlds.
        why: How they differ.
        other_rows: Since when one process has other rows; None if it has the same.
    """
    if why.subject:
        return why
    if why.first is not None and more_micro_batches(pair) and pair.feed.scale == 1.0:
        return _of_micro_batches(pair, why)
    before = (
        why.first is not None and why.first.steps > 1 and other_rows is not None and why.first.step < other_rows.steps
    )
    return why if other_rows is None or before else other_rows


def with_scaled_losses(pair: Pair, alone: WholeRun) -> Pair:
    """Return the world beside one process whose losses count as those of a rank; the pair itself where they do.

    A script that takes micro-batches of a fixed number of rows makes more of them from the rows of all ranks. If it divides
    each loss by the constant number that a rank makes, the losses of one process have to be divided by the number of ranks. So
    they have if it divides sums over its rows by a constant of batches that are as large in a world of any size.
    """
    micro_batches = more_micro_batches(pair)
    there = [loss for rank in pair.run.ranks for loss in rank.steps[0].losses]
    together = sum(pair.reference.ranks[0].steps[0].losses)
    if micro_batches is None:
        is_sum = bool(constant_divisor(pair, alone)) and _alike([together], [sum(there)])
        is_constant = is_sum and _alike(_losses_of_each(pair), there)
    else:
        more = micro_batches[0] == micro_batches[1] * pair.run.size
        is_constant = more and _alike([together], [sum(_losses_of_each(pair))])
    return pair.beside(replace(pair.feed, scale=1 / pair.run.size)) if is_constant else pair


def constant_divisor(pair: Pair, alone: WholeRun) -> float:
    """Return by which number each loss is divided on every rank; 0 if by none, or if it may belong to the rows of all ranks.

    It belongs to a batch of a rank if each batch has so many rows, for one process on its own too, or if the ranks take in turn
    the batches of one process, as with a budget of tokens.
    """
    rows = {
        len(forward)
        for world in (pair.run, alone)
        for rank in world.ranks
        for seen in rank.steps
        for forward in seen.rows
    }
    shared = [{*each} for seen in pair.run.seen for each in seen.evidence.factors]
    divisors = [1 / factor for factor in sorted({*shared[0]}.intersection(*shared)) if 0 < factor < 1] if shared else []
    if not _dealt(pair.run, alone):
        divisors = [by for by in divisors if {round(by)} == rows and math.isclose(by, round(by), rel_tol=_ALIKE)]
    return next(iter(divisors), 0)


def _dealt(run: WholeRun, alone: WholeRun) -> bool:
    """Whether the ranks take the batches of one process on its own, in turn."""
    dealt = [rank.steps[step].rows for step in range(run.steps) for rank in run.ranks]
    own = [seen.rows for seen in alone.ranks[0].steps]
    return len(own) >= run.size > 1 and all(one == other for one, other in zip(own, dealt))


def more_micro_batches(pair: Pair) -> tuple[int, int] | None:
    """Return how many micro-batches one process makes, and a rank that divides by their number, if one process makes more.

    A micro-batch has a backward of its own, or a forward alone and one backward with the others.
    """
    if pair.feed.source is not Source.LOADER:
        return None
    worlds = (pair.reference, pair.run)
    for counts in ([{len(seen.losses) for seen in world.seen} for world in worlds],
                   [{len(seen.rows) for seen in world.seen} for world in worlds]):  # fmt: skip
        here, there = map(max, counts)
        if [len(each) for each in counts] == [1, 1] and here > there > 1:
            divided = all(seen.evidence.divided_by(there) for seen in pair.run.seen)
            return (here, there) if divided or is_mean_of_passes(pair.run) else None
    return None


def _losses_of_each(pair: Pair) -> list[float]:
    return [loss for one in each_rank(pair) for loss in one.ranks[0].steps[0].losses]


def _alike(one: Sequence[float], two: Sequence[float]) -> bool:
    """Whether losses of the same micro-batches are equal but for roundings."""
    return len(one) == len(two) and all(math.isclose(a, b, rel_tol=_ALIKE) for a, b in zip(one, two))


def _of_micro_batches(pair: Pair, why: Failed) -> Failed | Undecided:
    each, there = _losses_of_each(pair), [loss for rank in pair.run.ranks for loss in rank.steps[0].losses]
    ratio = sum(there) / sum(each) if sum(each) else 0.0
    if not ratio or not _alike([loss * ratio for loss in each], there):
        return why
    if not _alike([sum(pair.reference.ranks[0].steps[0].losses) * pair.run.size], [sum(each)]):
        here, own = more_micro_batches(pair) or (0, 0)
        return Undecided(
            f"one process was given the rows of all ranks ({pair.feed}), from which the script makes {here} micro-batches "
            f"where a rank makes {own} and divides by {own}. Mark the line where it has one ready: "
            "`x, y = fsdp_testing.batch(x, y)`."
        )
    if abs(ratio - 1) > NEAR:
        return Failed(
            f"differs from one process: each rank's losses at step 0 are {ratio:.4g} times those of one process that is given "
            "its rows. Cause: the script multiplies them by a number that depends on the number of ranks. DDP and FSDP take "
            "the mean over ranks already.",
            why.table,
            first=why.first,
        )
    return why
