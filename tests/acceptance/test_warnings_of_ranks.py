"""Warnings of ranks are shown as pytest shows its own, and whose filters hold depends on who called the rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Runner = Callable[..., Any]


def test_warnings_of_ranks_are_shown_once_and_named(run: Runner) -> None:
    verdict = run(
        """
import warnings
@pytest.mark.world(2)
def test_warns(world):
    warnings.warn("everywhere")
    if world.rank == 1:
        warnings.warn("here", FutureWarning)
"""
    )
    assert verdict.counts() == (1, 0, 0), verdict.text
    assert verdict.warnings == 2, verdict.text
    assert "UserWarning: everywhere\n" in verdict.text
    assert "FutureWarning: here [rank 1]" in verdict.text


def test_filters_of_warnings_are_pytests_in_its_tests_and_nobodys_elsewhere(run: Runner) -> None:
    verdict = run(
        """
import warnings
from fsdp_testing import run_ranks

def errors_on_warnings():
    return [entry for entry in warnings.filters if entry[0] == "error"]

@pytest.fixture(scope="class")
def warns_at_its_end(world):
    yield
    warnings.warn("left late")

def test_a_function_run_from_pytest():
    assert run_ranks(errors_on_warnings) == [[], []]

class TestTwo:
    @pytest.mark.world(2)
    def test_in_ranks(self, warns_at_its_end):
        with pytest.raises(UserWarning, match="now"):
            warnings.warn("now")

@pytest.mark.world(3)
def test_on_others():
    assert errors_on_warnings()

def test_a_function_on_ranks_that_ran_tests():
    assert run_ranks(errors_on_warnings) == [[], []]

def test_a_function_that_is_part_of_a_test(worlds):
    assert all(worlds(size=2).run(errors_on_warnings))
""",
        "-Werror",
    )
    assert verdict.counts() == (5, 0, 1), verdict.text
    assert "UserWarning: left late" in verdict.text


def test_warnings_of_functions_that_worlds_runs_are_the_tests_own(run: Runner) -> None:
    verdict = run(
        """
import warnings
from fsdp_testing import current_world

def warns():
    warnings.warn("everywhere")
    if current_world().rank == 1:
        warnings.warn("here", FutureWarning)

def test_shown(worlds):
    worlds(size=2).run(warns)

def test_expected(worlds):
    with pytest.warns(FutureWarning, match=r"here \\[rank 1\\]"), pytest.warns(UserWarning, match="everywhere"):
        worlds(size=2).run(warns)

@pytest.mark.filterwarnings("error")
def test_an_error(worlds):
    worlds(size=2).run(warns)
"""
    )
    assert verdict.counts() == (2, 1, 0), verdict.text
    assert "FAILED" in verdict.text and "test_an_error - UserWarning: everywhere" in verdict.text
    assert verdict.warnings == 2, verdict.text


def test_a_function_that_skips_on_every_rank_skips_its_test(run: Runner) -> None:
    verdict = run(
        """
from fsdp_testing import current_world

def skips(ranks):
    if current_world().rank in ranks:
        pytest.skip("no such library")

def test_all(worlds):
    worlds(size=2).run(skips, [0, 1])

def test_one(worlds):
    worlds(size=2).run(skips, [1])
"""
    )
    assert verdict.counts() == (0, 1, 0), verdict.text
    assert verdict.skipped == 1, verdict.text
