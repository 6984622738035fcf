"""Judges a script on batches made from the rows of all ranks, and recognises differences due to padding or a collator alone."""

from __future__ import annotations

from dataclasses import replace

import torch

from fsdp_testing.train.comparison import Difference
from fsdp_testing.train.deciding import Compared, decide
from fsdp_testing.train.feed import Source
from fsdp_testing.train.loaders import of_training
from fsdp_testing.train.on_rank import RunSettings
from fsdp_testing.train.pair import Pair
from fsdp_testing.train.parts import with_parts_in_place
from fsdp_testing.train.quantities import LOSS
from fsdp_testing.train.running import Failed, Undecided
from fsdp_testing.train.whole import WholeRun

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
