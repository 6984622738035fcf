"""Workers of one run share the process that has imported torch, and nothing else; it ends with the last of them."""

from __future__ import annotations

import os
import resource
import signal
import socket
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from small_programs import gone, pid, process_settings, total

from fsdp_testing.ranks.pool import Pool, zygote


@pytest.fixture
def run() -> str:
    return uuid.uuid4().hex


@pytest.fixture
def pools(run: str) -> Iterator[tuple[Pool, Pool]]:
    pair = Pool(), Pool()
    for pool in pair:
        pool.run = run
    yield pair
    for pool in pair:
        pool.close()


def works(pool: Pool) -> bool:
    with pool.lend(2) as world:
        return world.execute(total).values == [8.0, 8.0]


def parent(process: int) -> int:
    return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])


def test_two_workers_fork_their_servers_from_one_process_that_ends_with_the_last(pools: tuple[Pool, Pool]) -> None:
    assert all(map(works, pools))
    servers = [pool.server().pid for pool in pools]
    assert servers[0] != servers[1]
    zygote = parent(servers[0])
    assert parent(servers[1]) == zygote != os.getpid()
    pools[0].close()
    assert gone(servers[:1])
    assert works(pools[1])  # it has lost nothing
    pools[1].close()
    assert gone([*servers, zygote])


def test_a_worker_whose_zygote_is_killed_keeps_its_server_and_the_next_server_has_a_new_one(
    pools: tuple[Pool, Pool],
) -> None:
    assert works(pools[0])
    before = parent(pools[0].server().pid)
    os.kill(before, signal.SIGKILL)
    assert gone([before])
    assert works(pools[0])
    assert works(pools[1])
    assert parent(pools[1].server().pid) not in (before, os.getpid())


def test_a_server_that_is_killed_is_replaced(pools: tuple[Pool, Pool]) -> None:
    assert works(pools[0])
    server = pools[0].server().pid
    with pools[0].lend(2) as world:
        ranks = world.execute(pid).values
    os.kill(server, signal.SIGKILL)
    assert gone([server, *ranks])
    assert works(pools[0])
    assert pools[0].server().pid != server


def test_a_worker_with_another_environment_has_a_server_of_its_own(
    pools: tuple[Pool, Pool], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert works(pools[0])
    monkeypatch.setenv("PYTEST_XDIST_WORKER", "gw1")
    assert works(pools[1])
    zygote = parent(pools[0].server().pid)
    assert parent(pools[1].server().pid) == zygote
    pools[1].close()
    monkeypatch.setenv("TORCH_SHOW_CPP_STACKTRACES", "1")  # torch reads such variables when it is imported
    assert works(pools[1])
    assert parent(pools[1].server().pid) == os.getpid()


def test_a_worker_has_its_own_limits_and_umask_in_its_ranks(pools: tuple[Pool, Pool]) -> None:
    def read(pool: Pool) -> tuple[object, ...]:
        with pool.lend(1) as world:
            values: list[tuple[object, ...]] = world.execute(process_settings).values
        return values[0]

    assert read(pools[0]) == process_settings()
    before, files = os.umask(0o027), resource.getrlimit(resource.RLIMIT_NOFILE)
    processors = os.sched_getaffinity(0)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (files[0] - 1, files[1]))
        os.sched_setaffinity(0, {min(processors)})
        changed = process_settings()
        assert read(pools[1]) == changed != read(pools[0])
    finally:
        os.umask(before)
        resource.setrlimit(resource.RLIMIT_NOFILE, files)
        os.sched_setaffinity(0, processors)
    assert parent(pools[1].server().pid) == parent(pools[0].server().pid)


def test_a_zygote_that_is_stopped_is_waited_for_once(pools: tuple[Pool, Pool], monkeypatch: pytest.MonkeyPatch) -> None:
    assert works(pools[0])
    stopped = parent(pools[0].server().pid)
    os.kill(stopped, signal.SIGSTOP)
    try:
        monkeypatch.setattr(zygote, "PATIENCE", 0.5)
        assert works(pools[1])
        assert parent(pools[1].server().pid) == os.getpid()
        pools[1].close()
        monkeypatch.setattr(zygote, "PATIENCE", 600.0)
        assert works(pools[1])
        assert works(pools[0])
        pools[0].close()  # nobody waits for its server, which has ended
    finally:
        os.kill(stopped, signal.SIGCONT)
    assert gone([stopped])


