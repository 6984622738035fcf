"""Under torchrun marked tests run in its processes; no ending of a test leaves a peer waiting."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

TESTS = """
import os
import pytest, torch
import torch.distributed as dist

WHAT = os.environ.get("WHAT")

def doubled(value):
    return value * 2 + dist.get_rank()

@pytest.mark.world(2)
def test_sum(world, tmp_path):
    value = torch.ones(3) * (world.rank + 1)
    dist.all_reduce(value, group=world.group)
    assert value.tolist() == [3.0] * 3

@pytest.mark.world(2)
def test_draws_alike(world):
    world.assert_equal_across_ranks(torch.rand(5))

@pytest.mark.world([2, 3])
def test_sizes(world):
    assert world.size == 2

def test_plain():
    pass

def test_worlds(worlds):
    assert worlds(2).run(doubled, 4) == [8, 9]

@pytest.mark.world(8, backend="fake", rank=3)
def test_fake(world):
    assert (world.rank, world.size) == (3, 8)

if WHAT == "skips":
    @pytest.mark.world(2)
    def test_skips_on_one(world):
        if world.rank == 1:
            pytest.skip("only here")
if WHAT == "raises":
    @pytest.mark.world(2)
    def test_raises_on_one(world):
        if world.rank == 1:
            raise ValueError("planted")
        dist.all_reduce(torch.ones(3))
if WHAT == "hangs":
    @pytest.mark.world(2, timeout=2)
    def test_hangs_on_one(world):
        while world.rank == 0:
            pass
if WHAT == "selects":
    if os.environ["RANK"] == "1":
        @pytest.mark.world(2)
        def test_only_here(world):
            pass

def test_last():
    pass
"""


def run(what: str, folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    (folder / "test_it.py").write_text(TESTS)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    tests = [
        "--no-python",
        sys.executable,
        "-m",
        "pytest",
        "-v",
        "-p",
        "no:cacheprovider",
        *options,
        "test_it.py",
    ]
    environment = {"WHAT": what, "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1", "HOME": str(folder)}
    return subprocess.run(
        [*launcher, *tests], cwd=folder, env=environment, capture_output=True, text=True, timeout=200, check=False
    )


def test_its_processes_are_the_world(tmp_path: Path) -> None:
    done = run("nothing", tmp_path, "-rs")
    assert done.returncode == 0, done.stdout + done.stderr
    # Of each process: all but the size that these processes are not.
    assert done.stdout.count("7 passed, 1 skipped") == 2, done.stdout
    assert done.stdout.count("test_last PASSED") == 2
    assert done.stdout.count("torchrun made 2 processes, the test asks for a world of 3") == 2


@pytest.mark.parametrize(
    ("what", "told"),
    [
        ("skips", "ranks disagree: rank 0 passed, rank 1 skipped"),
        ("raises", "ValueError: planted"),
        ("hangs", "Timeout (0:00:02)!"),
        ("selects", "expected every process to collect the same"),
    ],
)
def test_no_ending_leaves_a_peer_waiting(what: str, told: str, tmp_path: Path) -> None:
    done = run(what, tmp_path)
    text = done.stdout + done.stderr
    assert done.returncode == 1, text
    assert told in text
    assert "test_last PASSED" not in text


@pytest.mark.slow
def test_a_missing_size_fails_where_it_must(tmp_path: Path) -> None:
    done = run("nothing", tmp_path, "--require-backend")
    assert done.returncode == 1
    assert "torchrun made 2 processes, the test asks for a world of 3 (--require-backend)" in done.stdout
