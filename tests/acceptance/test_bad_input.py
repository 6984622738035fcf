"""Wrong markers, options and functions: one message each that says where, expected, got and what to do."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Runner = Callable[..., Any]

MARKERS = {
    "0": r"expected size to be a whole number of ranks >= 1, or a list of them, got 0",
    "'2'": r"expected size to be .* got '2'",
    "True": r"expected size to be .* got True",
    "[]": r"expected size to be .* got an empty list",
    "[2, 2]": r"expected different sizes, got \[2, 2\]",
    "2, timeout=-1": r"expected timeout to be seconds > 0, or None for no deadline, got -1",
    "2, timeout='1'": r"expected timeout to be .* got '1'",
    "2, backend='glue'": r"expected backend to be one of gloo, nccl, fake.*, got 'glue'",
    "2, isolation='cold'": r"expected isolation to be one of warm, fresh, got 'cold'",
    "2, ranks=3": r"got an unexpected keyword argument 'ranks'",
    "2, 'gloo', 1, 'warm', 7": r"too many positional arguments",
    "2, rank=1": r"expected rank only with backend 'fake', got rank=1 with backend 'gloo'",
    "2, backend='fake', rank=2": r"expected rank below every size, got rank=2 with size \[2\]",
    "0, timeout=0": r"got 0; expected timeout",
}


def test_a_wrong_marker_is_one_clear_collection_error(run: Runner, tmp_path: Path) -> None:
    for number, arguments in enumerate(MARKERS):
        (tmp_path / f"test_{number}.py").write_text(
            f"import pytest\n@pytest.mark.world({arguments})\ndef test_it(world): pass\n"
        )
    verdict = run("def test_fine(): pass")
    assert verdict.code == pytest.ExitCode.INTERRUPTED, verdict.text
    assert verdict.errors == len(MARKERS), verdict.text
    for number, expected in enumerate(MARKERS.values()):
        pattern = rf"test_{number}.py::test_it: marker world: .*{expected}"
        assert re.search(pattern, verdict.text), f"{pattern}\n{verdict.text}"
    assert verdict.text.count("Write @pytest.mark.world(2)") == len(MARKERS)
    assert "Traceback" not in verdict.text


OPTIONS = {
    ("--world-size", "two"): r"--world-size: expected ranks >= 1 such as 2 or 2,4, got 'two'",
    ("--rank-timeout", "-1"): r"--rank-timeout: expected seconds >= 0, got '-1'",
    ("--dist-backend", "glue"): r"--dist-backend: expected one of gloo, nccl, fake",
    ("--isolation", "cold"): r"--isolation: expected one of warm, fresh, got 'cold'",
}


@pytest.mark.parametrize(
    "options",
    [
        OPTIONS,
        {("--world-size", "0"): r"--world-size: expected ranks >= 1"},
        {("--rank-pdb", "x"): r"--rank-pdb: .*'x'"},
    ],
    ids=["all", "zero", "debugged rank"],
)
def test_wrong_options_are_one_usage_error(
    run_folder: Runner, tmp_path: Path, options: dict[tuple[str, str], str]
) -> None:
    verdict = run_folder(tmp_path, *(word for option in options for word in option))
    assert verdict.code == pytest.ExitCode.USAGE_ERROR, verdict.text
    for expected in options.values():
        assert re.search(expected, verdict.text), verdict.text


def test_a_list_of_sizes_where_no_ids_can_be_made(run: Runner) -> None:
    verdict = run(
        """
import unittest
class TestOld(unittest.TestCase):
    @pytest.mark.world([2, 3])
    def test_it(self):
        pass
"""
    )
    assert verdict.code == pytest.ExitCode.USAGE_ERROR, verdict.text
    assert "expected one size, got [2, 3]" in verdict.text


MIXED = """
def test_without_marker(world): pass

@pytest.mark.world(1000, backend='nccl')
def test_no_such_device(world): pass

