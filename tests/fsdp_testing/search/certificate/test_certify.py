"""Cells on ranks: sound implementations hold; of each planted fault exactly its face fails; a bad cell costs itself only."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from pathlib import Path

import pytest

from fsdp_testing.adapters import registry
from fsdp_testing.cases.records import CAPABILITIES
from fsdp_testing.errors import PoolBroken
from fsdp_testing.judging.case_runner import CaseRunner
from fsdp_testing.judging.known import KnownFailures
from fsdp_testing.oracle.models import uses_of
from fsdp_testing.ranks.pool import default_pool
from fsdp_testing.search.certificate.axes import CLEARING, EVERY_RANK, WORLDS, Cell, in_cube
from fsdp_testing.search.certificate.cases import case_of
from fsdp_testing.search.certificate.causes import CauseFinder
from fsdp_testing.search.certificate.certify import CellRunner, Certificate, Marked, Plan
from fsdp_testing.search.certificate.cube import jobs
from fsdp_testing.search.certificate.verdicts import FAILS, HELD, HOLDS, UNKNOWN

STRATEGIES = ("full_shard", "hybrid_shard")
REST = ("root", "plain")


def face(*, first: tuple[str, ...], clearing: tuple[str, ...] = ("to none",), skipping: int = EVERY_RANK) -> list[Cell]:
    """Cells on every mesh of two strategies, all else plain."""
    made = [
        Cell(strategy, mesh, *REST, one, one, skipping, clear, "float64")
        for strategy, one, clear in product(STRATEGIES, first, clearing)
        for mesh in WORLDS[strategy]
    ]
    return [cell for cell in made if in_cube(cell)]


def marked(name: str, cells: list[Cell], deadline: float = 60.0) -> Marked:
    runner = CellRunner(registry.load(name), CaseRunner(default_pool(), timeout=deadline))
    assert all(map(runner.claimed, cells))
    sizes = sorted({cell.size for cell in cells})
    return [one for size in sizes for one in runner.run(tuple(c for c in cells if c.size == size))]


def failing(name: str, cells: list[Cell]) -> set[str]:
    found = marked(name, cells)
    assert all(mark.status in (HOLDS, FAILS) for _, mark in found), found
    return {cell.name for cell, mark in found if mark.status == FAILS}


FAULTS: dict[str, tuple[list[Cell], Callable[[Cell], bool]]] = {
    "ALONE": (
        face(first=("S", "NS", "SNS")),
        lambda cell: cell.strategy == "hybrid_shard" and cell.mesh.endswith("x1") and "N" in cell.first,
    ),
    "FACTOR": (face(first=("S", "NS")), lambda cell: cell.mesh == "2x2"),
    "UNUSED": (face(first=("NS", "Ns", "nS", "Ss")), lambda cell: cell.first == "Ns"),
    "ZEROS": (face(first=("S",), clearing=tuple(CLEARING)), lambda cell: cell.clearing == "to zeros"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_of_a_planted_fault_exactly_its_face_fails(name: str):
    cells, broken = FAULTS[name]
    expected = {cell.name for cell in cells if broken(cell)}
    assert 0 < len(expected) < len(cells)
    assert failing(f"small_faults:{name}", cells) == expected


def test_without_a_fault_all_of_these_hold():
    cells = list(dict.fromkeys(cell for cells, _ in FAULTS.values() for cell in cells))
    assert failing("small_faults:UNBROKEN", cells) == set()


@pytest.mark.parametrize("clearing", ["to zeros", "not at all"])
def test_uses_that_are_added_where_the_gradient_is_stored_are_no_failure(clearing: str):
    """FSDP1 on one rank adds up the two uses of a part in float32 once there is a gradient, else in bfloat16."""
    reduced = "bfloat16, reduced in float32"
    cell = Cell("full_shard", "1", "root and two nested", "called twice", "S", "S", EVERY_RANK, clearing, reduced)
    assert marked("torch-fsdp1", [cell]) == [(cell, HELD)]


def test_only_a_part_that_is_used_twice_has_more_room():
    def uses(trait: str) -> dict[str, int]:
        cell = Cell("no_shard", "2", *("root", trait), "S", "S", EVERY_RANK, "to zeros", "bfloat16, reduced in float32")
        case = case_of(cell, frozenset(CAPABILITIES))
        return {fqn: uses_of(case, fqn) for fqn in ("first.w.weight", "outer.w.weight", "outer.inner.w.weight")}

    assert uses("plain") == dict.fromkeys(uses("plain"), 1)
    assert uses("called twice") == {"first.w.weight": 1, "outer.w.weight": 1, "outer.inner.w.weight": 2}
    assert uses("under two names") == {"first.w.weight": 2, "outer.w.weight": 1, "outer.inner.w.weight": 1}


def test_a_cell_that_dies_costs_itself_only():
    cells = [c for c in face(first=("S",), clearing=tuple(CLEARING)) if c.size == 3]
    found = dict(marked("small_faults:DIES", cells))
    for cell, mark in found.items():
        assert (mark.looks[:1] == ("died",)) == (cell.clearing == "to zeros"), (cell, mark)


def test_a_death_that_does_not_repeat_is_no_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    once = tmp_path / "once"
    once.touch()
    monkeypatch.setenv("CERTIFICATE_DIES_ONCE", str(once))  # each job takes over the environment
    cells = [c for c in face(first=("S",)) if c.size == 2]
    found = [mark for _, mark in marked("small_faults:ONCE", cells)]
    assert not once.exists(), "nothing died"
    assert [mark.status for mark in found if mark != HELD] == [UNKNOWN]
    assert "then, on other ranks, it held" in next(mark.reason for mark in found if mark != HELD)


@pytest.mark.parametrize(
    ("name", "looks"),
    [
        ("DIES_LATE", ("died", "SIGKILL", "")),
        ("KEEPS_MODELS", ("leaked", "model", "")),
        ("REFUSES", ("raised", "NotImplementedError: zeros are not there yet", "zero_grad")),
    ],
)
def test_a_cell_that_is_right_but_for_how_it_ends_fails(name: str, looks: tuple[str, ...]):
    cells = [c for c in face(first=("S",), clearing=tuple(CLEARING)) if c.size == 2 and c.strategy == "full_shard"]
    for cell, mark in marked(f"small_faults:{name}", cells):
        assert (mark.status, mark.looks) == ((FAILS, looks) if cell.clearing == "to zeros" else (HOLDS, ())), mark


def test_of_cells_that_look_alike_the_first_are_run_again_alone_and_the_others_say_that_they_were_not():
    cells = [c for c in face(first=("S", "NS", "SS"), clearing=("to zeros",)) if c.size == 2]
    found = [mark for _, mark in marked("small_faults:ZEROS", cells)]
    assert [mark.status for mark in found] == [FAILS] * len(cells)
    assert [mark.confirmed for mark in found] == [True] * 3 + [False] * (len(cells) - 3)


def test_a_lost_judge_leaves_the_cells_unknown_that_lose_it(monkeypatch: pytest.MonkeyPatch):
    cells = [c for c in face(first=("S", "NS")) if c.size == 2]
    bad = cells[3]
    judge_batch = CaseRunner.judge_batch

    def losing(runner: CaseRunner, name, cases, *arguments, **options):
        if any(case.strategy == bad.strategy and case.program[0].no_sync == ("N" in bad.first) for case in cases):
            raise PoolBroken("the judge of a batch was lost")
        return judge_batch(runner, name, cases, *arguments, **options)

    monkeypatch.setattr(CaseRunner, "judge_batch", losing)
    lost = {cell for cell, mark in marked("small_faults:UNBROKEN", cells) if mark != HELD}
    assert lost == {cell for cell in cells if (cell.strategy, cell.first) == (bad.strategy, bad.first)}


@pytest.mark.parametrize(
    ("name", "fails"), [("UNBROKEN", ()), ("FIRST_RANK_DECIDES", (0,)), ("LAST_RANK_DECIDES", (1,))]
)
def test_every_rank_may_be_the_one_that_leaves_a_part_out(name: str, fails: tuple[int, ...]):
    asked = {cell for job in jobs(lambda cell: cell.mesh == "2" and cell.strategy == "full_shard") for cell in job}
    cells = [c for rank in range(2) for c in face(first=("s",), skipping=rank) if c in asked]
    assert {cell.skipping for cell in cells} == {0, 1}
    assert {cell.skipping for cell, mark in marked(f"small_faults:{name}", cells) if mark.status == FAILS} == set(fails)


# ----------------------------------------------------------------------------------------------- whole runs


def certificate(name: str, state: Path, **plan: int) -> Certificate:
    return Certificate(Plan(registry.load(f"small_faults:{name}"), state, lanes=1, **plan), default_pool())  # type: ignore[arg-type]  # numbers only


def test_a_run_goes_on_where_it_stopped(tmp_path: Path):
    whole = certificate("UNBROKEN", tmp_path / "whole", sample=16).run()
    assert whole.counts()[HOLDS] == len(whole.ran) == 16
    parts = certificate("UNBROKEN", tmp_path / "parts", sample=16, cells=1).run()
    begun = set(parts.ran)
    assert 0 < len(begun) < 16
    seen: list[int] = []
    later = certificate("UNBROKEN", tmp_path / "parts", sample=16)
    assert later.verdicts.ran == begun
    assert later.run(lambda found: seen.append(len(found.ran))).ran == whole.ran
    assert seen[0] > len(begun)


def test_one_cause_is_told_once_with_its_simplest_cell_and_shortest_schedule(tmp_path: Path):
    made = certificate("ALONE", tmp_path, sample=48)
    failed = made.run().failing()
    assert len(failed) > 5
    assert all(cell.mesh.endswith("x1") and "N" in cell.first.upper() for cell in failed)
    (cause,) = CauseFinder(made, KnownFailures(), 600.0).find()
    assert cause.cells == len(failed)
    assert CauseFinder(made, KnownFailures(), 1e-9).find() == []
    assert len(cause.cell.schedule) == min(len(cell.schedule) for cell in failed)
    assert (cause.case.strategy, cause.case.world.mesh[1]) == ("hybrid_shard", 1)
    assert [line.partition("(")[0] for line in cause.schedule] == ["0 forward_backward", "1 forward_backward"]
    assert cause.shortened
