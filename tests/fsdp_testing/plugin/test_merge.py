"""One result from many ranks: pure merging of reports and fates, without ranks and without pytest."""

from __future__ import annotations

import itertools
import pickle
from pathlib import Path
from typing import Any

import pytest

from fsdp_testing.plugin.longrepr import fold
from fsdp_testing.plugin.merge import merge
from fsdp_testing.plugin.rank_side import _without_torchs_log
from fsdp_testing.plugin.records import Phase, RankResult
from fsdp_testing.ranks.pool import outcome as outcome_module
from fsdp_testing.ranks.pool.cause import Cause, EndedBadly, Hung, Stuck, Uneven, Unfinished
from fsdp_testing.ranks.pool.outcome import (
    CollectiveRecord,
    ErrorRecord,
    Fate,
    RankOutcome,
    WorldOutcome,
    account_lines,
    rank_names,
)

PLACE = ("/t.py", 7)
UNEVEN = Uneven("default group", ((0, 1), (1, 2)))


def crash(message: str) -> dict[str, Any]:
    expected = {"path": "/t.py", "lineno": 9, "message": message}
    entry = {"type": "ReprEntryNative", "data": {"lines": [f"E   {message}\n"]}}
    traceback = {"reprentries": [entry], "extraline": None, "style": "long"}
    return {"reprcrash": expected, "reprtraceback": traceback, "sections": [], "chain": [(traceback, expected, None)]}


PASSED = (Phase("setup", "passed", 0.1), Phase("call", "passed", 0.2), Phase("teardown", "passed", 0.3))


def failed(message: str, when: str = "call") -> tuple[Phase, ...]:
    before = PASSED[: ("setup", "call", "teardown").index(when)]
    after = () if when == "teardown" else PASSED[2:]
    return (*before, Phase(when, "failed", 1.0, crash(message)), *after)


def skipped(reason: str) -> tuple[Phase, ...]:
    return (PASSED[0], Phase("call", "skipped", 0.0, ("/t.py", 3, f"Skipped: {reason}")), PASSED[2])


def xfailed(reason: str = "known") -> tuple[Phase, ...]:
    return (PASSED[0], Phase("call", "skipped", 0.0, crash("x"), [], reason), PASSED[2])


XPASSED = (PASSED[0], Phase("call", "passed", 0.0, None, [], "known"), PASSED[2])


def test_what_a_rank_sends_arrives_whole() -> None:
    for phases in (PASSED, failed("boom"), skipped("not here"), xfailed(""), XPASSED):
        logged = Phase("call", "passed", 0.5, (), [("Captured log call", "text")], "")
        sent = RankResult((*phases, logged), (("name", 1),), kept=2, groups=3, stop="asked", problem="none")
        assert pickle.loads(pickle.dumps(sent)) == sent


def returned(rank: int, phases: tuple[Phase, ...], **facts: Any) -> RankOutcome:
    result = RankResult(phases, **facts)
    return RankOutcome(rank, Fate.RETURNED, value=result, failed=result.failed)


def run(*ranks: RankOutcome, cause: Cause | None = None) -> list[Phase]:
    return merge(WorldOutcome("t", len(ranks), "gloo", ranks, cause), PLACE)


def verdict(reports: list[Phase]) -> str:
    """What a reader of pytest's summary sees."""
    outcomes = {report.when: report for report in reports}
    for report in reports:
        if report.outcome == "failed":
            return f"failed in {report.when}"
    for report in reports:
        if report.outcome == "skipped":
            return "xfailed" if report.wasxfail is not None else "skipped"
    return "xpassed" if outcomes["call"].wasxfail is not None else "passed"


def text(reports: list[Phase]) -> str:
    """Everything that is shown of failures."""
    lines: list[str] = []
    for report in reports:
        if isinstance(report.longrepr, dict):
            for traceback, _, _ in report.longrepr["chain"]:
                for entry in traceback["reprentries"]:
                    lines.extend(entry["data"]["lines"])
    return "".join(lines)


def summary(reports: list[Phase]) -> str:
    return next(str(r.longrepr["chain"][-1][1]["message"]) for r in reports if isinstance(r.longrepr, dict))


def test_passed_only_when_every_rank_passed_every_phase() -> None:
    reports = run(returned(0, PASSED), returned(1, PASSED))
    assert [(r.when, r.outcome, r.duration) for r in reports] == [
        ("setup", "passed", 0.1),
        ("call", "passed", 0.2),
        ("teardown", "passed", 0.3),
    ]


