"""The cube: exact counts, legal cells, one order everywhere, shards that are parts, samples that reach every face."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from dataclasses import fields, replace
from functools import cache
from itertools import product

import pytest

from fsdp_testing.cases.drawing import legal_case, needs_of_case
from fsdp_testing.cases.records import STRATEGIES
from fsdp_testing.cases.records.capabilities import CAPABILITIES
from fsdp_testing.oracle.setup import oracle_view
from fsdp_testing.search.certificate.axes import (
    CLEARING,
    DTYPES,
    EVERY_RANK,
    FLAT,
    GRIDS,
    LETTERS,
    TRAITS,
    UNITS,
    WORLDS,
    Block,
    Cell,
    blocks,
    cube,
    in_cube,
    jobs,
    ranks_of,
    sampled,
    schedules,
    skips,
)
from fsdp_testing.search.certificate.cases import case_of, needs_of

ALL = frozenset(CAPABILITIES)


@cache
def every_block() -> list[Block]:
    return blocks()


@cache
def every_cell() -> list[Cell]:
    """When a test asks, not when tests are collected: that takes a second of each worker of pytest-xdist."""
    return [cell for cells in cube() for cell in cells]


def everything(_cell: Cell) -> bool:
    return True


def test_a_step_has_every_pattern_of_at_most_three_micro_batches():
    found = list(schedules())
    every = ["".join(letters) for k in (1, 2, 3) for letters in product(LETTERS, repeat=k)]
    assert sorted(found) == sorted(one for one in every if one[-1] in "Ss")
    assert len(found) == 2 + 8 + 32
    assert [one for one in found if not skips(one)] == ["S", "SS", "NS", "SSS", "SNS", "NSS", "NNS"]


def test_meshes_are_all_of_at_most_four_ranks():
    assert set(WORLDS) == set(STRATEGIES)
    assert {(r, s) for r in range(1, 5) for s in range(1, 5) if r * s <= 4} == {
        tuple(map(int, mesh.split("x"))) for mesh in GRIDS
    }
    assert [ranks_of(mesh) for mesh in FLAT] == [1, 2, 3, 4]


def test_the_cube_has_so_many_cells():
    worlds, units, rest = 28, 4, len(CLEARING) * len(DTYPES)
    used = 13 * len(TRAITS) + 36  # of every trait; and those that leave something unused on every rank
    sizes = [ranks_of(mesh) for meshes in WORLDS.values() for mesh in meshes]
    lone = sum(size for size in sizes if size > 1)  # each rank of several may be the one that leaves a part out
    assert len(every_cell()) == worlds * units * rest * used + lone * units * rest * 36 == 220_032


def test_the_cells_are_those_of_the_axes_each_once():
    face = ("to zeros", "float32")
    expected = {
        cell
        for (strategy, meshes), units, trait, first in product(WORLDS.items(), UNITS, TRAITS, schedules())
        for mesh, second, skipping in product(meshes, {"S", first}, range(EVERY_RANK, 4))
        if in_cube(cell := Cell(strategy, mesh, units, trait, first, second, skipping, *face))
    }
    there = [cell for cell in every_cell() if (cell.clearing, cell.dtype) == face]
    assert set(there) == expected
    assert len(set(every_cell())) == len(every_cell())


@pytest.mark.parametrize("claims", [ALL, ALL - {"unused_gradient_is_none"}], ids=["all", "zero for none"])
def test_every_cell_is_a_legal_case_of_which_nothing_is_void(claims: frozenset[str]):
    for cell in every_cell()[::331]:
        case = case_of(cell, claims)
        assert legal_case(case) == legal_case(case, claims) == case, cell
        assert needs_of_case(case) | {"accumulate_without_no_sync"} == needs_of(cell) | {"accumulate_without_no_sync"}
        assert case.world.size == cell.size


def test_the_oracle_sees_the_cells_of_a_block_as_one_and_those_of_others_not():
    views = [{oracle_view(case_of(cell, ALL)).identity for cell in block.cells()} for block in every_block()[::91]]
    assert all(len(view) == 1 for view in views)
    assert len(set.union(*views)) == len(views)


PRINTED = """
import sys
from fsdp_testing.search.certificate.axes import jobs
found = jobs(lambda cell: cell.strategy != "no_shard", shard=(2, 3))
print(len(found), [cell.name for job in found[:40] for cell in job], "torch" in sys.modules)
"""


def test_the_order_is_the_same_in_every_process_and_needs_no_torch():
    def printed(seed: str) -> str:
        command = [sys.executable, "-c", PRINTED]
        environment = {"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(filter(None, sys.path))}
        return subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout

    one, other = printed("1"), printed("2")
    assert one == other
    assert one.rstrip().endswith("False")


@pytest.mark.parametrize(("parts", "sample"), [(2, None), (7, None), (3, 500)])
def test_shards_are_disjoint_and_cover_everything(parts: int, sample: int | None):
    def face(cell: Cell) -> bool:
        return cell.dtype == "float32" and cell.clearing == "to zeros"

    whole = [cell for job in jobs(face, sample) for cell in job]
    shards = [[c for job in jobs(face, sample, (i, parts)) for c in job] for i in range(1, parts + 1)]
    assert sum(map(len, shards)) == len(whole)
    assert set().union(*shards) == set(whole)
    assert len(set(whole)) == len(whole) == (sample or len(every_cell()) // 9)
    assert max(map(len, shards)) - min(map(len, shards)) < max(2, 0.1 * len(whole))


def test_a_job_is_of_one_size_and_cells_of_a_block_stay_together():
    found = jobs(everything)
    assert {len({cell.size for cell in job}) for job in found} == {1}
    assert sum(map(len, found)) == len(every_cell())
    number = {cell: place for place, job in enumerate(found) for cell in job}
    assert all(len({number[cell] for cell in block.cells()}) == 1 for block in every_block()[::17])


def test_a_sample_is_spread_over_all_faces():
    found = sampled(everything, 1000)
    assert len(set(found)) == 1000
    worlds = Counter((cell.strategy, cell.mesh, cell.units) for cell in found)
    assert len(worlds) == 28 * 4
    assert max(worlds.values()) - min(worlds.values()) <= 1
    for item in fields(Cell):
        assert {getattr(cell, item.name) for cell in found} == {getattr(cell, item.name) for cell in every_cell()}, (
            item.name
        )
    assert set(sampled(everything, 200)) < set(found)


def test_a_cell_is_named_in_words() -> None:
    cell = Cell("full_shard", "2", "root and outer", "plain", "Ns", "Ns", 1, "to zeros", "float64")
    assert cell.words == (
        "full_shard on 2 ranks, units: root and outer, plain, micro-batches Ns, then Ns, left out on rank 1, gradients cleared "
        "to zeros, float64"
    )
    whole = replace(cell, strategy="hybrid_shard", mesh="2x1", first="S", second="S", skipping=EVERY_RANK)
    assert whole.words.startswith("hybrid_shard on a mesh of 2x1 ranks, ")
    assert "left out" not in whole.words
