"""Under torchrun marked tests run in its processes; no ending of a test leaves a peer waiting."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
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


@dataclass(frozen=True, slots=True)
class Ended:
    """Exit code of torchrun, and what each process wrote: of one pipe for both, lines would be torn."""

    code: int
    texts: tuple[str, ...]
    agent: str


def run(what: str, folder: Path, *options: str) -> Ended:
    (folder / "test_it.py").write_text(TESTS)
    logs = folder / "logs"
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    launcher += [f"--log-dir={logs}", "--redirects=3", "--no-python"]
    tests = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", *options, "test_it.py"]
    environment = {"WHAT": what, "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1", "HOME": str(folder)}
    done = subprocess.run(
        [*launcher, *tests], cwd=folder, env=environment, capture_output=True, text=True, timeout=200, check=False
    )
    written = sorted(logs.glob("**/stdout.log"))
    texts = tuple(path.read_text() + path.with_name("stderr.log").read_text() for path in written)
    return Ended(done.returncode, texts, done.stdout + done.stderr)


def test_its_processes_are_the_world(tmp_path: Path) -> None:
    done = run("nothing", tmp_path, "-rs")
    assert done.code == 0, done
    assert len(done.texts) == 2
    for text in done.texts:
        # All but the size that these processes are not.
        assert "7 passed, 1 skipped" in text
        assert "torchrun made 2 processes, the test asks for a world of 3" in text
        assert "test_last PASSED" in text


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
    assert done.code == 1, done
    assert any(told in text for text in done.texts), done
    assert not any("test_last PASSED" in text for text in done.texts)


@pytest.mark.slow
def test_a_missing_size_fails_where_it_must(tmp_path: Path) -> None:
    done = run("nothing", tmp_path, "--require-backend")
    assert done.code == 1
    assert all("torchrun made 2 processes, the test asks for a world of 3 (--require-backend)" in t for t in done.texts)
