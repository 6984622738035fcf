"""The axes of small cases: one table for each, the simplest value first; a cell is one value of each.

Cells that one oracle replay judges make a block. Blocks come in an order that looks random, so
that the cells that have run are spread over the cube whenever a run ends. Pure arithmetic, the same everywhere.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import islice, product, zip_longest
from typing import Any, NamedTuple

from fsdp_testing.cases.records import (
    MixedPrecisionSpec,
    Operation,
    OptimizerSpec,
    ZeroGrad,
)

FLAT = ("1", "2", "3", "4")
GRIDS = ("1x1", "1x2", "2x1", "1x3", "3x1", "1x4", "2x2", "4x1")

WORLDS: Mapping[str, tuple[str, ...]] = {
    "full_shard": FLAT,
    "shard_grad_op": FLAT,
    "no_shard": FLAT,
    "hybrid_shard": GRIDS,
    "hybrid_shard_zero2": GRIDS,
}
"""Strategy -> its meshes of at most four ranks: ranks in a row, or replicas x shards. Every row and column but the first is a
group without rank 0.
"""

UNITS: Mapping[str, tuple[str, ...]] = {
    "root": (),
    "root and outer": ("outer",),
    "root and two beside": ("first", "outer"),
    "root and two nested": ("outer", "outer.inner"),
}
"""Which of `first`, `outer` and `outer.inner` are units; the root always is one."""

TRAITS: Mapping[str, Mapping[str, Mapping[str, Any]]] = {
    "plain": {},
    "frozen part": {"inner.w": {"frozen": "all"}},
    "frozen bias": {"outer.w": {"frozen": "bias"}},
    "shared weight": {"outer.w": {"tie": "t"}, "inner.w": {"tie": "t"}},
    "called twice": {"inner": {"calls": 2}},
    "output dropped": {"inner": {"dropped": True}},
    "under two names": {"alias": {"kind": "again", "name": "alias", "of": "first"}},
}
"""What one part of the model has besides: part -> fields of its node (`cases/models/tree_schema.py`). Parts that are not used by
some micro-batches are an affair of the schedule."""

DTYPES: Mapping[str, tuple[str, MixedPrecisionSpec | None]] = {
    "float64": ("float64", None),
    "float32": ("float32", None),
    "bfloat16, reduced in float32": ("float32", MixedPrecisionSpec("bfloat16", "float32")),
}
"""Dtype of parameters, and the dtypes of computation and reduction."""

CLEARING: Mapping[str, tuple[Operation, ...]] = {
    "to none": (ZeroGrad(),),
    "to zeros": (ZeroGrad(set_to_none=False),),
    "not at all": (),
}
"""What happens to the gradients between the two steps."""

LETTERS = "SNsn"
"""One micro-batch: S synchronises, N stays local (`no_sync`); a small letter does not use `outer.inner`."""

MOST_MICRO_BATCHES = 3
EVERY_RANK = -1
OPTIMIZER = OptimizerSpec("sgd", {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01})


@dataclass(frozen=True, slots=True, order=True)
class Cell:
    """One small case.

    Attributes:
        strategy: One of `WORLDS`.
        mesh: A mesh of the strategy.
        units: One of `UNITS`.
        trait: One of `TRAITS`.
        first: Micro-batches of the first step, in `LETTERS`; the last one synchronises.
        second: Those of the second step.
        skipping: The rank that does not use the part in micro-batches of a small letter, or `EVERY_RANK`.
        clearing: One of `CLEARING`.
        dtype: One of `DTYPES`.
    """

    strategy: str
    mesh: str
    units: str
    trait: str
    first: str
    second: str
    skipping: int
    clearing: str
    dtype: str

    @property
    def name(self) -> str:
        """Return all values, as states and reports name the cell."""
        # Written out for speed: a sample computes it for every cell of the cube before anything runs.
        return (
            f"{self.strategy}/{self.mesh}/{self.units}/{self.trait}/{self.first}/{self.second}/{self.skipping}"
            f"/{self.clearing}/{self.dtype}"
        )

    @property
    def words(self) -> str:
        """Return all values, as people read them."""
        parts = [f"{self.strategy} on {'a mesh of ' * ('x' in self.mesh)}{self.mesh} rank{'s' * (self.mesh != '1')}"]
        parts += [f"units: {self.units}", self.trait, f"micro-batches {self.first}, then {self.second}"]
        if skips(self.schedule.replace(" ", "")):
            parts.append(f"left out on {'every rank' if self.skipping == EVERY_RANK else f'rank {self.skipping}'}")
        return ", ".join([*parts, f"gradients cleared {self.clearing}", self.dtype])

    @property
    def size(self) -> int:
        return ranks_of(self.mesh)

    @property
    def schedule(self) -> str:
        return f"{self.first} {self.second}"


def ranks_of(mesh: str) -> int:
    """Return the number of ranks of a mesh."""
    rows, _, columns = mesh.partition("x")
    return int(rows) * int(columns or 1)


def schedules() -> Iterator[str]:
    """Yield the micro-batches of one step in every pattern, short ones first; the last one synchronises."""
    longest = [""]
    for _ in range(MOST_MICRO_BATCHES):
        for begun in longest:
            yield from (begun + last for last in "Ss")
        longest = [begun + letter for begun in longest for letter in LETTERS]


def skips(schedule: str) -> bool:
    """Return whether a micro-batch leaves a part of the model unused."""
    return not schedule.isupper()


def second_steps(first: str) -> tuple[str, ...]:
    """Return what the second step may be: one plain micro-batch, or the first step again.

    A step with a micro-batch that leaves something unused is only repeated, except the shortest one.
    """
    return ("S",) if first == "S" else ("S", first) if first == "s" or not skips(first) else (first,)


def in_cube(cell: Cell) -> bool:
    """Return whether the cube contains this cell: only one thing at a time is unused, frozen, shared, dropped or called twice."""
    uses_all = not skips(cell.first + cell.second)
    ranks = (EVERY_RANK,) if uses_all else (EVERY_RANK, *(range(cell.size) if cell.size > 1 else ()))
    return (
        cell.mesh in WORLDS[cell.strategy]
        and cell.second in second_steps(cell.first)
        and cell.skipping in ranks
        and (uses_all or cell.trait == "plain")
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
        """Return a number that decides its position."""
        return digest("/".join(map(str, self)))


def digest(text: str) -> int:
    """Return a number that is the same in every process, and unrelated for similar texts."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")