ENDINGS = {
    "passed": PASSED,
    "failed": failed("boom"),
    "failed in setup": failed("boom", "setup"),
    "failed in teardown": failed("boom", "teardown"),
    "skipped": skipped("why"),
    "xfailed": xfailed(),
    "xpassed": XPASSED,
}


@pytest.mark.parametrize(("first", "second"), list(itertools.product(ENDINGS, ENDINGS)))
def test_ranks_that_differ_never_pass(first: str, second: str) -> None:
    got = verdict(run(returned(0, ENDINGS[first]), returned(1, ENDINGS[second])))
    if first == second:
        assert got == {"failed": "failed in call"}.get(first, first)
    elif {first, second} == {"xfailed", "xpassed"}:
        assert got == "xfailed"
    else:
        assert got.startswith("failed")


def test_a_failure_shows_every_rank_and_folds_equal_ones() -> None:
    reports = run(*(returned(rank, failed("boom" if rank < 3 else "other")) for rank in range(4)))
    assert summary(reports) == "ranks 0, 1, 2: boom; rank 3: other"
    assert text(reports).count("E   boom") == 1
    assert "ranks 0, 1, 2: call failed" in text(reports)
    assert "rank 3: call failed" in text(reports)


def test_the_rank_that_failed_first_leads() -> None:
    late = RankOutcome(0, Fate.RETURNED, RankResult(failed("late")), failed=True, finished_at=9.0)
    early = RankOutcome(1, Fate.RETURNED, RankResult(failed("early")), failed=True, finished_at=3.0)
    assert summary(run(late, early)) == "rank 1: early; rank 0: late"


def test_a_disagreement_says_which_rank_did_what() -> None:
    reports = run(returned(0, PASSED), returned(1, skipped("no device")), returned(2, xfailed("odd")))
    assert summary(reports) == "ranks disagree: rank 0 passed; rank 1 skipped (no device); rank 2 xfailed (odd)"
    assert verdict(reports) == "failed in call"


def test_a_skip_elsewhere_does_not_hide_a_failure() -> None:
    reports = run(returned(0, skipped("no device")), returned(1, failed("boom")))
    assert summary(reports) == "rank 1: boom; rank 0 skipped (no device)"


def test_a_dead_rank_fails_an_expected_failure() -> None:
    dead = RankOutcome(1, Fate.DIED, failed=True, signal_name="SIGKILL")
    reports = run(returned(0, xfailed()), dead, cause=EndedBadly((1,), dead))
    assert verdict(reports) == "failed in call"
    assert summary(reports) == "rank 1 died by SIGKILL"


def test_a_dead_rank_fails_ranks_that_all_passed() -> None:
    dead = RankOutcome(1, Fate.DIED, failed=True, exit_code=3)
    reports = run(returned(0, PASSED), dead, cause=EndedBadly((1,), dead))
    assert verdict(reports) == "failed in call"
    assert "rank 1 died with exit code 3" in text(reports)


def test_a_cause_alone_fails_ranks_that_all_passed() -> None:
    reports = run(returned(0, PASSED), returned(1, PASSED), cause=UNEVEN)
    assert verdict(reports) == "failed in call"
    assert summary(reports) == UNEVEN.sentence()


@pytest.mark.parametrize("ending", [skipped("why"), xfailed(), XPASSED])
def test_a_cause_alone_fails_ranks_that_agree_otherwise(ending: tuple[Phase, ...]) -> None:
    reports = run(returned(0, ending), returned(1, ending), cause=UNEVEN)
    assert verdict(reports) == "failed in call"


def test_a_failed_report_fails_even_if_the_rank_did_not_say_so() -> None:
    quiet = [RankOutcome(rank, Fate.RETURNED, RankResult(failed("boom")), failed=False) for rank in range(2)]
    assert verdict(run(*quiet)) == "failed in call"


def test_different_numbers_of_groups_fail_ranks_that_all_passed() -> None:
    reports = run(returned(0, PASSED, groups=1), returned(1, PASSED, groups=2))
    assert summary(reports) == "ranks disagree: they made different numbers of process groups (rank 0: 1, rank 1: 2)"


def test_a_rank_that_waits_for_a_failed_one_is_told_with_its_collective() -> None:
    record = CollectiveRecord(4, "default group", 1, "all_reduce float32[2]", "t.py:5 in test")
    waiting = RankOutcome(0, Fate.STOPPED, failed=True, collectives=(record,), stack="Thread 1\n  File a.py\n")
    bad = returned(1, failed("boom"))
    reports = run(waiting, bad, cause=EndedBadly((1,), bad, Unfinished((0,), record)))
    assert summary(reports) == "rank 1: boom; rank 0 waited in all_reduce #4 float32[2]"
    assert "all_reduce #4 float32[2]  (t.py:5 in test)" in text(reports)
    assert "File a.py" in text(reports)


