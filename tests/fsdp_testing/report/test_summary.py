"""What is computed for a reader is right whatever draws it."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from types import SimpleNamespace

import pytest

from fsdp_testing.cases.records import ExpectedFailure, FailureKind, RunReport, Verdict
from fsdp_testing.report import failures, summary


@pytest.mark.parametrize("order", list(itertools.permutations([Verdict.PASS, Verdict.UNKNOWN, Verdict.FAIL])))
def test_no_result_hides_a_worse_one(make: SimpleNamespace, order: tuple[Verdict, ...]) -> None:
    report = RunReport(results=tuple(make.result("a", "s.c", verdict) for verdict in order))
    assert summary.by_check(report)["s.c"]["a"].verdict is Verdict.FAIL


def test_tallies_count_claims_apart_from_what_was_not_claimed(mixed: RunReport) -> None:
    one, two = summary.tallies(mixed)
    assert one.asked == 5
    assert one.sentence == ("2 of 5 claims hold, 1 refuted, 1 unknown, 1 expected to fail, 1 stale, 1 not claimed")
    assert two.sentence == "1 of 2 claims hold, 1 refuted"
    assert one.cases == 5


def test_a_tally_says_which_claims_were_asked_in_part(make: SimpleNamespace) -> None:
    left = {"does not claim hybrid": 2}
    parts = (make.result("a", "s.c", Verdict.PASS, not_run=left), make.result("a", "s.d", Verdict.PASS))
    (tally,) = summary.tallies(RunReport(results=parts))
    assert tally.sentence == "2 of 2 claims hold, 1 asked without the cases that need unclaimed capabilities"


def test_exit_codes(good: RunReport, mixed: RunReport, make: SimpleNamespace) -> None:
    assert summary.report_exit_code(good) == 0
    assert summary.report_exit_code(mixed) == 1
    unknown = RunReport(results=(make.result("a", "s.c", Verdict.UNKNOWN),))
    assert summary.report_exit_code(unknown) == 3
    assert "no verdict" in summary.conclusion(unknown)
    expected = RunReport(results=(make.result("a", "s.c", Verdict.EXPECTED_FAILURE),))
    assert summary.report_exit_code(expected) == 0
    assert summary.conclusion(expected) == "no new failure; 1 check failed as expected"


@pytest.mark.parametrize(
    ("verdicts", "said"),
    [
        ([Verdict.PASS] * 3, "All 3 claims that were checked hold"),
        ([Verdict.PASS, Verdict.NOT_CLAIMED], "The one claim that was checked holds"),
        ([Verdict.EXPECTED_FAILURE] * 2 + [Verdict.PASS] * 2, "2 known failures, none new; 2 claims hold"),
        ([Verdict.FAIL, Verdict.EXPECTED_FAILURE, Verdict.PASS], "1 new failure, 1 known failure; 1 claim holds"),
        ([Verdict.UNKNOWN, Verdict.STALE], "1 unknown, 1 listed as known that does not fail; 1 claim holds"),
        ([Verdict.NOT_CLAIMED], "nothing was checked of a; 0 claims hold"),
        ([], "nothing was checked; 0 claims hold"),
    ],
)
def test_the_headline_never_says_more_than_is_known(make: SimpleNamespace, verdicts: list[Verdict], said: str) -> None:
    report = RunReport(tuple(make.result("a", f"s.c{number}", verdict) for number, verdict in enumerate(verdicts)))
    assert summary.headline(report) == said


@pytest.mark.parametrize(
    ("reason", "page", "said"),
    [
        ("weights stay: docs/a.md", "docs/a.md", "weights stay (a): docs/a.md"),
        ("weights stay (https://host/issues/1)", "https://host/issues/1)", None),
        ("not written up", "", "not written up (a)"),
        ("a.md", "a.md", "a.md (a): a.md"),
    ],
)
def test_known_failures_name_their_page(make: SimpleNamespace, reason: str, page: str, said: str | None) -> None:
    found = make.result("a", "s.c", Verdict.EXPECTED_FAILURE, expected=reason, findings=(make.diverged(),))
    (group,) = summary.known_failures(RunReport((found,)))
    assert group.page == page.rstrip(")")
    assert group.sentence == (said or "weights stay (a): https://host/issues/1")


def test_one_check_that_fails_by_several_causes_is_known_by_each(make: SimpleNamespace) -> None:
    stale = ExpectedFailure("weights stay", FailureKind.DIVERGED, "output", "forward", page="stale.md")
    raised = ExpectedFailure("cannot train", FailureKind.RAISED, "RuntimeError: no", "forward", page="first.md")
    other = replace(raised, quantity="RuntimeError: never")
    findings = tuple(make.diverged(expected=entry) for entry in (stale, raised, other, raised))
    result = make.result("a", "s.c", Verdict.EXPECTED_FAILURE, findings=findings)
    groups = {group.page: group for group in summary.known_failures(RunReport((result,)))}
    assert {page: len(group.findings) for page, group in groups.items()} == {"stale.md": 1, "first.md": 3}
    assert groups["first.md"].looks == (
        ("raised RuntimeError: no in forward", 2),
        ("raised RuntimeError: never in forward", 1),
    )


def test_nothing_checked_is_never_a_success(make: SimpleNamespace) -> None:
    assert summary.report_exit_code(RunReport(results=())) == 3
    idle = RunReport(results=(make.result("a", "s.c", Verdict.NOT_CLAIMED),))
    assert summary.report_exit_code(idle) == 3
    assert summary.conclusion(idle) == "no claim of a was checked: no verdict"
    why = replace(make.result("b", "s.c", Verdict.NOT_CLAIMED), explanation="has no case for world size 5")
    other = replace(make.result("a", "s.c", Verdict.PASS), explanation="of another")
    assert summary.conclusion(RunReport(results=(other, why))).endswith(
        "no claim of b was checked: no verdict (has no case for world size 5)"
    )
    lost = RunReport(results=(make.result("a", "s.c", Verdict.PASS),), implementations=("a", "lost"))
    assert summary.report_exit_code(lost) == 3
    assert "lost" in summary.conclusion(lost)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"max_error": None, "bound": None}, ""),
        ({"max_error": 0.5, "bound": None}, "max error 0.5"),
        ({"max_error": 0.5, "bound": 0.0}, "max error 0.5, expected equal bits"),
        ({"max_error": 0.5, "bound": 0.25}, "max error 0.5, bound 0.25 (2 times the bound)"),
        ({"max_error": math.nan, "bound": 0.25}, "max error nan, bound 0.25"),
        ({"max_error": math.inf, "bound": 0.25}, "max error inf, bound 0.25"),
    ],
)
def test_sizes(make: SimpleNamespace, fields: dict[str, float | None], text: str) -> None:
    assert summary.size_text(make.diverged(**fields)) == text


def test_places(make: SimpleNamespace) -> None:
    assert summary.place_text(make.diverged()) == "operation 0 forward_backward(batch 1), ranks 0, 1"
    assert summary.place_text(make.diverged(operation=-1, operation_text="", ranks=(1,))) == "while wrapping, rank 1"
    assert summary.place_text(make.diverged(operation=4, operation_text="", ranks=())) == "operation 4"
    assert summary.world_text(make.diverged().case) == "mlp, 2 ranks, full_shard, float64"


def test_the_replay_line_names_everything_and_quotes(make: SimpleNamespace) -> None:
    failing = make.result("my.mod:make one", "clip.two", Verdict.FAIL, findings=(make.diverged(),))
    line = summary.replay_line(failing, RunReport(results=(failing,)))
    assert line == "fsdp-verify run 'my.mod:make one' --check clip.two --world-size 2"


@pytest.mark.parametrize(
    ("cases", "sizes"),
    [
        ({2: Verdict.PASS, 3: Verdict.UNKNOWN, 4: Verdict.UNKNOWN}, "3"),
        ({3: Verdict.PASS, 2: Verdict.PASS}, "2,3"),
        ({}, "2,3,4"),
    ],
)
def test_without_a_finding_the_replay_line_names_the_ranks_of_the_cases(
    make: SimpleNamespace, cases: dict[int, Verdict], sizes: str
) -> None:
    outcomes = tuple(make.outcome(verdict, world_size=size) for size, verdict in cases.items())
    bare = make.result("a", "clip.two", Verdict.UNKNOWN, cases=outcomes)
    line = summary.replay_line(bare, RunReport(results=(bare,), world_sizes=(2, 3, 4), backend="fake"))
    assert line == f"fsdp-verify run a --check clip.two --world-size {sizes} --backend fake"
    faulty = RunReport(results=(bare,), environment={"faults": "crash@rank=1, delay@step=2"})
    assert summary.replay_line(bare, faulty).endswith(" --fault crash@rank=1 --fault delay@step=2")


def test_numbers_of_ranks_are_those_on_which_cases_ran(make: SimpleNamespace) -> None:
    outcomes = tuple(make.outcome(Verdict.PASS, world_size=size) for size in (3, 2))
    results = (make.result("a", "s.c", Verdict.PASS, cases=outcomes), make.result("a", "s.d", Verdict.PASS))
    report = RunReport(results, world_sizes=(2, 3, 4))
    assert next(summary.trust(report)).endswith("in 3 cases on 2, 3 ranks.")
    assert summary.facts(report)["world sizes"] == "2, 3"
    assert "gloo on worlds of 2, 3;" in summary.circumstances(report)
    assert next(summary.trust(RunReport((), world_sizes=(2,)))).endswith("in 0 cases on no ranks.")


@pytest.mark.parametrize(("ratio", "share"), [(1.0, "100"), (0.996, "99.6"), (0.00012, "0.012")])
def test_the_closest_pass_is_a_share_without_an_exponent(make: SimpleNamespace, ratio: float, share: str) -> None:
    result = make.result("a", "s.c", Verdict.PASS, cases=(make.outcome(Verdict.PASS, worst_ratio=ratio),))
    assert f"Closest pass: s.c (a) used {share} % of its bound." in summary.trust(RunReport((result,)))


@pytest.mark.parametrize("verdict", list(Verdict))
def test_every_result_has_a_sentence(make: SimpleNamespace, verdict: Verdict) -> None:
    assert summary.sentence(make.result("a", "s.c", verdict, cases=()))


def test_the_sentence_falls_back_to_finding_then_error(make: SimpleNamespace) -> None:
    assert "0.37" in summary.sentence(make.result("a", "s.c", Verdict.FAIL, findings=(make.diverged(),)))


@pytest.mark.parametrize(
    ("error", "said"),
    [
        ("Traceback\n  ...\nPoolBroken: gone\n", "PoolBroken: gone"),
        ("the check itself crashed\nTraceback\n  File\nKeyError: 'x'\n", "the check itself crashed: KeyError: 'x'"),
        ("KeyError: 'x'\nTraceback\n  File\nKeyError: 'x'\n", "KeyError: 'x'"),
        ("rank 1 died by SIGKILL\n  rank 0 waits\n", "rank 1 died by SIGKILL"),
        ("nothing was compared", "nothing was compared"),
    ],
)
def test_long_errors_become_one_line_and_are_kept_below(make: SimpleNamespace, error: str, said: str) -> None:
    case = make.outcome(Verdict.UNKNOWN, error=error)
    for found in (
        make.result("a", "s.c", Verdict.UNKNOWN, cases=(case,)),
        make.result("a", "s.c", Verdict.UNKNOWN, cases=(), explanation=error),
        make.result("a", "s.c", Verdict.UNKNOWN, cases=(case,), explanation=error),
    ):
        assert summary.sentence(found) == said
        assert summary.accounts(found) == ((error,) if error.strip() != said else ())


def test_nearest_ranks_passed_results_by_their_largest_error(good: RunReport) -> None:
    assert [(found.check, ratio) for found, ratio in summary.nearest(good)] == [
        ("training.adamw", 0.8),
        ("training.sgd", 0.1),
    ]


def test_every_verdict_has_words() -> None:
    for table in (summary.WORDS, summary.MEANINGS):
        assert set(table) == set(Verdict)


@pytest.mark.parametrize(
    ("name", "parts", "table"),
    [
        ("one", 1, "[one]"),
        ("one", 2, "[one.tensor_parallel]"),
        ("my.module:ONE", 2, '["my.module:ONE".tensor_parallel]'),
    ],
)
def test_an_entry_is_for_the_table_that_counts(make: SimpleNamespace, name: str, parts: int, table: str) -> None:
    finding = make.diverged()
    case = replace(finding.case, world=replace(finding.case.world, tensor_parallel=parts))
    failed = make.result(name, "a.b", Verdict.FAIL, findings=(replace(finding, case=case),))
    assert failures.entry(failed).title.endswith(f"under {table}:")
