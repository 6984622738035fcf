"""The order of cells, and their parts: pure arithmetic over the axes, the same everywhere.

Cells that one oracle replay judges make a block. Blocks come in an order that looks random, so that whatever ends a run,
what was run lies all over the cube.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from itertools import islice, product, zip_longest
from typing import NamedTuple

from fsdp_testing.search.certificate.axes import (
    CLEARING,
    DTYPES,
    EVERY_RANK,
    TRAITS,
    UNITS,
    WORLDS,
    Cell,
    in_cube,
    ranks_of,
    schedules,
    second_steps,
    skips,
)

MOST_RANKS = 4
CELLS_AT_ONCE = 32

_WORLDS_OF_SIZE = {
    size: [(strategy, mesh) for strategy, meshes in WORLDS.items() for mesh in meshes if ranks_of(mesh) == size]
    for size in range(1, MOST_RANKS + 1)
}

Job = tuple[Cell, ...]
"""Cells of one number of ranks that run one after the other on the same ranks."""


class Block(NamedTuple):
    """Cells for which the oracle computes the same."""

    size: int
    trait: str
    first: str
    second: str
    skipping: int
    clearing: str
    dtype: str

    def cells(self) -> Iterator[Cell]:
        for (strategy, mesh), units in product(_WORLDS_OF_SIZE[self.size], UNITS):
            yield Cell(strategy, mesh, units, *self[1:])

    @property
    def digest(self) -> int:
        """Return a number that decides its place."""
        return digest("/".join(map(str, self)))


def digest(text: str) -> int:
    """Return a number that is the same in every process, and unrelated for texts that are alike."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")


def blocks() -> list[Block]:
    """Return all blocks, in the order in which they are run.

    Which rank alone leaves a part out, and in which order micro-batches and units come, makes a block of its own:
    implementations treat ranks differently (the first, the last with a short shard), and keep state.
    """
    every = []
    for size, clearing, dtype, trait in product(range(1, MOST_RANKS + 1), CLEARING, DTYPES, TRAITS):
        for first in schedules():
            for second in second_steps(first):
                lone = range(size) if size > 1 and skips(first) else ()
                made = (Block(size, trait, first, second, rank, clearing, dtype) for rank in (EVERY_RANK, *lone))
                every += [block for block in made if in_cube(next(block.cells()))]
    return sorted(every, key=lambda block: block.digest)


# ----------------------------------------------------------------------------------------------- what is run


def jobs(claimed: Callable[[Cell], bool], sample: int | None = None, shard: tuple[int, int] = (1, 1)) -> list[Job]:
    """Return what is run, in order.

    Args:
        claimed: Whether the implementation may be asked a cell.
        sample: Only about so many cells, of every strategy, mesh and choice of units equally many.
        shard: `(i, n)`: the i-th of n parts, counted from 1; the parts are disjoint and together everything.
    """
    groups = [[cell for cell in block.cells() if claimed(cell)] for block in blocks()]
    if sample is not None:
        groups = [[cell] for cell in sampled([cell for group in groups for cell in group], sample)]
    return list(packed(groups[shard[0] - 1 :: shard[1]]))


def sampled(cells: Sequence[Cell], count: int) -> list[Cell]:
    """Return `count` of the cells, taken in turn from each face of strategy, mesh and units."""
    faces: dict[tuple[str, str, str], list[Cell]] = {}
    for cell in sorted(cells, key=lambda cell: digest(cell.name)):
        faces.setdefault((cell.strategy, cell.mesh, cell.units), []).append(cell)
    turns = zip_longest(*(faces[face] for face in sorted(faces)))
    return list(islice((cell for turn in turns for cell in turn if cell is not None), count))


def packed(groups: Sequence[Sequence[Cell]]) -> Iterator[Job]:
    """Yield groups of one size together until they are worth a call."""
    waiting: dict[int, list[Cell]] = {}
    for group in groups:
        for cell in group:
            waiting.setdefault(cell.size, []).append(cell)
        for size in [size for size, cells in waiting.items() if len(cells) >= CELLS_AT_ONCE]:
            yield tuple(waiting.pop(size))
    yield from (tuple(cells) for cells in waiting.values())