BAD = returned(5, failed("boom; rank 0 waited in vain"))
RECORD = CollectiveRecord(4, "default group", 1, "all_reduce float32[2]", "t.py:5 in test")


@pytest.mark.parametrize(
    ("cause", "clause"),
    [
        # More than four ranks, and words of a test's own that look like ours, are no hindrance: nothing is parsed.
        (EndedBadly((5,), BAD, Unfinished((0, 1, 2, 3, 4), RECORD)), "ranks 0 to 4 waited in all_reduce #4 float32[2]"),
        (EndedBadly((5,), BAD, Unfinished((0, 1, 2, 3, 4), None)), "ranks 0 to 4 had not finished"),
        (
            Hung((0, 1, 2, 3, 4), 5.0, (), tuple((rank, None) for rank in range(6))),
            "ranks 0 to 4 hung after 5 s: " + "; ".join(f"rank {rank} issued no collective" for rank in range(5)),
        ),
        # It speaks of one rank, and five wait: each says how it ended.
        (Stuck(0, 5, RECORD, None, True), "; ".join(f"rank {n} was stopped before any collective" for n in range(5))),
    ],
    ids=["in a collective", "elsewhere", "at the deadline", "of one of them"],
)
def test_what_all_others_waited_for(cause: Cause, clause: str) -> None:
    waiting = [RankOutcome(rank, Fate.STOPPED, failed=True) for rank in range(5)]
    reports = run(*waiting, BAD, cause=cause)
    assert summary(reports) == f"rank 5: boom; rank 0 waited in vain; {clause}"


def test_a_rank_that_raised_outside_its_test_shows_its_traceback() -> None:
    frames = (
        '  File "/x/_pytest/runner.py", line 1, in run\n    machinery()\n    ^^^^^^^\n'
        '  File "/home/test_it.py", line 2, in test_it\n    import absent\n'
    )
    error = ErrorRecord("ImportError", "no module", f"Traceback ...\n{frames}ImportError: no module\n")
    raised = RankOutcome(0, Fate.RAISED, failed=True, error=error)
    reports = run(raised, returned(1, PASSED), cause=EndedBadly((0,), raised))
    assert verdict(reports) == "failed in call"
    for shown in ("Traceback ...", "test_it.py", "import absent", "ImportError: no module"):
        assert shown in text(reports)
    assert "machinery" not in text(reports)


def test_what_only_tells_of_a_lost_peer_is_abbreviated() -> None:
    dead = RankOutcome(1, Fate.DIED, failed=True, signal_name="SIGSEGV")
    message = "RuntimeError: Connection closed by peer"
    reports = run(returned(0, failed(message)), dead, cause=EndedBadly((1,), dead))
    assert "E   RuntimeError" not in text(reports)
    assert message in text(reports)


def test_a_mismatch_is_shown_in_full_once() -> None:
    seen = "fsdp_testing.errors.CollectiveMismatch: collective #1 of the default group differs: rank {} issued it"
    reports = run(returned(0, failed(seen.format(1))), returned(1, failed(seen.format(0))), returned(2, failed("boom")))
    assert text(reports).count("E   fsdp_testing.errors.CollectiveMismatch") == 1
    assert all(words in text(reports) for words in (seen.format(0), seen.format(1), "E   boom"))


def test_teardown_fails_on_its_own_beside_a_call_that_passed() -> None:
    reports = run(returned(0, failed("mess", "teardown")), returned(1, PASSED))
    assert [(r.when, r.outcome) for r in reports] == [("setup", "passed"), ("call", "passed"), ("teardown", "failed")]
    assert summary(reports) == "rank 0: mess"


def test_call_and_teardown_may_both_fail() -> None:
    both = (*failed("boom")[:2], Phase("teardown", "failed", 0.0, crash("mess")))
    reports = run(returned(0, both), returned(1, PASSED))
    assert [(r.when, r.outcome) for r in reports] == [("setup", "passed"), ("call", "failed"), ("teardown", "failed")]


def test_every_rank_may_skip_for_its_own_reason() -> None:
    reports = run(returned(0, skipped("left")), returned(1, skipped("right")))
    (report,) = [r for r in reports if r.outcome == "skipped"]
    assert report.longrepr[2] == "Skipped: rank 0 skipped (left); rank 1 skipped (right)"


