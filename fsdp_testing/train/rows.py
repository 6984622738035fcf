"""Checks how the ranks share the rows of data: none may be lost, none taken twice. Pure.

Rows are known by their indices if all runs index one dataset, otherwise by digests; the digest of a row that is redrawn each
time tells nothing. Rows drawn with replacement may be taken twice, a sampler may pad or drop its last batch, and ranks may take
more rows in a step than one process does. None of these is a mistake.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import zip_longest

import torch

from fsdp_testing.train.loaders import LoaderSeen, Pass, of_training
from fsdp_testing.train.whole import WholeRun

_CHANCE, _COINCIDENCE = 2**-10, 2**-14
_ENOUGH, _ON_LINE, _CHANGED = 4, 1e-5, 1 / 4
"""Rows that are compared at least, by what part of its largest number one may be off a line (they may be float32), and the part
of rows that has to have other numbers."""
_MOVED = "shifted or scaled by other numbers"
_MOST_BLOCK, _FIRST_BLOCKS, _WAYS = 128, (8, 16, 32), 32
"""Rows of two blocks at most, numbers of rows of a first block, and about how many ways to divide rows are tried."""
_OWN_ROWS = (
    "not compared: how the ranks share the rows. No DataLoader gives them, and {} of the {} that the ranks take are none of one "
    "process in these steps: each rank draws its own, or takes them otherwise (inputs with the labels of other rows)"
)
_UNKNOWN = (
    "not compared: how the ranks share the rows of a DataLoader. Its rows have no index that means the same row on all ranks "
    "(they are drawn again each time, made for each rank, or not all taken)"
)


def strange_shares(alone: WholeRun, run: WholeRun, loaded: WholeRun | None = None) -> str:
    """Return how the ranks' shares of a step's or a pass's rows differ from the rows of one process; empty if right.

    Args:
        alone: One process.
        run: The ranks that take rows.
        loaded: The ranks that load rows, if these are others.
    """
    return _of_steps(alone, run) or _of_passes(alone, loaded or run)


def unknown_shares(alone: WholeRun, run: WholeRun) -> tuple[str, ...]:
    """Return a sentence if it is unknown how the ranks share some rows; otherwise empty."""
    if not any(rank.taken.loaders for rank in run.ranks):
        rows, known = (sum((one.union(step) for step in range(one.steps)), Counter[str]()) for one in (run, alone))
        others = (rows - known).total()
        return (_OWN_ROWS.format(others, rows.total()),) * bool(others)
    for own, ranks in _loaders(alone, run):
        if own.replaces or _is_one_dataset(own, ranks):
            continue
        for expected, *shares in zip(own.passes, *(rank.passes for rank in ranks)):
            if not {row for share in shares for row in share.rows} <= {*expected.rows}:
                return (_UNKNOWN,)
    return ()


def taken_elsewhere(alone: WholeRun, run: WholeRun) -> str:
    """Return how many rows several ranks take where none takes one twice, so that they are not drawn with replacement.

    With replacement a row is taken twice as often by one rank as by two. If no rank repeats any of many rows, that is no chance.
    Nor is it that two ranks take the same batch, row by row.
    """
    ranks = [_by_step(run.rows, rank) for rank in range(run.size)]
    if any(count > 1 for rows in (_by_step(alone.rows, 0), *ranks) for count in rows.values()):
        return ""
    shared = sum(count > 1 for count in sum((Counter(rows.keys()) for rows in ranks), Counter[str]()).values())
    if (1 - 1 / run.size) ** shared > _CHANCE and not _same_batch(run):
        return ""
    return (
        f"{shared} of the rows that the ranks take are taken by several of them, though no rank takes a row twice: shares that "
        "overlap, as of an order that each rank shuffles by its own seed. Take rows[rank::size] of one order. If this is "
        "intended, give it more rows than it trains on in the steps that are compared."
    )


def _same_batch(run: WholeRun) -> bool:
    """Whether ranks take the same batches, row by row, which rows that are drawn do not do by chance."""
    own = [{tuple(step[rank]) for step in run.rows if step[rank]} for rank in range(run.size)]
    batches = Counter(batch for taken in own for batch in taken)
    shared = [len(batch) for batch, ranks in batches.items() if ranks > 1]
    rows, pairs = len({row for batch in batches for row in batch}), (len(run.rows) * run.size) ** 2
    return bool(shared) and math.prod(pairs * max(rows, 2) ** -float(length) for length in shared) < _CHANCE


def prepared_apart(alone: WholeRun, run: WholeRun) -> str:
    """Return a sentence if a rank's dataset has rows of one process with other numbers in them; otherwise empty.

    Whether shares are blocks, each n-th row or each n-th block (file, environment), or all ranks hold all rows, rank 0's first
    rows are among the first of one process, and the last rank's last rows among its last.
    """
    if any(rank.taken.marks for rank in run.ranks):
        return ""
    for own, ranks in _loaders(alone, run):
        edges = (0, own.first_rows, ranks[0].first_rows), (run.size - 1, own.last_rows, ranks[-1].last_rows)
        for rank, here, there in edges:
            length = int(ranks[rank].dataset[0]) if ranks[rank].dataset else len(there)
            if how := _changed_at_best(here, there, length, run.size):
                return (
                    f"rank {rank}'s dataset has the rows of one process, {how}: each rank's own statistic, such as the mean and "
                    "deviation, the bucket edges, the vocabulary or the projection of its share, or random numbers of its own. "
                    "Compute it over the rows of all ranks before they are divided. If it is intended, mark the batches: "
                    "`x, y = fsdp_testing.batch(x, y)`."
                )
    return ""


def _changed_at_best(here: Sequence[torch.Tensor], there: Sequence[torch.Tensor], length: int, size: int) -> str:
    """Return how a rank's rows became others, wherever they are among those of one process; empty if they are equal somewhere.

    Args:
        here: Rows of one process, from an edge on.
        there: Rows of a rank, from the same edge on.
        length: Number of rows of the rank.
        size: Number of ranks.
    """
    blocks = [rows for rows in range(2, min(length, _MOST_BLOCK) // 2 + 1) if length % rows == 0]
    whole = [
        [*range(len(there))],
        *([_nth_blocks(place, rows, size) for place in range(len(there))] for rows in (1, *blocks)),
    ]
    aligned = [[(here[at], row) for at, row in zip(places, there) if at < len(here)] for places in whole]
    if any(len(pairs) >= _ENOUGH and all(torch.equal(*pair) for pair in pairs) for pairs in aligned):
        return ""
    # The first block may be a file of any length; of so few rows, numbers that follow from their places look like any others.
    files = [aligned[0][:rows] for rows in _FIRST_BLOCKS if rows < len(aligned[0])]
    usual, rare = (
        map(partial(_changed, rare=is_rare), ways) for is_rare, ways in ((False, aligned[:2]), (True, aligned[2:]))
    )
    return next(filter(None, (*usual, *rare, *(_MOVED for file in files if _is_moved(file)))), "")


def _nth_blocks(place: int, rows: int, size: int) -> int:
    """Return where a row is among all rows, if a rank has each `size`-th block of so many rows."""
    return place // rows * rows * size + place % rows


def _changed(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], *, rare: bool) -> str:
    """Return how rows became others, if they are the same rows and no longer have the same numbers; otherwise empty.

    Args:
        pairs: What may be the same row, of one process and of a rank.
        rare: One of many ways to divide rows, of which each may show a likeness by chance.
    """
    chance = _COINCIDENCE / _WAYS if rare else _COINCIDENCE
    if len(pairs) < _ENOUGH or any(due.shape != got.shape for due, got in pairs) or not len(pairs[0][0]):
        return ""
    if len({due.shape for due, _ in pairs}) == 1:
        if _is_moved(pairs, values=_ENOUGH if rare else 1):
            return _MOVED
        due, got = (torch.stack(rows) for rows in zip(*pairs))
        if _agree_in_part(due, got, chance):
            return "of which some numbers are others"
    due, got = (torch.cat(rows) for rows in zip(*pairs))
    return "with other whole numbers in place of each" if _is_renamed(due, got, chance) else ""


def _agree_in_part(due: torch.Tensor, got: torch.Tensor, chance: float) -> bool:
    """Whether a column agrees more often than by chance, which says that the rows are the same, and another does not in these.

    A share of files begins with the same rows and goes on with others. A label is the same in few of these.
    """
    apart = ((got - due).abs() > _ON_LINE * due.abs().amax(0)).any(1)
    return any(
        float(apart[here == there].double().mean()) > _CHANGED
        for here, there in zip(due.T, got.T)
        if _agreement(here, there) > math.log(due.shape[1] / chance)
    )


def _agreement(due: torch.Tensor, got: torch.Tensor) -> float:
    """Return minus the logarithm of the chance that two columns of one distribution agree in so many rows."""
    chance = float((due.unique(return_counts=True)[1] / len(due)).square().sum())
    share = float((due == got).double().mean())
    if share <= chance or _is_regular(due) or _is_regular(got):
        return 0.0
    missing = (1 - share) * math.log((1 - share) / (1 - chance)) if share < 1 else 0.0
    return len(due) * (share * math.log(share / chance) + missing)


def _is_renamed(due: torch.Tensor, got: torch.Tensor, chance: float) -> bool:
    """Whether whole numbers were replaced, each by one other; a number that occurs again confirms it."""
    if (
        torch.equal(due, got)
        or not torch.equal(due, due.round())
        or not torch.equal(got, got.round())
        or _is_regular(due)
        or _is_regular(got)
    ):
        return False
    pairs = {*zip(due.tolist(), got.tolist())}
    is_one_to_one = len({old for old, _ in pairs}) == len({new for _, new in pairs}) == len(pairs)
    return is_one_to_one and len(pairs) > 1 and len(due) - len(pairs) > -math.log2(chance)


def _is_regular(column: torch.Tensor) -> bool:
    """Whether numbers follow from their places, as counts, sorted labels and repeating ones do: all data may have these."""
    steps = column.diff()
    runs = int(steps.count_nonzero()) < len(column) / 8
    repeats = any(torch.equal(column[period:], column[:-period]) for period in range(1, len(column) // 2 + 1))
    return runs or repeats or bool((steps == steps[0]).all())


def _is_moved(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], values: int = _ENOUGH) -> bool:
    """Whether each column is a linear function of the other rows' column; three points form no line by chance.

    Args:
        pairs: Rows of one process and of a rank.
        values: So many different numbers must be in a column that changed.
    """
    if len(pairs) < 2 * _ENOUGH or len({row.shape for pair in pairs for row in pair}) > 1:
        return False
    due, got = (torch.stack(rows) for rows in zip(*pairs))
    if not due.shape[1] or torch.equal(due, got):
        return False
    centred, moved = due - due.mean(0), got - got.mean(0)
    slope = (centred * moved).sum(0) / centred.square().sum(0).clamp_min(torch.finfo(torch.float64).tiny)
    apart = (moved - slope * centred).abs().amax(0)
    varied = moved.abs().amax(0) > _ON_LINE * got.abs().amax(0)
    on_line = apart <= _ON_LINE * (moved.abs().amax(0) + got.abs().amax(0))
    changed = ((got - due).abs().amax(0) > _ON_LINE * due.abs().amax(0)) & varied
    changed &= torch.tensor([len(column.unique()) >= values for column in due.T])
    return bool(on_line.all()) and bool(changed.any())


def _by_step(rows: Sequence[Sequence[Sequence[str]]], rank: int) -> Counter[str]:
    """Return in how many steps a rank takes each row."""
    return Counter(row for step in rows for row in {*step[rank]})


def _are_sliced(alone: WholeRun, run: WholeRun, own: LoaderSeen, ranks: Sequence[LoaderSeen]) -> bool:
    """Whether each rank loads what one process does, and its forwards get a part of it.

    All ranks together get as many rows, but for fewer than there are ranks where slices are uneven; or as many elements, where
    each has its part of every row (of a sequence).
    """
    if any(loader.batch != own.batch for loader in ranks):
        return False
    steps = [(alone.union(step), run.union(step)) for step in range(min(alone.steps, run.steps))]
    rows = [(here.total(), there.total()) for here, there in steps]
    elements = [(_elements(here), _elements(there)) for here, there in steps]
    return bool(steps) and (
        all(min(pair) > 0 and abs(pair[0] - pair[1]) < run.size for pair in rows)
        or all(0 < here == there for here, there in elements)
    )


def _elements(rows: Counter[str]) -> int:
    return sum(count * getattr(row, "numel", 0) for row, count in rows.items())


def _of_steps(alone: WholeRun, run: WholeRun) -> str:
    """At each step the ranks take rows of the same step of one process only, and not all of them once."""
    sentences = []
    for step in range(min(alone.steps, run.steps)):
        here, there = alone.union(step), run.union(step)
        lost, twice = (here - there).total(), (there - here).total()
        padded_or_dropped = max(lost, twice) < run.size and not (lost and twice)
        drawn = any(count > 1 for count in here.values())
        if drawn or padded_or_dropped or not {*there} <= {*here}:
            return ""
        sentences.append(_sentence(f"at step {step}", lost, twice))
    # One step may be chance, where rows are drawn of few.
    return sentences[0] if len(sentences) > 1 else ""


def _of_passes(alone: WholeRun, run: WholeRun) -> str:
    stepped = max((run.union(step).total() for step in range(run.steps)), default=0)
    for own, ranks in _loaders(alone, run):
        if own.replaces or _are_sliced(alone, run, own, ranks):
            continue
        indexed = _is_one_dataset(own, ranks)
        for turn, (expected, *shares) in enumerate(
            zip_longest(own.passes, *(rank.passes for rank in ranks), fillvalue=Pass())
        ):
            sentence = _of_pass((own, ranks), expected, shares, indexed, stepped)
            if sentence:
                return f"in pass {turn} over a DataLoader {sentence}"
    return ""


def _loaders(alone: WholeRun, run: WholeRun) -> Iterator[tuple[LoaderSeen, list[LoaderSeen]]]:
    """Yield each loader that one process trains on, beside those of all ranks; a validation may take all rows everywhere."""
    loaders = alone.ranks[0].taken.loaders
    for number, own in enumerate(loaders):
        if not of_training(loaders)[number]:
            continue
        ranks = [rank.taken.loaders[number] for rank in run.ranks if number < len(rank.taken.loaders)]
        if len(ranks) == run.size:
            yield own, ranks


def _is_one_dataset(own: LoaderSeen, ranks: Sequence[LoaderSeen]) -> bool:
    return bool(own.dataset) and all(rank.dataset == own.dataset for rank in ranks)


def _of_pass(
    loaders: tuple[LoaderSeen, Sequence[LoaderSeen]],
    expected: Pass,
    shares: Sequence[Pass],
    indexed: bool,
    stepped: int,
) -> str:
    """Return how many rows of a pass are lost or taken twice; empty if none, or if unknown.

    Args:
        loaders: Those of one process and of the ranks.
        expected: The pass of one process.
        shares: The passes of the ranks.
        indexed: Whether indices mean the same rows.
        stepped: The most rows of all ranks in a step of the optimizer.
    """
    own, ranks = loaders
    here = Counter(expected.indices if indexed else expected.rows)
    own_rows = [Counter(share.indices if indexed else share.rows) for share in shares]
    there = sum(own_rows, Counter[str]())
    all_given = all(_is_whole(share, indexed) for share in shares)
    step = sum(loader.batch for loader in ranks)
    twice = sum(count - 1 for count in there.values())
    if any(count > 1 for count in here.values()):
        return ""
    if not all_given and own.due is None:
        return ""  # a stream may begin anew
    if (
        not all_given
    ):  # padding comes last, and a rank that takes a row twice before that draws its rows with replacement
        drawn = any(count > 1 for rows in own_rows for count in rows.values())
        return _sentence("", 0, twice) if twice and not drawn else ""
    recognised = indexed or {*there} <= {*here}
    lost = (here - there).total() if recognised and _is_whole(expected, indexed) else 0
    size = len(ranks)
    # A sampler pads or drops fewer rows than there are ranks, a loader fewer than all of them take in a step; both drop fewer
    # rows than a step of the optimizer has, where it takes one batch of each rank and all batches but the last are alike.
    alike = indexed and stepped and all(len({*share.sizes[:-1]}) <= 1 for share in shares)
    dropped = min(step + size, max(step, stepped)) if alike else step + size
    strange = lost >= dropped or twice >= max(step, size) or (lost > 0 and twice >= size)
    return _sentence("", lost, twice) if strange else ""


def _is_whole(one: Pass, indexed: bool) -> bool:
    return one.complete or (indexed and one.planned)


def _sentence(where: str, lost: int, twice: int) -> str:
    counts = [f"{lost} of the rows that one process takes are taken by no rank"] if lost else []
    counts += [f"{twice} of the rows that the ranks take were taken before"] if twice else []
    return (
        f"{where} {' and '.join(counts)}. Cause: the shares of the ranks overlap or leave rows out. Divide by rank and number of "
        "ranks as DistributedSampler does, or take rows[rank::size]."
    ).lstrip()
