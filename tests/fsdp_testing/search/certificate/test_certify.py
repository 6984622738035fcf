"""Cells on ranks: sound implementations hold; of each planted fault exactly its face fails; a bad cell costs itself only."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from itertools import product
from pathlib import Path

import pytest

from fsdp_testing.adapters import registry
from fsdp_testing.cases.records import CAPABILITIES, Case, FailureKind, Judgement, Verdict
from fsdp_testing.errors import InvalidArgument, InvalidRecord, PoolBroken
from fsdp_testing.judging.case_runner import CaseRunner, JudgedCase
from fsdp_testing.judging.checkers.explain import finding
from fsdp_testing.judging.known import KnownFailures
from fsdp_testing.oracle.models import uses_of
from fsdp_testing.ranks.pool import default_pool
from fsdp_testing.search.certificate import certify
from fsdp_testing.search.certificate.axes import CLEARING, EVERY_RANK, WORLDS, Cell, Job, in_cube, jobs
from fsdp_testing.search.certificate.cases import case_of
from fsdp_testing.search.certificate.causes import CauseFinder
from fsdp_testing.search.certificate.certify import CellRunner, Certificate, Judged, Plan
from fsdp_testing.search.state import Reason

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


def judged(name: str, cells: list[Cell], deadline: float = 60.0) -> Judged:
    runner = CellRunner(registry.load(name), CaseRunner(default_pool(), timeout=deadline))
    assert all(map(runner.claimed, cells))
    sizes = sorted({cell.size for cell in cells})
    return [row for size in sizes for row in runner.run(tuple(c for c in cells if c.size == size))]


def failing(name: str, cells: list[Cell]) -> set[str]:
    rows = judged(name, cells)
    assert all(verdict in (Verdict.PASS, Verdict.FAIL) for _, verdict, _ in rows), rows
    return {cell.name for cell, verdict, _ in rows if verdict is Verdict.FAIL}


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
    assert judged("torch-fsdp1", [cell]) == [(cell, Verdict.PASS, None)]


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
    for cell, _, reason in judged("small_faults:DIES", cells):
        assert (reason is not None and reason.looks[0] == "died") == (cell.clearing == "to zeros"), (cell, reason)


def test_a_death_that_does_not_repeat_is_no_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    once = tmp_path / "once"
    once.touch()
    monkeypatch.setenv("CERTIFICATE_DIES_ONCE", str(once))  # each job takes over the environment
    cells = [c for c in face(first=("S",)) if c.size == 2]
    others = [row for row in judged("small_faults:ONCE", cells) if row[1] is not Verdict.PASS]
    assert not once.exists(), "nothing died"
    ((_, verdict, reason),) = others
    assert verdict is Verdict.UNKNOWN
    assert reason is not None
    assert "then, on other ranks, it held" in reason.text


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
    for cell, verdict, reason in judged(f"small_faults:{name}", cells):
        expected = (Verdict.FAIL, looks) if cell.clearing == "to zeros" else (Verdict.PASS, ())
        assert (verdict, reason.looks if reason is not None else ()) == expected, reason


def test_of_cells_that_look_alike_the_first_are_run_again_alone_and_the_others_say_that_they_were_not():
    cells = [c for c in face(first=("S", "NS", "SS"), clearing=("to zeros",)) if c.size == 2]
    rows = judged("small_faults:ZEROS", cells)
    assert [verdict for _, verdict, _ in rows] == [Verdict.FAIL] * len(cells)
    assert [reason is not None and reason.confirmed for _, _, reason in rows] == [True] * 3 + [False] * (len(cells) - 3)


def test_cells_that_fail_among_others_and_hold_alone_confirm_nothing(monkeypatch: pytest.MonkeyPatch):
    """After three of them the others failed, for cells "that look like them failed again alone"."""

    def judge_batch(_runner: CaseRunner, _name, cases: list[Case], *_: object) -> list[JudgedCase]:
        off = [finding(case, FailureKind.DIVERGED, "gradient", 0, "off", ranks=(0,)) for case in cases]
        fails = [JudgedCase(case, Judgement(Verdict.FAIL, why)) for case, why in zip(cases, off)]
        return fails if len(cases) > 1 else [JudgedCase(cases[0], Judgement(Verdict.PASS))]

    monkeypatch.setattr(CaseRunner, "judge_batch", judge_batch)
    rows = judged("small_faults:UNBROKEN", [c for c in face(first=("S", "NS", "SS")) if c.size == 2])
    assert len(rows) > 4
    assert {verdict for _, verdict, _ in rows} == {Verdict.UNKNOWN}


def test_a_lost_judge_leaves_the_cells_unknown_that_lose_it(monkeypatch: pytest.MonkeyPatch):
    cells = [c for c in face(first=("S", "NS")) if c.size == 2]
    bad = cells[3]
    judge_batch = CaseRunner.judge_batch

    def losing(runner: CaseRunner, name, cases, *arguments, **options):
        if any(case.strategy == bad.strategy and case.program[0].no_sync == ("N" in bad.first) for case in cases):
            raise PoolBroken("the judge of a batch was lost")
        return judge_batch(runner, name, cases, *arguments, **options)

    monkeypatch.setattr(CaseRunner, "judge_batch", losing)
    lost = {cell for cell, verdict, _ in judged("small_faults:UNBROKEN", cells) if verdict is Verdict.UNKNOWN}
    assert lost == {cell for cell in cells if (cell.strategy, cell.first) == (bad.strategy, bad.first)}


@pytest.mark.parametrize(
    ("name", "fails"), [("UNBROKEN", ()), ("FIRST_RANK_DECIDES", (0,)), ("LAST_RANK_DECIDES", (1,))]
)
def test_every_rank_may_be_the_one_that_leaves_a_part_out(name: str, fails: tuple[int, ...]):
    asked = {cell for job in jobs(lambda cell: cell.mesh == "2" and cell.strategy == "full_shard") for cell in job}
    cells = [c for rank in range(2) for c in face(first=("s",), skipping=rank) if c in asked]
    assert {cell.skipping for cell in cells} == {0, 1}
    rows = judged(f"small_faults:{name}", cells)
    assert {cell.skipping for cell, verdict, _ in rows if verdict is Verdict.FAIL} == set(fails)


# ----------------------------------------------------------------------------------------------- whole runs


def certificate(name: str, state: Path, **plan: int) -> Certificate:
    return Certificate(Plan(registry.load(f"small_faults:{name}"), state, lanes=1, **plan), default_pool())  # type: ignore[arg-type]  # numbers only


def test_a_run_goes_on_where_it_stopped(tmp_path: Path):
    whole = certificate("UNBROKEN", tmp_path / "whole", sample=16).run()
    assert whole.letters == "p" * 16
    begun = certificate("UNBROKEN", tmp_path / "parts", sample=16, cells=1).run()
    assert 0 < len(begun.numbers(Verdict.PASS)) < 16
    progress: list[int] = []
    later = certificate("UNBROKEN", tmp_path / "parts", sample=16)
    assert (later.verdicts.letters, later.earlier) == (begun.letters, len(begun.numbers(Verdict.PASS)))
    assert later.run(lambda made: progress.append(made.verdicts.counts().total())).letters == whole.letters
    assert progress[0] > later.earlier
    # What is complete says nothing of an implementation that may have changed since.
    again = certificate("UNBROKEN", tmp_path / "parts", sample=16)
    assert (again.earlier, again.verdicts.letters) == (0, "." * 16)


@cache
def drawn(sample: int, shard: tuple[int, int]) -> list[Job]:
    return jobs(CellRunner(registry.load("small_faults:UNBROKEN"), CaseRunner(default_pool())).claimed, sample, shard)


@pytest.fixture
def cells_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The cube takes seconds to write down, and is the same for each of these certificates."""
    monkeypatch.setattr(certify, "jobs", lambda _claimed, sample, shard: drawn(sample, shard))