def test_what_ranks_wrote_is_attached_by_rank_and_folded() -> None:
    logged = (PASSED[0], Phase("call", "passed", 0.0, None, [("Captured log call", "careful")]), PASSED[2])
    ranks = [RankOutcome(r, Fate.RETURNED, RankResult(logged), stdout=f"out {r}", stderr="same") for r in range(2)]
    (call,) = [report for report in run(*ranks) if report.when == "call"]
    assert call.sections == [
        ("Captured log call (ranks 0, 1)", "careful"),
        ("Captured stdout (rank 0)", "out 0"),
        ("Captured stdout (rank 1)", "out 1"),
        ("Captured stderr (ranks 0, 1)", "same"),
    ]


def test_a_rank_that_could_not_run_the_item_fails_it_in_setup() -> None:
    lost = RankOutcome(1, Fate.RETURNED, RankResult(problem="holds no such test"), failed=True)
    reports = run(returned(0, PASSED), lost)
    assert verdict(reports) == "failed in setup"
    assert "rank 1 could not run the test" in text(reports)


def test_a_result_that_is_no_result_is_no_pass() -> None:
    odd = RankOutcome(1, Fate.RETURNED, value=None)
    assert verdict(run(returned(0, PASSED), odd)).startswith("failed")


def test_no_report_at_all_is_no_pass() -> None:
    assert verdict(run(returned(0, ()), returned(1, ()))).startswith("failed")


def test_a_rank_without_a_call_is_no_pass() -> None:
    reports = run(returned(0, PASSED), returned(1, (PASSED[0], PASSED[2])))
    assert verdict(reports) == "failed in call"
    assert summary(reports) == "ranks disagree: rank 0 passed; rank 1 reported setup, teardown and no more"


@pytest.mark.parametrize(
    ("ranks", "expected"),
    [
        ([3], "rank 3"),
        ([2, 0], "ranks 0, 2"),
        (range(5), "ranks 0 to 4"),
        ([0, 1, 2, 3, 9], "ranks 0, 1, 2, 3, 9"),
    ],
)
def test_ranks_in_words(ranks: Any, expected: str) -> None:
    assert rank_names(ranks) == expected


def test_folding_looks_past_addresses_and_the_rank_itself() -> None:
    first = "<f at 0x7f01> in World(rank=0, size=2)"
    second = "<f at 0x7f02> in World(rank=1, size=2)"
    assert [ranks for ranks, _ in fold([(0, first), (1, second), (2, "else")])] == [[0, 1], [2]]


def test_torchs_log_of_a_collective_that_raised_is_left_out() -> None:
    noise = "DEBUG    c10d-NullHandler-default:c10d_logger.py:87 {'func_name': 'all_gather', 'error': 'differs'}"
    own = "INFO     mine:test.py:3 c10d-NullHandler-default: is spoken of"
    title = "Captured log call"
    assert _without_torchs_log((title, f"{noise}\n{own}\n{noise}")) == (title, own)
    assert _without_torchs_log((title, noise)) == (title, "")
    assert _without_torchs_log(("Captured stdout call", noise)) == ("Captured stdout call", noise)


def test_frames_of_the_pool_and_of_imports_are_left_out() -> None:
    stack = f"""Current thread 0x1 (most recent call first):
  File "/site/torch/__init__.py", line 5 in <module>
  File "<frozen importlib._bootstrap>", line 241 in _call_with_frames_removed
  File "/home/me/model.py", line 7 in wrap
  File "/home/me/tests/fsdp_testing/ranks/pool/test_mine.py", line 9 in test_mine
  File "{Path(outcome_module.__file__).parent}/worker.py", line 243 in _call
  File "<string>", line 1 in <module>"""
    kept = account_lines(RankOutcome(0, Fate.STOPPED, stack=stack))
    assert kept == [
        "stack of rank 0:",
        *(line for number, line in enumerate(stack.splitlines()) if number in (0, 1, 3, 4)),
    ]


def test_frames_of_torchs_test_classes_are_left_out_unless_nothing_else_is_there() -> None:
    torchs = (
        '  File "/torch/testing/_internal/common_distributed.py", line 9, in run_test\n    getattr(self, test_name)()'
    )
    own = '  File "/home/me/test_own.py", line 18, in test_sum\n    self.assertEqual(total.item(), 3)'

    def account(*frames: str) -> list[str]:
        text = "\n".join(("Traceback (most recent call last):", *frames, "AssertionError: 2"))
        error = ErrorRecord("AssertionError", "2", text)
        return account_lines(RankOutcome(0, Fate.RAISED, error=error))

    assert account(torchs, own, torchs) == [
        "Traceback (most recent call last):",
        *own.splitlines(),
        "AssertionError: 2",
    ]
    assert account(torchs) == ["Traceback (most recent call last):", *torchs.splitlines(), "AssertionError: 2"]
