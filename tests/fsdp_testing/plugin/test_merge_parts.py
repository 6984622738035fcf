"""Parts of a test that were skipped on ranks: subtests, and what follows in setup or teardown."""

from __future__ import annotations

from typing import Any

import pytest

from fsdp_testing.plugin.merge import merge
from fsdp_testing.plugin.records import Phase, RankResult
from fsdp_testing.ranks.pool.outcome import Fate, RankOutcome, WorldOutcome

SETUP, CALL, TEARDOWN = PASSED = tuple(Phase(when, "passed", 0.1) for when in ("setup", "call", "teardown"))
XPASSED = (SETUP, Phase("call", "passed", 0.0, None, [], "known"), TEARDOWN)


def skip(when: str, reason: str) -> Phase:
    return Phase(when, "skipped", 0.0, ("/t.py", 3, f"Skipped: {reason}"))


def run(*ranks: tuple[Phase, ...]) -> list[Phase]:
    outcomes = (RankOutcome(rank, Fate.RETURNED, value=RankResult(phases)) for rank, phases in enumerate(ranks))
    return merge(WorldOutcome("t", len(ranks), "gloo", tuple(outcomes), None), ("/t.py", 7))


def summary(reports: list[Phase]) -> str:
    return next(str(r.longrepr["reprcrash"]["message"]) for r in reports if isinstance(r.longrepr, dict))


def idle(name: str, reason: str | None = None, **arguments: str) -> Phase:
    """A subtest that was skipped, or failed as expected."""
    longrepr: Any = ("/t.py", 3, "Skipped: sub") if reason is None else "x"
    return Phase("call", "skipped", 0.0, longrepr, [], reason, {"msg": name, "kwargs": arguments})


def with_subtest(subtest: Phase, phases: tuple[Phase, ...] = PASSED) -> tuple[Phase, ...]:
    return (phases[0], subtest, *phases[1:])


def test_a_skipped_subtest_is_shown_and_skips_no_test() -> None:
    reports = run(*(with_subtest(idle("a", rank=str(rank))) for rank in range(2)))
    assert [(r.when, r.outcome, r.subtest is None) for r in reports] == [
        ("setup", "passed", True),
        ("call", "skipped", False),
        ("call", "passed", True),
        ("teardown", "passed", True),
    ]
    imperative = run(*[with_subtest(idle("a", "known"))] * 2)
    assert [r.wasxfail for r in imperative] == [None, "known", None, None]


@pytest.mark.parametrize(
    "other",
    [PASSED, (SETUP, skip("call", "alone"), TEARDOWN), with_subtest(idle("b")), with_subtest(idle("a", "known"))],
)
def test_a_subtest_that_one_rank_skips_is_a_disagreement(other: tuple[Phase, ...]) -> None:
    reports = run(with_subtest(idle("a")), other)
    assert [report.outcome for report in reports] == ["passed", "failed", "passed"]
    assert summary(reports).startswith("ranks disagree: rank 0 passed, its subtest a skipped; rank 1 ")


def test_a_subtest_may_fail_on_some_ranks_as_its_mark_says() -> None:
    reports = run(XPASSED, with_subtest(idle("a", "known"), XPASSED))
    assert [(r.outcome, r.wasxfail) for r in reports][1:3] == [("skipped", "known"), ("passed", "known")]


def test_a_skipped_subtest_does_not_hide_a_strict_mark() -> None:
    strict = (SETUP, Phase("call", "passed", 0.0, "[XPASS(strict)] known", [], "known"), TEARDOWN)
    reports = run(*[with_subtest(idle("a"), strict)] * 2)
    assert [report.outcome for report in reports] == ["passed", "skipped", "failed", "passed"]


def test_a_skip_in_teardown_is_no_skip_of_the_test() -> None:
    late = (SETUP, CALL, skip("teardown", "late"))
    alone = run(late, (SETUP, skip("call", "alone"), TEARDOWN))
    assert summary(alone) == "ranks disagree: rank 0 skipped in teardown (late); rank 1 skipped (alone)"
    assert [report.outcome for report in run(late, late)] == ["passed", "passed", "skipped"]


def test_a_skip_in_setup_here_and_in_the_call_there_leaves_no_passed_call() -> None:
    in_setup, in_call = (skip("setup", "why"), TEARDOWN), (SETUP, skip("call", "why"), TEARDOWN)
    assert [report.outcome for report in run(in_setup, in_call)] == ["skipped", "passed"]
    assert [report.outcome for report in run(in_call, in_setup)] == ["passed", "skipped", "passed"]
