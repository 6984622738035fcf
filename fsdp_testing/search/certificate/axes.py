"""The axes of small cases: one table for each, the simplest value first; a cell is one value of each, and has one case.

Two optimizer steps; every layer is three wide, so that of the numbers of ranks only one and three divide it; inputs
differ by rank and by micro-batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from fsdp_testing.cases.drawing import legal_case, needs_of_case
from fsdp_testing.cases.records import (
    Batch,
    Case,
    ForwardBackward,
    MixedPrecisionSpec,
    ModelSpec,
    Operation,
    OptimizerSpec,
    Step,
    WorldSpec,
    WrappingPlan,
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
"""Strategy -> its meshes of at most four ranks: that many in a row, or replicas x shards. Every column but the first, and
every row but the first, is a group without rank 0."""

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
        strategy: Of `WORLDS`.
        mesh: Of the strategy's.
        units: Of `UNITS`.
        trait: Of `TRAITS`.
        first: Micro-batches of the first step, in `LETTERS`; the last one synchronises.
        second: Those of the second step.
        skipping: The rank that does not use the part in micro-batches of a small letter, or `EVERY_RANK`.
        clearing: Of `CLEARING`.
        dtype: Of `DTYPES`.
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
        # Written out: a sample asks it of every cell of the cube, before anything runs.
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

    A step of which a micro-batch leaves something unused is only repeated, but for the shortest one.
    """
    return ("S",) if first == "S" else ("S", first) if first == "s" or not skips(first) else (first,)


def in_cube(cell: Cell) -> bool:
    """Return whether there is such a cell: one thing at a time is unused, frozen, shared, dropped or called twice."""
    uses_all = not skips(cell.first + cell.second)
    ranks = (EVERY_RANK,) if uses_all else (EVERY_RANK, *(range(cell.size) if cell.size > 1 else ()))
    return (
        cell.mesh in WORLDS[cell.strategy]
        and cell.second in second_steps(cell.first)
        and cell.skipping in ranks
        and (uses_all or cell.trait == "plain")
    )


@cache
def tree_of(trait: str) -> dict[str, Any]:
    """Return the model, one object for each trait: what is kept apart by identity is found again."""
    given = TRAITS[trait]

    def node(kind: str, name: str, part: str = "", **others: Any) -> dict[str, Any]:
        return {"kind": kind, "name": name, **others, **given.get(part, {})}

    first = node("group", "first", nodes=[node("linear", "w", "first.w", out=3)])
    inner = node("group", "inner", "inner", branch=0, nodes=[node("linear", "w", "inner.w", out=3)])
    outer = node("group", "outer", nodes=[node("linear", "w", "outer.w", out=3), inner])
    alias = [dict(given["alias"])] if "alias" in given else []
    return {"width": 3, "nodes": [first, outer, *alias]}


def case_of(cell: Cell, capabilities: frozenset[str]) -> Case:
    """Return the case of a cell.

    Args:
        cell: Of the cube.
        capabilities: What is claimed decides which optimizer is fair (`legal_case`).
    """
    dtype, precision = DTYPES[cell.dtype]
    mesh = tuple(map(int, cell.mesh.split("x"))) if "x" in cell.mesh else ()
    return Case(
        ModelSpec("tree", dtype=dtype, tree=tree_of(cell.trait)),
        WorldSpec(cell.size, mesh=mesh),
        tuple(_program(cell)),
        wrapping=WrappingPlan(UNITS[cell.units]),
        strategy=cell.strategy,
        mixed_precision=precision,
        optimizer=_fair_optimizer(cell.trait, skips(cell.first + cell.second), capabilities),
    )


@cache
def _fair_optimizer(trait: str, skipping: bool, capabilities: frozenset[str]) -> OptimizerSpec:
    program = tuple(_micro_batches("s" if skipping else "S", 1, 1, EVERY_RANK))
    plain = Case(ModelSpec("tree", tree=tree_of(trait)), WorldSpec(1), program, optimizer=OPTIMIZER)
    return legal_case(plain, capabilities).optimizer


def _program(cell: Cell) -> Iterator[Operation]:
    yield from _micro_batches(cell.first, 1, cell.size, cell.skipping)
    yield Step()
    yield from CLEARING[cell.clearing]
    yield from _micro_batches(cell.second, 1 + len(cell.first), cell.size, cell.skipping)
    yield Step()


def _micro_batches(schedule: str, seed: int, size: int, skipping: int) -> Iterator[Operation]:
    for place, letter in enumerate(schedule):
        usage: tuple[tuple[bool, ...], ...] = ()
        if letter.islower():
            ranks = range(size if skipping != EVERY_RANK else 1)
            usage = tuple((skipping not in (EVERY_RANK, rank),) for rank in ranks)
        yield ForwardBackward(Batch(seed + place, (2,), usage), no_sync=letter.upper() == "N")


def needs_of(cell: Cell) -> frozenset[str]:
    """Return the capabilities without which the cell is not claimed."""
    letters = "".join(sorted(set(cell.first + cell.second)))
    return _needs(cell.strategy, cell.units, cell.trait, letters, cell.skipping != EVERY_RANK, cell.dtype)


@cache
def _needs(strategy: str, units: str, trait: str, letters: str, one_rank: bool, dtype: str) -> frozenset[str]:
    mesh, skipping = ("2x2" if strategy.startswith("hybrid") else "4"), (0 if one_rank else EVERY_RANK)
    alike = Cell(strategy, mesh, units, trait, letters, letters, skipping, "not at all", dtype)
    return needs_of_case(case_of(alike, frozenset())) | {"accumulate_without_no_sync"}
