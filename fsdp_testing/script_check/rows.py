"""Do the ranks share the rows of data as they should: none lost, none seen twice? Pure.

What is drawn with replacement may be seen twice, a sampler may pad its last batch or drop it, and ranks may take more rows in
a step than one process does. What these explain is no mistake.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import zip_longest

from fsdp_testing.script_check.feeding import LoaderSeen
from fsdp_testing.script_check.whole import WholeRun


def strange_shares(alone: WholeRun, run: WholeRun) -> str:
    """Return how the ranks share the rows of a step or of a pass otherwise than one process takes them; empty if right."""
    return _of_steps(alone, run) or _of_passes(alone, run)


def _of_steps(alone: WholeRun, run: WholeRun) -> str:
    """At each step the ranks take rows of the same step of one process only, and not all of them once."""
    found = []
    for step in range(min(alone.steps, run.steps)):
        here, there = alone.union(step), run.union(step)
        lost, twice = (here - there).total(), (there - here).total()
        padded_or_dropped = max(lost, twice) < run.size and not (lost and twice)
        drawn = any(count > 1 for count in here.values())
        if drawn or padded_or_dropped or not {*there} <= {*here}:
            return ""
        found.append(_sentence(f"at step {step}", lost, twice))
    # One step may be chance, where rows are drawn of few.
    return found[0] if len(found) > 1 else ""


def _of_passes(alone: WholeRun, run: WholeRun) -> str:
    for number, own in enumerate(alone.ranks[0].taken.loaders):
        ranks = [rank.taken.loaders[number] for rank in run.ranks if number < len(rank.taken.loaders)]
        if len(ranks) < run.size or own.replaces:
            continue
        for turn, (expected, *shares) in enumerate(zip_longest(own.rows, *(rank.rows for rank in ranks), fillvalue=())):
            sentence = _of_pass(turn, own, ranks, Counter(row for share in shares for row in share), Counter(expected))
            if sentence:
                return sentence
    return ""


def _of_pass(turn: int, own: LoaderSeen, ranks: Sequence[LoaderSeen], there: Counter[str], here: Counter[str]) -> str:
    all_seen = all(loader.complete[turn : turn + 1] == [True] for loader in ranks)
    step = sum(loader.batch for loader in ranks)
    twice = sum(count - 1 for count in there.values())
    if any(count > 1 for count in here.values()):
        return ""
    if not all_seen and own.due is None:
        return ""  # a stream may begin anew
    if not all_seen:  # padding comes last
        return _sentence(f"in pass {turn} over a DataLoader", 0, twice) if twice else ""
    lost = (here - there).total() if own.complete[turn : turn + 1] == [True] else 0
    size = len(ranks)
    # A sampler pads or drops fewer rows than there are ranks, a loader fewer than all of them take in a step.
    strange = lost >= step + size or twice >= max(step, size) or (lost > 0 and twice >= size)
    return _sentence(f"in pass {turn} over a DataLoader", lost, twice) if strange else ""


def _sentence(where: str, lost: int, twice: int) -> str:
    counts = [f"{lost} of the rows that one process takes are taken by no rank"] if lost else []
    counts += [f"{twice} of the rows that the ranks take were taken before"] if twice else []
    return (
        f"{where} {' and '.join(counts)}. Cause: the shares of the ranks overlap or leave rows out. Divide by rank and number of "
        "ranks as DistributedSampler does, or take rows[rank::size]."
    )
