"""The case of a cell, and the claims that it needs.

Two optimizer steps. Every layer is three wide, so only one and three ranks divide it. Inputs differ by rank and by micro-batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

from fsdp_testing.cases.drawing import legal_case, needs_of_case
from fsdp_testing.cases.records import (
    Batch,
    Case,
    ForwardBackward,
    ModelSpec,
    Operation,
    OptimizerSpec,
    Step,
    WorldSpec,
    WrappingPlan,
)
from fsdp_testing.search.certificate.axes import CLEARING, DTYPES, EVERY_RANK, OPTIMIZER, TRAITS, UNITS, Cell, skips


@cache
def tree_of(trait: str) -> dict[str, Any]:
    """Return the model, one object for each trait: caches that are keyed by identity find it again."""
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
        cell: Cell of the cube.
        capabilities: The claims decide which optimizer is fair (`legal_case`).
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
    letters = _letters(cell.first, cell.second)
    return _needs(cell.strategy, cell.units, cell.trait, letters, cell.skipping != EVERY_RANK, cell.dtype)


@cache
def _letters(first: str, second: str) -> str:
    return "".join(sorted(set(first + second)))


@cache
def _needs(strategy: str, units: str, trait: str, letters: str, one_rank: bool, dtype: str) -> frozenset[str]:
    mesh, skipping = ("2x2" if strategy.startswith("hybrid") else "4"), (0 if one_rank else EVERY_RANK)
    alike = Cell(strategy, mesh, units, trait, letters, letters, skipping, "not at all", dtype)
    return needs_of_case(case_of(alike, frozenset())) | {"accumulate_without_no_sync"}
