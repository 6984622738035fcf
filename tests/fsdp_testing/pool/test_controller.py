"""Worlds are lent, kept, replaced and ended, and nothing is left of them whatever ends the controller."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fsdp_testing.errors import BackendUnavailable, HarnessError, InvalidArgument, PoolBroken
from fsdp_testing.pool import Pool, PooledWorld
from fsdp_testing.pool.controller import _MOST_IDLE_RANKS, default_pool
from fsdp_testing.pool.world import current_world

# ---- what ranks do


def total() -> float:
    value = torch.ones(4)
    dist.all_reduce(value)
    return float(value.sum())


def pid() -> int:
    return os.getpid()


def place() -> tuple[int, int, str]:
    world = current_world()
    return world.rank, world.size, world.device.type


def fail() -> None:
    raise ValueError("planted")


def sees(name: str) -> tuple[str | None, str, list[str]]:
    return os.environ.get(name), os.getcwd(), sys.path[:1]


def dies_later() -> None:
    threading.Timer(0.1, os._exit, (5,)).start()


def addresses() -> list[str]:
    """Addresses of every TCP socket of this process that listens."""
    inodes = set()
    for entry in os.listdir("/proc/self/fd"):
        try:
            name = os.readlink(f"/proc/self/fd/{entry}")
        except OSError:
            continue
        if name.startswith("socket:["):
            inodes.add(name[8:-1])
    found = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[9] in inodes and fields[3] == "0A":
                found.append(fields[1].partition(":")[0])
    return found


def nested() -> str:
    from fsdp_testing import run_ranks

    try:
        run_ranks(total)
    except HarnessError as error:
        return str(error)
    return "ran"


def run(world: PooledWorld, function: Callable[..., Any], *args: Any) -> list[Any]:
    try:
        outcome = world.execute(function, args)
    finally:
        world.release()
    assert outcome.ok, outcome.describe()
    return outcome.values


# ---- lending


def test_a_warm_world_is_lent_again(pool: Pool) -> None:
    first = run(pool.world(2), pid)
    assert run(pool.world(2), pid) == first
    assert len(set(first)) == 2


def test_two_borrowers_have_two_worlds(pool: Pool) -> None:
    one, two = pool.world(2), pool.world(2)
    assert one is not two
    assert set(run(one, pid)).isdisjoint(run(two, pid))


def test_a_fresh_world_ends_when_given_back(pool: Pool) -> None:
    world = pool.world(2, isolation="fresh")
    pids = run(world, pid)
    assert world not in pool.worlds()
    assert gone(pids)
    with pytest.raises(PoolBroken, match="expected an open world, got one that is closed"):
        world.execute(pid)


def test_a_world_that_failed_is_replaced(pool: Pool) -> None:
    world = pool.world(2)
    before = world.pids
    assert not world.execute(fail).ok
    world.release()
    assert gone(list(before))
    assert set(run(pool.world(2), pid)).isdisjoint(before)


def test_a_rank_that_ends_between_two_calls_is_nobodys_fault(pool: Pool) -> None:
    world = pool.world(2)
    before = world.pids
    assert world.execute(dies_later, lasting=None).ok
    assert gone(list(before))
    world.release()
    assert run(pool.world(2), total) == [8.0, 8.0]


def test_a_rank_that_ended_before_the_call_is_told_so(pool: Pool) -> None:
    world = pool.world(2)
    assert world.execute(total).ok
    os.kill(world.pids[1], signal.SIGKILL)
    assert gone([world.pids[1]])
    outcome = world.execute(total)
    world.release()
    assert outcome.cause.startswith("rank 1 died by SIGKILL before it began this call"), outcome.describe()


@pytest.mark.parametrize("size", range(1, 9))
def test_every_size(pool: Pool, size: int) -> None:
    world = pool.world(size, isolation="fresh")
    assert run(world, total) == [4.0 * size] * size


def test_idle_worlds_are_limited(pool: Pool) -> None:
    worlds = [pool.world(4) for _ in range(20)]
    for world in worlds:
        assert run(world, total) == [16.0] * 4
    run(pool.world(2), pid)
    assert sum(len(world.pids) for world in pool.worlds() if not world.busy) <= _MOST_IDLE_RANKS + 2
    assert run(pool.world(4), total) == [16.0] * 4


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0,), "expected a size of at least 1, got 0"),
        ((-2,), "got -2"),
        ((True,), "got True"),
        (("2",), "got '2'"),
        ((2.0,), "got 2.0"),
        ((100_000,), "expected at most 256 ranks that are processes"),
        ((2, "mpi2"), "expected a backend among gloo, nccl, fake.*, got 'mpi2'"),
        ((2, "gloo", "cold"), "expected isolation 'warm' or 'fresh', got 'cold'"),
    ],
)
def test_bad_arguments(pool: Pool, arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        pool.world(*arguments)


def test_arguments_that_cannot_be_sent(pool: Pool) -> None:
    world = pool.world(1)
    with pytest.raises(InvalidArgument, match="expected arguments that can be sent to ranks, got TypeError"):
        world.execute(total, (threading.Lock(),))
    assert run(world, total) == [4.0]


# ---- the fake backend


def test_one_process_is_any_rank_of_any_size(pool: Pool) -> None:
    assert run(pool.world(1024, "fake").at(7), place) == [(7, 1024, "cpu")]
    assert run(pool.world(1024, "fake").at(1023), place) == [(1023, 1024, "cpu")]
    # The next borrower does not inherit the place.
    assert run(pool.world(1024, "fake"), place) == [(0, 1024, "cpu")]
    assert run(pool.world(100_000, "fake").at(99_999), place) == [(99_999, 100_000, "cpu")]


def test_a_fake_world_reports_as_the_rank_it_stands_for(pool: Pool) -> None:
    world = pool.world(16, "fake").at(5)
    outcome = world.execute(fail)
    world.release()
    assert [rank.rank for rank in outcome.ranks] == [5]
    assert outcome.cause == "rank 5 raised ValueError: planted"


@pytest.mark.parametrize("rank", [-1, 4, "1", True])
def test_a_rank_outside_the_world(pool: Pool, rank: Any) -> None:
    world = pool.world(4, "fake")
    with pytest.raises(InvalidArgument, match="expected a rank from 0 to 3"):
        world.at(rank)
    world.release()


def test_a_world_of_processes_stands_for_nobody(pool: Pool) -> None:
    world = pool.world(2)
    with pytest.raises(InvalidArgument, match="expected a backend of one process, such as 'fake', got 'gloo'"):
        world.at(1)
    world.release()


# ---- nccl


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_nccl_says_once_why_it_cannot_run(pool: Pool) -> None:
    world = pool.world(2, "nccl")
    outcome = world.execute(total)
    world.release()
    assert outcome.cause.startswith(
        "every rank raised BackendUnavailable: backend 'nccl' cannot run a world of 2 here: "
    )
    # The second time nothing is started.
    with pytest.raises(BackendUnavailable, match="backend 'nccl' cannot run a world of 2 here"):
        pool.world(2, "nccl")


# ---- what ranks see of the controller


def test_kept_ranks_follow_the_controller(pool: Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(pool.world(2), pid)
    monkeypatch.setenv("HARNESS_TEST", "1")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend("/nowhere/at/all")
    assert run(pool.world(2), sees, "HARNESS_TEST") == [("1", str(tmp_path), ["/nowhere/at/all"])] * 2
    monkeypatch.undo()
    seen = run(pool.world(2), sees, "HARNESS_TEST")
    assert [(value, where) for value, where, _ in seen] == [(None, os.getcwd())] * 2


def test_sockets_are_bound_to_loopback_alone(pool: Pool) -> None:
    listening = [address for found in run(pool.world(2, isolation="fresh"), addresses) for address in found]
    assert listening, "the store of rank 0 listens"
    assert set(listening) <= {"0100007F", "00000000000000000000000001000000"}, listening


def test_worlds_do_not_nest(pool: Pool) -> None:
    for told in run(pool.world(2), nested):
        assert "expected the controlling process, got a rank of a world" in told


# ---- threads and forks of the controller


def test_threads_use_worlds_side_by_side(pool: Pool) -> None:
    results: list[Any] = []

    def loop() -> None:
        for _ in range(10):
            results.append(run(pool.world(2), total))

    threads = [threading.Thread(target=loop) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [[8.0, 8.0]] * 30


def sleeps() -> None:
    threading.Event().wait(0.5)


def test_one_world_runs_one_call(pool: Pool) -> None:
    world = pool.world(2)
    thread = threading.Thread(target=world.execute, args=(sleeps,))
    thread.start()
    refused = threading.Event()
    while thread.is_alive() and not refused.is_set():
        try:
            world.execute(pid)
        except PoolBroken as error:
            assert "runs a call for another thread" in str(error)
            refused.set()
    thread.join()
    assert refused.is_set()
    assert run(world, total) == [8.0, 8.0]


def test_ranks_outlive_the_thread_that_first_used_the_pool(cache: Path) -> None:
    pool = Pool()
    worlds: list[PooledWorld] = []
    thread = threading.Thread(target=lambda: worlds.append(pool.world(2)))
    thread.start()
    thread.join()
    assert run(worlds[0], total) == [8.0, 8.0]
    assert run(pool.world(3), total) == [12.0] * 3
    pool.close()


def test_a_forked_child_of_the_controller_harms_nothing(pool: Pool) -> None:
    world = pool.world(2)
    assert world.execute(total).ok
    child = os.fork()
    if child == 0:
        code = 1
        try:
            try:
                world.execute(total)
            except PoolBroken as error:
                code = 0 if "a forked child of it" in str(error) else 2
            world.release()
            world.discard()
            pool.close()
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert run(world, total) == [8.0, 8.0]


def test_the_default_pool_is_one_for_all_threads() -> None:
    found: list[Pool] = []
    threads = [threading.Thread(target=lambda: found.append(default_pool())) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({id(pool) for pool in found}) == 1


# ---- ends


def gone(pids: list[int], seconds: float = 5.0) -> bool:
    limit = time.monotonic() + seconds
    waiting = threading.Event()
    while any(_runs(pid) for pid in pids):
        if time.monotonic() > limit:
            return False
        waiting.wait(0.01)
    return True


def _runs(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_no_descriptor_is_left_by_calls_and_worlds(cache: Path) -> None:
    pool = Pool()
    run(pool.world(2), total)
    before = open_descriptors()
    for _ in range(200):
        run(pool.world(2), pid)
    assert open_descriptors() == before
    for _ in range(50):
        world = pool.world(2, isolation="fresh")
        world.execute(pid)
        world.release()
    assert open_descriptors() == before
    pool.close()


def test_a_killed_fork_server_is_replaced(cache: Path) -> None:
    pool = Pool()
    pids = run(pool.world(2), pid)
    server = pool.server().pid
    os.kill(server, signal.SIGKILL)
    assert gone([server, *pids])
    assert run(pool.world(2), total) == [8.0, 8.0]
    assert pool.server().pid != server
    pool.close()


def test_close_leaves_no_process_and_can_be_undone(cache: Path) -> None:
    pool = Pool()
    pids = run(pool.world(2), pid)
    server = pool.server().pid
    pool.close()
    pool.close()
    assert gone([server, *pids], 2.0)
    assert run(pool.world(1), total) == [4.0]
    pool.close()


def test_callbacks_run_while_ranks_still_answer(cache: Path) -> None:
    pool = Pool()
    told: list[Any] = []
    world = pool.world(2)
    world.before_leaving.append(lambda leaving: told.append(leaving.execute(pid).values))
    pids = run(world, pid)
    pool.close()
    assert told == [pids]


def test_a_world_that_was_killed_calls_nobody(cache: Path) -> None:
    pool = Pool()
    told: list[Any] = []
    world = pool.world(2)
    world.before_leaving.append(told.append)
    world.discard()
    world.release()
    pool.close()
    assert told == []


SCRIPT = """
import os, sys, time
from fsdp_testing.pool import Pool
sys.path.insert(0, {folder!r})
import jobs
pool = Pool()
if __name__ == "__main__":
    world = pool.world(2)
    pids = world.execute(jobs.pids).values
    print(pool.server().pid, *[pid for found in pids for pid in found], flush=True)
    {ending}
