"""What everybody pays who has this package installed: a session without ranks, also where there can be no ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Runner = Callable[..., Any]

COUNTING = """
import sys
def pytest_unconfigure():
    ours = sorted(name for name in sys.modules if name.partition(".")[0] in ("fsdp_testing", "fsdp_ref"))
    print("ours:", len(ours), *ours, "torch" if "torch" in sys.modules else "no torch")
"""


def test_a_session_without_ranks_imports_at_most_six_modules_of_ours(run_folder: Runner, tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(COUNTING)
    (tmp_path / "test_plain.py").write_text("def test_plain(tmp_path): pass\n")
    verdict = run_folder(tmp_path, "-s")
    assert verdict.counts() == (1, 0, 0), verdict.text
    (line,) = [line for line in verdict.text.splitlines() if line.startswith("ours: ")]
    assert 2 <= int(line.split()[1]) <= 6, line
    assert line.endswith("no torch")


def test_all_that_there_is_is_listed_without_a_need_of_it(run_folder: Runner, tmp_path: Path) -> None:
    helped = run_folder(tmp_path, "--help").text
    options = ("world-size", "dist-backend", "rank-timeout", "isolation", "rank-pdb", "strict-hygiene")
    assert [name for name in (*options, "require-backend") if f"--{name}" not in helped] == []
    assert "@pytest.mark.world(size=2" in run_folder(tmp_path, "--markers").text
    listed = run_folder(tmp_path, "--fixtures").text
    assert "world --" in listed
    assert "worlds [session scope] --" in listed


WITHOUT_RANKS = """
import pytest

def test_plain(): pass

@pytest.mark.world([2, 3])
def test_on_ranks(world): pass

def test_controlling(worlds):
    worlds(2).run("os:getpid")
"""


@pytest.mark.parametrize("name", ["register_at_fork", "memfd_create"])
def test_where_no_rank_can_be_made_the_rest_of_pytest_works(run_folder: Runner, tmp_path: Path, name: str) -> None:
    """Windows and macOS: one sentence for each test that needs ranks."""
    (tmp_path / "other_system.py").write_text(f"import os\ndel os.{name}\n")
    (tmp_path / "test_mixed.py").write_text(WITHOUT_RANKS)
    verdict = run_folder(tmp_path, "-p", "other_system", "--world-size=2")
    assert verdict.counts() == (1, 0, 3), verdict.text
    # In each of the three errors, and in the summary's line of each.
    sentence = f"expected Linux, where ranks are forked, got linux without os.{name}. Run tests on ranks on Linux"
    assert verdict.text.count(f"E   {sentence}") + verdict.text.count(f": {sentence}") >= 3, verdict.text
    assert "Traceback" not in verdict.text
    assert "AttributeError" not in verdict.text


DRAWN = """
from hypothesis import given, settings, strategies as st

def spoils(number):
    if number == 1:
        os.environ["SPOILED"] = "1"
    return number

@settings(max_examples=3, deadline=None, database=None)
@given(number=st.just(0))
def test_clean(worlds, number):
    assert worlds(2).run(spoils, number) == [number, number]

@settings(max_examples=3, deadline=None, database=None)
@given(number=st.just(1))
def test_spoils(worlds, number):
    assert worlds(2).run(spoils, number) == [number, number]

def test_clean_afterwards(worlds):
    assert worlds(2).run(spoils, 2) == [2, 2]
"""


# Under the variable CI, Hypothesis draws the same examples in every process unless asked not to.
MARKED = """
@pytest.mark.world(2)
@settings(derandomize=False)
@given(number=st.integers())
def test_drawn(number): pass

@pytest.mark.world(2)
@settings(max_examples=5, deadline=None, derandomize=True)
@given(size=st.integers(1, 4))
def test_drawn_alike(size):
    dist.all_reduce(torch.ones(size))

def test_plain(): pass
"""


def test_drawn_tests_use_worlds_under_default_health_checks(run: Runner) -> None:
    verdict = run(DRAWN + MARKED)
    assert verdict.counts() == (5, 0, 1), verdict.text
    left = verdict.text.partition("warnings summary")[2].partition("short test summary")[0]
    assert "test_ranks.py::test_spoils" in left
    assert "test_clean" not in left, left
    # One that would draw different examples on each rank fails, and keeps no other test from running.
    assert "would draw different examples on each" in verdict.text
    assert "ERROR test_ranks.py::test_drawn - " in verdict.text


def test_what_an_example_leaves_behind_fails_its_test_alone(run: Runner) -> None:
    verdict = run(DRAWN, "--strict-hygiene")
    assert verdict.counts() == (2, 1, 0), verdict.text
    assert "FAILED test_ranks.py::test_spoils" in verdict.text
