"""Where something that ranks need is missing or stopped, one message says what to do, or they do without."""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import small_programs  # type: ignore[import-not-found]  # beside this file

from fsdp_testing.errors import PoolBroken
from fsdp_testing.ranks.pool import Pool
from fsdp_testing.ranks.pool.processes import loopback


@pytest.fixture
def own_pool() -> Iterator[Pool]:
    pool = Pool(preload_modules=("pytest",))
    yield pool
    pool.close()


def works(pool: Pool, size: int = 2) -> None:
    world = pool.world(size, isolation="fresh")
    try:
        outcome = world.execute(small_programs.total)
    finally:
        world.release()
    assert outcome.ok, outcome.describe()


def test_a_fork_server_that_somebody_stopped_goes_on(own_pool: Pool) -> None:
    works(own_pool)
    server = own_pool.server()
    os.kill(server.pid, signal.SIGSTOP)
    began = time.monotonic()
    works(own_pool)
    assert own_pool.server() is server
    assert time.monotonic() - began < 30.0, "it took 75 s before"


def test_a_fork_server_that_is_stopped_again_and_again_is_given_up_soon(
    own_pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    works(own_pool)
    server = own_pool.server()
    sent = os.kill
    monkeypatch.setattr(os, "kill", lambda pid, number: None if number == signal.SIGCONT else sent(pid, number))
    os.kill(server.pid, signal.SIGSTOP)
    began = time.monotonic()
    with pytest.raises(PoolBroken, match="it is stopped, and SIGCONT does not help"):
        works(own_pool)
    works(own_pool)
    assert own_pool.server() is not server
    assert time.monotonic() - began < 30.0, "it took 75 s before"


def test_no_descriptor_left_is_told_with_advice(own_pool: Pool) -> None:
    works(own_pool)
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (300, before[1]))
    taken: list[int] = []
    try:
        with contextlib.suppress(OSError):
            while True:
                taken.append(os.open(os.devnull, os.O_RDONLY))
        for _ in range(14):
            with pytest.raises(PoolBroken, match=r"descriptor.*(ulimit -n|[Cc]lose what you do not need)"):
                works(own_pool, 3)
            os.close(taken.pop())
    finally:
        for descriptor in taken:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    works(own_pool, 3)


SUMS = """
import torch, torch.distributed as dist
from fsdp_testing import run_ranks

def total():
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    value = torch.ones(2)
    dist.all_reduce(value)
    return value.tolist()

if __name__ == "__main__":
    for backend in ("gloo", "bare"):
        print(run_ranks(total, size=2, backend=backend))
"""


def without_network(folder: Path, *commands: str) -> subprocess.CompletedProcess[str]:
    """Run the program in a network of its own, after `commands` that make it."""
    if shutil.which("unshare") is None or shutil.which("ip") is None:
        pytest.skip("needs the commands unshare and ip")
    if subprocess.run(["unshare", "-n", "true"], check=False, capture_output=True).returncode:
        pytest.skip("this user may make no network namespace")
    (folder / "sums.py").write_text(SUMS)
    script = " && ".join([*commands, f"exec {sys.executable} sums.py"])
    return subprocess.run(
        ["unshare", "-n", "sh", "-c", script], cwd=folder, check=False, capture_output=True, text=True, timeout=200
    )


def test_a_loopback_of_version_6_alone_will_do(tmp_path: Path) -> None:
    ended = without_network(tmp_path, "ip link set lo up", "ip addr del 127.0.0.1/8 dev lo")
    assert ended.stdout.splitlines() == ["[[2.0, 2.0], [2.0, 2.0]]"] * 2, ended.stderr


def test_no_loopback_at_all_is_told_with_advice(tmp_path: Path) -> None:
    ended = without_network(tmp_path)
    assert ended.returncode == 1
    assert "PoolBroken: world: expected a loopback address (127.0.0.1 or ::1)" in ended.stderr
    assert "ip link set lo up" in ended.stderr


def test_the_loopback_address_is_that_of_version_4_where_it_is_there() -> None:
    assert loopback() == "127.0.0.1"


def test_coverage_that_cannot_be_saved_takes_no_rank_with_it(own_pool: Pool, tmp_path: Path) -> None:
    pytest.importorskip("coverage")
    folder = tmp_path / "coverage"
    folder.mkdir()
    own_pool.coverage = {"data_file": str(folder / "data"), "config_file": False}
    with own_pool.lend(1) as world:
        for _ in range(2):
            outcome = world.execute(small_programs.put_in_the_way, (str(folder),))
            assert outcome.ok, outcome.describe()
        assert "coverage of this rank was not saved: " in outcome.ranks[0].stderr