"""
JOBS = """
import os, signal, subprocess, time
def pids():
    plain = subprocess.Popen(["sleep", "600"])
    apart = subprocess.Popen(["sleep", "600"], start_new_session=True)
    return [os.getpid(), plain.pid, apart.pid]
def hang():
    threading.Event().wait(600)
"""
ENDINGS = {
    "killed while idle": ("time.sleep(600)", signal.SIGKILL),
    "killed during a call": ("pool.world(2).execute(jobs.hang, timeout=None)", signal.SIGKILL),
    "terminated": ("time.sleep(600)", signal.SIGTERM),
    "Ctrl-C during a call": ("pool.world(2).execute(jobs.hang, timeout=None)", signal.SIGINT),
    "hung up": ("time.sleep(600)", signal.SIGHUP),
    "os._exit": ("os._exit(3)", None),
    "killed with a forked child left": (
        "os.fork() or (os.close(0), os.close(1), os.close(2), time.sleep(600)); time.sleep(600)",
        signal.SIGKILL,
    ),
}


@pytest.mark.parametrize("name", ENDINGS)
def test_no_process_outlives_the_controller(name: str, tmp_path: Path, cache: Path) -> None:
    ending, number = ENDINGS[name]
    (tmp_path / "jobs.py").write_text(JOBS)
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(SCRIPT).format(folder=str(tmp_path), ending=ending))
    # Hygiene ends what the first call leaves behind: the second call's ranks are new.
    with subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True) as controller:
        assert controller.stdout is not None
        line = controller.stdout.readline()
        pids = [int(word) for word in line.split()]
        assert len(pids) == 7, line
        left = _descendants(controller.pid)
        if number is not None:
            os.kill(controller.pid, number)
        if name == "killed with a forked child left":
            os.waitid(os.P_PID, controller.pid, os.WEXITED | os.WNOWAIT)
            children = [pid for pid in left if pid not in pids and _parent(pid) != 1]
        else:
            children = []
        controller.wait(20)
    assert gone([pid for pid in pids if pid not in children]), name
    for pid in _named(str(tmp_path)):
        os.kill(pid, signal.SIGKILL)


def _descendants(pid: int) -> list[int]:
    found: list[int] = []
    waiting = [pid]
    while waiting:
        current = waiting.pop()
        try:
            listed = Path(f"/proc/{current}/task/{current}/children").read_text().split()
        except OSError:
            continue
        found.extend(map(int, listed))
        waiting.extend(map(int, listed))
    return found


def _parent(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 1


def _named(text: str) -> list[int]:
    """Processes whose command line holds `text`: the forked child of the controller."""
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdecimal():
            try:
                command = Path(f"/proc/{entry}/cmdline").read_bytes().decode("utf-8", "replace")
            except OSError:
                continue
            if text in command and int(entry) != os.getpid():
                found.append(int(entry))
    return found


def test_a_port_that_is_taken_disturbs_nobody(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        monkeypatch.setenv("MASTER_PORT", str(taken.getsockname()[1]))
        monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
        assert run(pool.world(2, isolation="fresh"), total) == [8.0, 8.0]
