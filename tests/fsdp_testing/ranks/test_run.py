"""`run_ranks` returns one result per rank, or raises one error that accounts for every rank."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import fsdp_testing
from fsdp_testing import run_ranks
from fsdp_testing.errors import BackendUnavailable, InvalidArgument, UnsendableFunction, WorldFailed
from fsdp_testing.ranks.pool import Fate, default_pool
from fsdp_testing.ranks.pool.world import current_world


@pytest.fixture(scope="module", autouse=True)
def _no_rank_is_left() -> Iterator[None]:
    yield
    default_pool().close()


def scaled(factor: float, *, offset: float = 0.0) -> float:
    value = torch.ones(4) * factor
    dist.all_reduce(value)
    return float(value[0]) + offset + current_world().rank


def place() -> tuple[int, int]:
    return current_world().rank, current_world().size


def planted() -> None:
    if current_world().rank == 1:
        raise ValueError("planted")


def reads_file(path: Path) -> str:
    return path.read_text()


@pytest.mark.parametrize("isolation", ["warm", "fresh"])
def test_results_by_rank(isolation: str) -> None:
    assert run_ranks(scaled, 2.0, size=3, isolation=isolation, offset=0.5) == [6.5, 7.5, 8.5]


def test_a_function_by_name() -> None:
    assert run_ranks("math:floor", 2.5) == [2, 2]


def test_the_error_accounts_for_every_rank() -> None:
    with pytest.raises(WorldFailed, match="^rank 1 raised ValueError: planted") as caught:
        run_ranks(planted)
    frames = caught.traceback.filter(caught)
    assert frames[-1].path == Path(__file__), "pytest shows the test and what the ranks raised, and none of our frames"
    outcome: Any = caught.value.outcome
    assert [rank.fate for rank in outcome.ranks] == [Fate.RETURNED, Fate.RAISED]
    assert "--- rank 0 returned" in str(caught.value)
    assert "in planted" in str(caught.value)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_a_backend_that_cannot_run_here() -> None:
    for _ in range(2):
        with pytest.raises(BackendUnavailable, match=r"^backend 'nccl' cannot run a world of 2 here: .*CUDA.*\.$"):
            run_ranks(place, backend="nccl")


def test_arguments_of_the_wrong_kind() -> None:
    with pytest.raises(UnsendableFunction, match="which is a lambda"):
        run_ranks(lambda: 1)
    with pytest.raises(InvalidArgument, match="got 'two'"):
        run_ranks(place, size="two")  # type: ignore[arg-type]  # the wrong kind under test
    with pytest.raises(InvalidArgument, match="timeout: expected seconds above 0"):
        run_ranks(place, timeout=-1)


TORCHRUN = r"""
import os
import sys
import time
import torch, torch.distributed as dist
from fsdp_testing import current_world, run_ranks
def total(factor):
    value = torch.ones(2) * factor
    dist.all_reduce(value)
    return [float(value[0]), current_world().rank]
def fails():
    if current_world().rank == 1:
        raise ValueError("planted")
    dist.barrier()
def counted(fault):
    current_world().inject(fault)
    return [float(total(1.0)[0]) for _ in range(2)]
def faulty(fault):
    current_world().inject(fault)
    return time.time() - time.clock_gettime(time.CLOCK_REALTIME) > 3000
what = sys.argv[1]
if what == "works":
    for _ in range(2):
        os.write(1, f"got {run_ranks(total, 3.0, size=2)}\n".encode())  # whole: two processes share the pipe
elif what == "fails":
    run_ranks(fails, size=2)
elif what == "faults":
    moved = run_ranks(faulty, "clock=+3600", size=2)
    off = time.time() - time.clock_gettime(time.CLOCK_REALTIME)
    os.write(1, f"moved {moved}, put back: {abs(off) < 60}\n".encode())
    os.write(1, f"sums {run_ranks(counted, 'corrupt@rank=1,collective=2', size=2)}\n".encode())
    run_ranks(faulty, "crash@step=1", size=2)
else:
    run_ranks(total, 1.0, size=3)
"""


@pytest.mark.parametrize(
    ("what", "code", "said"),
    [
        ("works", 0, "got [[6.0, 0], [6.0, 1]]"),
        ("fails", 1, "ValueError: planted"),
        ("faults", 1, "fault crash@step=1: expected a place that is reached, but the run ended before it"),
        ("size", 1, "expected size=2, the number of torchrun's processes, got 3"),
    ],
)
def test_under_torchrun_its_processes_are_the_world(what: str, code: int, said: str, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(TORCHRUN)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script), what]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == code, done.stderr
    assert said in done.stdout + done.stderr
    if what == "works":
        assert done.stdout.count(said) == 4
    if what == "faults":
        assert done.stdout.count("moved [True, True], put back: True") == 2, done.stdout
        assert done.stdout.count("sums [[2.0, 3.0], [2.0, 3.0]]") == 2, done.stdout


def test_names_of_the_package() -> None:
    assert fsdp_testing.run_ranks is run_ranks
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        fsdp_testing.nothing  # noqa: B018 - the attribute access under test