def test_a_server_that_has_ended_and_is_not_waited_for_has_ended() -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    os.waitid(os.P_PID, ended.pid, os.WEXITED | os.WNOWAIT)  # leaves it as it is
    with socket.socket() as connection:
        server = zygote.ForkedServer(connection)
        server.pid = ended.pid  # as where processes have no descriptors
        assert server.poll() == -1
    ended.wait()


def test_a_pool_is_closed_though_its_server_does_not_end(
    pools: tuple[Pool, Pool], monkeypatch: pytest.MonkeyPatch
) -> None:
    def wait(server: zygote.ForkedServer, seconds: float = 0.0) -> None:
        server._connection.close()
        raise subprocess.TimeoutExpired("fork server", seconds)

    assert works(pools[0])
    with monkeypatch.context() as patched:
        patched.setattr(zygote.ForkedServer, "wait", wait)
        pools[0].close()


def test_a_socket_that_nobody_serves_gives_a_server_of_ones_own(pools: tuple[Pool, Pool], run: str) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as taken:
        taken.bind(f"\0fsdp-testing-{os.getuid()}-{run}")
        assert works(pools[0])
        assert parent(pools[0].server().pid) == os.getpid()


SCRIPT = """
import os, sys
from fsdp_testing.ranks.pool import Pool
sys.path.insert(0, {folder!r})
from small_programs import pid
pool = Pool()
pool.run = {run!r}
for line in sys.stdin:
    with pool.lend(2) as world:
        print(pool.server().pid, *world.execute(pid).values, flush=True)
"""


def test_no_process_outlives_workers_that_are_killed(run: str) -> None:
    def asked(worker: subprocess.Popen[str]) -> list[int]:
        assert worker.stdin is not None
        assert worker.stdout is not None
        print("go on", file=worker.stdin, flush=True)
        return [int(word) for word in worker.stdout.readline().split()]

    command = [sys.executable, "-c", SCRIPT.format(folder=str(Path(__file__).parent), run=run)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with (
        subprocess.Popen(command, text=True, **pipes) as first,
        subprocess.Popen(command, text=True, **pipes) as second,
    ):
        processes = [asked(worker) for worker in (first, second)]
        zygote = parent(processes[0][0])
        assert parent(processes[1][0]) == zygote
        first.kill()
        assert gone(processes[0])
        assert asked(second) == processes[1]
        second.kill()
        assert gone([*processes[1], zygote])


STARTS = """
import os, signal
from fsdp_testing.ranks.pool import zygote
from fsdp_testing.ranks.pool.server import ForkServer
began = zygote.subprocess.Popen
def start(*arguments, **named):
    with open({output!r}, "w") as file:
        file.write(str(began(*arguments, **named).pid))
    os.kill(os.getpid(), signal.SIGKILL)
zygote.subprocess.Popen = start
zygote.COMMAND = "from fsdp_testing.ranks.pool import zygote; zygote.PATIENCE = {patience}; zygote.main"
ForkServer({modules!r}, run={run!r})
"""


@pytest.mark.parametrize(("modules", "patience"), [((), 600.0), (("hangs",), 1.0)])
def test_a_zygote_whose_starter_is_killed_before_it_asks_ends(
    run: str, tmp_path: Path, modules: tuple[str, ...], patience: float
) -> None:
    (tmp_path / "hangs.py").write_text("import threading; threading.Event().wait()")
    output = tmp_path / "pid"
    script = STARTS.format(modules=modules, run=run, patience=patience, output=str(output))
    named = {**os.environ, "PYTHONPATH": str(tmp_path)}
    assert subprocess.run([sys.executable, "-c", script], check=False, env=named).returncode == -signal.SIGKILL
    assert gone([int(output.read_text())])