FAILED = Reason("gradient of a.w is off", ("diverged", "gradient", "end"))


def kept(folder: Path) -> Certificate:
    """A certificate of 16 cells of which the second fails, the third is unknown, and the last ones have not run."""
    made = certificate("UNBROKEN", folder, sample=16)
    for number in range(12):
        made.verdicts.take(number, Verdict.PASS)
    made.verdicts.take(1, Verdict.FAIL, FAILED)
    made.verdicts.take(2, Verdict.UNKNOWN, Reason("the judge was lost"))
    made.save()
    return made


@pytest.mark.usefixtures("cells_once")
def test_what_was_unknown_is_asked_again_and_what_is_complete_is_made_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    made = kept(tmp_path)
    again = certificate("UNBROKEN", tmp_path, sample=16)
    assert again.verdicts.letters == "pf." + "p" * 9 + "...."
    assert (again.verdicts.reasons, again.failing()) == ({1: FAILED}, [made.cells[1]])
    assert {cell for job in again._remaining for cell in job} == {made.cells[2], *made.cells[12:]}
    for number in range(12, 16):
        made.verdicts.take(number, Verdict.PASS)
    made.save()
    assert certificate("UNBROKEN", tmp_path, sample=16).verdicts.numbers(None) == [2]
    made.verdicts.take(2, Verdict.PASS)
    made.save()
    monkeypatch.setattr(certify, "source_digest", lambda _: "another")
    assert certificate("UNBROKEN", tmp_path, sample=16).verdicts.letters == "." * 16