@pytest.mark.world(2)
@pytest.mark.parametrize("x", [os.getpid()])
def test_other_id(x): pass
"""


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory, run_in: Runner) -> Any:
    """One session of tests that cannot run, each for a reason of its own, and of one that can."""
    folder = tmp_path_factory.mktemp("mixed")
    (folder / "test_outside_only.py").write_text(
        "import pytest\nimport torch.distributed as dist\n"
        "if dist.is_initialized():\n    raise OSError('only outside')\n"
        "@pytest.mark.world(2)\ndef test_it(): pass\n"
    )
    return run_in(folder, MIXED, "-rs", then_next=True)


def test_what_cannot_run_leaves_the_rest_alone(mixed: Any) -> None:
    assert mixed.counts() == (1, 0, 3), mixed.text
    assert mixed.skipped == 1, mixed.text


def test_the_fixture_without_the_marker(mixed: Any) -> None:
    assert "fixture world: expected a test on ranks, got one without the `world` marker" in mixed.text


def test_a_backend_that_cannot_run_here(mixed: Any, run: Runner) -> None:
    assert re.search(r"backend nccl cannot run here: .*CUDA device", mixed.text), mixed.text
    required = run("@pytest.mark.world(1000, backend='nccl')\ndef test_it(world): pass", "--require-backend")
    assert required.counts() == (0, 0, 1), required.text
    assert "(--require-backend)" in required.text


def test_ids_that_differ_between_processes(mixed: Any) -> None:
    assert "Test ids must be the same in every process" in mixed.text


def test_a_file_that_cannot_be_imported_in_a_rank(mixed: Any) -> None:
    assert "could not be collected in this rank" in mixed.text
    assert "OSError: only outside" in mixed.text


WORLDS = """
from dataclasses import dataclass
from hypothesis import given, settings, strategies as st, HealthCheck

@dataclass
class Case:
    shape: list

def total(case, scale=1):
    world = dist.get_world_size()
    mine = torch.ones(case.shape) * scale
    dist.all_reduce(mine)
    assert mine.sum() == world * scale * mine.numel()
    return dist.get_rank(), Case(case.shape + [world])

def breaks_on_last_rank(case):
    assert dist.get_rank() == 0 or case.shape[0] < 3, "uneven"

def test_run(worlds):
    assert worlds(size=2).run(total, Case([2, 3]), scale=4) == [(0, Case([2, 3, 2])), (1, Case([2, 3, 2]))]

@settings(max_examples=10, deadline=None, database=None)
@given(st.lists(st.integers(1, 4), min_size=1, max_size=2))
def test_drawn(worlds, shape):
    world = worlds(2, backend="gloo")
    assert [rank for rank, _ in world.run(total, Case(shape))] == [0, 1]

@settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck), database=None)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=3))
def test_shrinks(worlds, shape):
    worlds(2).run(breaks_on_last_rank, Case(shape))

def test_lambda(worlds):
    worlds(2).run(lambda: 1)

def test_bad_size(worlds):
    worlds("2")

@pytest.mark.world(2)
def test_inside(worlds):
    pass
"""


# This suite itself sends functions of modules imported by importlib, as every test that calls `run_ranks` here.
@pytest.mark.parametrize("mode", ["prepend", pytest.param("importlib", marks=pytest.mark.slow)])
def test_functions_of_the_controlling_process(run: Runner, mode: str) -> None:
    verdict = run(WORLDS, "--import-mode", mode)
    assert verdict.counts() == (2, 3, 1), verdict.text
    assert "raised AssertionError: uneven" in verdict.text
    assert re.search(r"shape=\[3\]", verdict.text), verdict.text
    assert "UnsendableFunction" in verdict.text
    assert "expected size to be" in verdict.text
    assert "a rank cannot run other ranks" not in verdict.text
    assert "expected a test without the `world` marker" in verdict.text
