"""Nothing is left of worlds and ranks, whatever ends the controller."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
from small_programs import gone, pid, run, total

from fsdp_testing.ranks.pool import Pool


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_no_descriptor_is_left_by_calls_and_worlds() -> None:
    pool = Pool()
    run(pool.world(2), total)
    before = open_descriptors()
    for _ in range(50):
        run(pool.world(2), pid)
    assert open_descriptors() == before
    for _ in range(10):
        world = pool.world(2, isolation="fresh")
        world.execute(pid)
        world.release()
    assert open_descriptors() == before
    pool.close()


def test_a_killed_fork_server_is_replaced() -> None:
    pool = Pool()
    pids = run(pool.world(2), pid)
    server = pool.server().pid
    os.kill(server, signal.SIGKILL)
    assert gone([server, *pids])
    assert run(pool.world(2), total) == [8.0, 8.0]
    assert pool.server().pid != server
    pool.close()


def test_close_leaves_no_process_and_can_be_undone() -> None:
    pool = Pool()
    pids = run(pool.world(2), pid)
    server = pool.server().pid
    pool.close()
    pool.close()
    assert gone([server, *pids], 2.0)
    assert run(pool.world(1), total) == [4.0]
    pool.close()


def test_callbacks_run_while_ranks_still_answer(pool: Pool) -> None:
    expected: list[Any] = []
    world = pool.world(2, isolation="fresh")
    world.before_leaving.append(lambda leaving: expected.append(leaving.execute(pid).values))
    pids = run(world, pid)  # gives it back, which ends it
    assert expected == [pids]


def test_a_world_that_was_killed_calls_nobody(pool: Pool) -> None:
    expected: list[Any] = []
    world = pool.world(2, isolation="fresh")
    world.before_leaving.append(expected.append)
    world.discard()
    world.release()
    assert expected == []


SCRIPT = """
import os, sys, time
from fsdp_testing.ranks.pool import Pool
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
import os, signal, subprocess, threading, time
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
def test_no_process_outlives_the_controller(name: str, tmp_path: Path) -> None:
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
    for left in _named(str(tmp_path)):
        os.kill(left, signal.SIGKILL)


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