def blocks() -> list[Block]:
    """Return all blocks, in the order in which they are run.

    The rank that leaves a part out, and the order of micro-batches and units, distinguish blocks: implementations treat ranks
    differently (the first, the last with a short shard), and keep state.
    """
    every = []
    for size, clearing, dtype, trait in product(range(1, MOST_RANKS + 1), CLEARING, DTYPES, TRAITS):
        for first in schedules():
            for second in second_steps(first):
                lone = range(size) if size > 1 and skips(first) else ()
                made = (Block(size, trait, first, second, rank, clearing, dtype) for rank in (EVERY_RANK, *lone))
                every += [block for block in made if in_cube(next(block.cells()))]
    return sorted(every, key=lambda block: block.digest)


@cache
def cube() -> tuple[tuple[Cell, ...], ...]:
    """Return every cell, block by block; cached, because a command needs them at its start and its end."""
    return tuple(tuple(block.cells()) for block in blocks())


@cache
def _shuffled() -> tuple[Cell, ...]:
    """Return every cell, in the order in which samples take them."""
    return tuple(sorted((cell for cells in cube() for cell in cells), key=lambda cell: digest(cell.name)))


# ----------------------------------------------------------------------------------------------- what is run


def jobs(claimed: Callable[[Cell], bool], sample: int | None = None, shard: tuple[int, int] = (1, 1)) -> list[Job]:
    """Return what is run, in order.

    Args:
        claimed: Whether the implementation claims what a cell needs.
        sample: Only about this many cells, equally many of every strategy, mesh and choice of units.
        shard: `(i, n)`: the i-th of n parts, counted from 1; the parts are disjoint and together everything.
    """
    if sample is None:
        groups = [[cell for cell in cells if claimed(cell)] for cells in cube()]
    else:
        groups = [[cell] for cell in sampled(claimed, sample)]
    return list(packed(groups[shard[0] - 1 :: shard[1]]))


def sampled(claimed: Callable[[Cell], bool], count: int) -> list[Cell]:
    """Return `count` of the cells that are claimed, taken in turn from each face of strategy, mesh and units."""
    faces: dict[tuple[str, str, str], list[Cell]] = {}
    for cell in filter(claimed, _shuffled()):
        faces.setdefault((cell.strategy, cell.mesh, cell.units), []).append(cell)
    turns = zip_longest(*(faces[face] for face in sorted(faces)))
    return list(islice((cell for turn in turns for cell in turn if cell is not None), count))


def packed(groups: Sequence[Sequence[Cell]]) -> Iterator[Job]:
    """Yield groups of one size, combined until they are worth a call."""
    waiting: dict[int, list[Cell]] = {}
    for group in groups:
        for cell in group:
            waiting.setdefault(cell.size, []).append(cell)
        for size in [size for size, cells in waiting.items() if len(cells) >= CELLS_AT_ONCE]:
            yield tuple(waiting.pop(size))
    yield from (tuple(cells) for cells in waiting.values())