@pytest.mark.usefixtures("cells_once")
def test_a_cell_of_which_nothing_is_said_is_unknown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(CellRunner, "run", lambda *_: [])
    verdicts = certificate("UNBROKEN", tmp_path, sample=4).run()
    assert (verdicts.letters, {reason.text for reason in verdicts.reasons.values()}) == (
        "uuuu",
        {"it has no report"},
    )


@pytest.mark.usefixtures("cells_once")
def test_cells_are_not_kept_if_the_text_changed_while_they_ran(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """New ranks read the new text; the certificate named the old one."""

    def run(_runner: CellRunner, job: Job) -> Judged:
        monkeypatch.setattr(certify, "source_digest", lambda _: "another")
        return [(cell, Verdict.PASS, None) for cell in job]

    monkeypatch.setattr(CellRunner, "run", run)
    asked = certificate("UNBROKEN", tmp_path, sample=4)
    with pytest.raises(InvalidArgument, match="a change of the implementation or of fsdp-testing"):
        asked.run()
    assert not (tmp_path / "certificate.json").exists()


@pytest.mark.usefixtures("cells_once")
def test_a_state_of_something_else_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    kept(tmp_path)
    for name, plan, message in (
        ("ZEROS", {"sample": 16}, "implementation: expected 'small_faults:ZEROS', got 'small_faults:UNBROKEN'"),
        ("UNBROKEN", {"sample": 15}, "cells: expected '15 "),
        ("UNBROKEN", {"sample": 16, "shard": (1, 2)}, "part: expected 1 of 2, got 1 of 1"),
    ):
        with pytest.raises(InvalidRecord, match=message):
            certificate(name, tmp_path, **plan)  # type: ignore[arg-type]  # numbers and a shard
    monkeypatch.setattr(certify, "source_digest", lambda _: "another")
    with pytest.raises(InvalidRecord, match="the implementation or fsdp-testing has changed since"):
        certificate("UNBROKEN", tmp_path, sample=16)


@pytest.mark.usefixtures("cells_once")
@pytest.mark.parametrize(
    "damage",
    [
        {"verdicts": "pf."},
        {"verdicts": "-" * 16},
        {"verdicts": "e" * 12 + "...."},
        {"reasons": {}},
        {"reasons": {"1": {"text": "why", "looks": [], "confirmed": False}}},
        {"verdicts": "pff" + "." * 13},
    ],
)
def test_a_state_without_a_verdict_or_reason_that_it_must_have_is_refused(damage: dict[str, object], tmp_path: Path):
    kept(tmp_path)
    file = tmp_path / "certificate.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | damage))
    with pytest.raises(InvalidRecord, match=r"certificate\.json"):
        certificate("UNBROKEN", tmp_path, sample=16)


def test_one_cause_is_told_once_with_its_simplest_cell_and_shortest_schedule(tmp_path: Path):
    made = certificate("ALONE", tmp_path, sample=48)
    made.run()
    failed = made.failing()
    assert len(failed) > 5
    assert all(cell.mesh.endswith("x1") and "N" in cell.first.upper() for cell in failed)
    (cause,) = CauseFinder(made, KnownFailures(), 600.0).find()
    assert cause.cells == len(failed)
    assert CauseFinder(made, KnownFailures(), 1e-9).find() == []
    assert len(cause.cell.schedule) == min(len(cell.schedule) for cell in failed)
    assert (cause.case.strategy, cause.case.world.mesh[1]) == ("hybrid_shard", 1)
    assert [line.partition("(")[0] for line in cause.schedule] == ["0 forward_backward", "1 forward_backward"]
    assert cause.shortened
