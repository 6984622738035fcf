"""Ranks of one world on several hosts: the same verdicts as on one, and the loss of a host is none about the code."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import host_programs
import pytest
import torch.distributed as dist

from fsdp_testing.base.env import Launch
from fsdp_testing.errors import PoolBroken
from fsdp_testing.ranks.pool import Fate, Pool, WorldOutcome
from fsdp_testing.ranks.pool.channel import readable
from fsdp_testing.ranks.pool.hosts import Host, Hosts, Place, interface_of
from fsdp_testing.ranks.pool.serving import gathered, serve
from fsdp_testing.ranks.pool.supervision import _JOIN_SECONDS

SERVE = """
from fsdp_testing.base import env
from fsdp_testing.ranks.pool import Pool
from fsdp_testing.ranks.pool.serving import serve
serve(env.launched(), Pool())
"""
SOON = timedelta(seconds=0.5)


def run(
    pool: Pool, size: int, function: Callable[..., Any], *args: object, timeout: float | None = 60.0
) -> WorldOutcome:
    world = pool.world(size)
    try:
        return world.execute(function, args, timeout=timeout, name="the check")
    finally:
        world.release()


@pytest.fixture
def store() -> dist.TCPStore:
    """Stands for the one that torchrun's agent keeps."""
    return dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False, multi_tenant=True)


def launch(store: dist.TCPStore, rank: int, **more: object) -> Launch:
    return Launch(rank, 2, rank, 2, "127.0.0.1", store.port, store_is_there=True, **more)  # type: ignore[arg-type]


@pytest.fixture
def serving(store: dist.TCPStore) -> Iterator[subprocess.Popen[str]]:
    variables = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "GROUP_RANK": "7", "MASTER_ADDR": "127.0.0.1"}
    variables |= {"MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    paths = os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)])
    environment = {**os.environ, **variables, "PYTHONPATH": paths}
    process = subprocess.Popen([sys.executable, "-c", SERVE], env=environment, stderr=subprocess.PIPE, text=True)
    yield process
    process.kill()
    process.communicate()


def test_a_world_of_two_hosts(store: dist.TCPStore, serving: subprocess.Popen[str]) -> None:
    pool = Pool()
    with gathered(launch(store, 0), pool) as hosts:
        first = run(pool, 3, host_programs.where, 5)
        assert first.ok, first.describe()
        ranks, sums, parents = zip(*first.values, strict=True)
        assert ranks == (0, 1, 2)
        assert sums == (15.0,) * 3
        assert parents[0] == parents[1] != parents[2]
        assert [rank.stdout for rank in first.ranks] == ["rank 0\n", "rank 1\n", "rank 2\n"]
        (kept,) = pool.worlds()
        run(pool, 3, host_programs.where, 1)
        assert pool.worlds() == (kept,)
        # Digests are compared when both have ended: across hosts nobody sees the other's ledger before.
        other = run(pool, 3, host_programs.reduce_otherwise)
        assert "ranks disagree: collective #1 of the default group differs" in other.cause

        died = run(pool, 2, host_programs.die_on, 1)
        assert died.ranks[1].fate is Fate.DIED
        assert died.cause.startswith("rank 1 died by SIGKILL")
        hung = run(pool, 2, host_programs.hang_on, 1, timeout=2.0)
        assert [rank.fate for rank in hung.ranks] == [Fate.HUNG, Fate.HUNG]
        assert "(rank 1 is behind the others)" in hung.cause
        assert "hang_on" in hung.ranks[1].stack
        early = run(pool, 2, host_programs.return_early, 1)
        assert "waits in all_reduce(sum) #1" in early.cause
        assert "rank 1 returned" in early.cause

        made = pool.shared_directory("fsdp-test-")
        assert hosts.blind_to(made) == ()
        Path(made).rmdir()
        assert hosts.blind_to(made) == (str(hosts.others[0].place),)

        # Who does not know the token is not heard.
        place = hosts.others[0].place
        with socket.create_connection((place.address, place.port)) as stranger:
            stranger.sendall(bytes(32))
            with suppress(ConnectionResetError):
                assert stranger.recv(1) == b""
        assert run(pool, 2, host_programs.where, 2).ok
    assert serving.wait(60) == 0


def test_a_host_that_vanishes_is_named_and_nothing_is_judged(
    store: dist.TCPStore, serving: subprocess.Popen[str]
) -> None:
    pool = Pool()
    with gathered(launch(store, 0), pool) as hosts:
        assert run(pool, 2, host_programs.where, 1).ok
        with pytest.raises(PoolBroken) as lost:
            run(pool, 2, host_programs.kill_on, 1, serving.pid)
        assert str(lost.value).startswith("the check: rank 1 was lost with process 1 of the launcher on host")
        assert "node 7" in str(lost.value)
        assert [host.lost for host in hosts.others] == [True]
        for size in (1, 2):
            with pytest.raises(PoolBroken, match="vanished"):
                pool.world(size)
    assert serving.wait(60) == -signal.SIGKILL


@pytest.mark.parametrize("news", ["joined", "died"])
def test_what_a_rank_says_before_it_is_watched_is_heard(
    store: dist.TCPStore, serving: subprocess.Popen[str], news: str
) -> None:
    """On a busy machine the controlling process comes to watch a new world long after its ranks have said something."""
    pool = Pool()
    with gathered(launch(store, 0), pool):
        world = pool.world(2)
        remote = world._processes[1]
        if news == "died":
            os.kill(remote.pid, signal.SIGKILL)
        assert readable(remote.channel.fileno(), 60.0)
        while news == "died" and not remote.channel.closed and remote.read_exit() is None:
            assert readable(remote.channel.fileno(), 60.0)
            remote.channel.pump()  # type: ignore[union-attr]  # of a rank on another host
        outcome = world.execute(host_programs.where, (1,), name="the check")
        said = outcome.describe()
        assert outcome.ok if news == "joined" else "rank 1 died by SIGKILL before it began" in said, said
        assert outcome.seconds < _JOIN_SECONDS, "it was heard at the deadline only"
        world.release()
    assert serving.wait(60) == 0


def test_the_launchers_signal_ends_no_report(store: dist.TCPStore, serving: subprocess.Popen[str]) -> None:
    before = signal.getsignal(signal.SIGTERM)
    pool = Pool()
    with gathered(launch(store, 0), pool):
        with pytest.raises(PoolBroken, match=r"ended this run \(SIGTERM\)"):
            pytest.fail(run(pool, 2, host_programs.kill_on, 0, os.getpid(), signal.SIGTERM, timeout=None).describe())
        with pytest.raises(PoolBroken, match=r"ended this run \(SIGTERM\)"):
            pool.world(1)
    assert signal.getsignal(signal.SIGTERM) is before
    assert serving.wait(60) == 0


def test_a_process_that_never_comes_is_named(store: dist.TCPStore) -> None:
    with (
        pytest.raises(PoolBroken, match=r"expected all 2 processes within 0 s, got nothing from process\(es\) 1"),
        gathered(launch(store, 0, attempt="1"), Pool(), SOON),
    ):
        pass
    with pytest.raises(PoolBroken, match="expected process 0 to take control within 0 s"):
        serve(launch(store, 1, attempt="2"), Pool(), SOON)
    gone = Launch(1, 2, 1, 2, "127.0.0.1", 1, store_is_there=True)
    with pytest.raises(PoolBroken, match="expected a store at 127.0.0.1:1"):
        serve(gone, Pool(), SOON)


def test_who_forks_which_rank() -> None:
    places = [Place(number, f"machine{number // 2}", "", "127.0.0.1", 0, 4) for number in range(4)]
    others = tuple(Host(place, b"", None) for place in places[1:])  # type: ignore[arg-type]
    hosts = Hosts(places[0], others)

    def numbers(size: int, turn: int) -> list[int]:
        return [0 if host is None else host.place.number for host in hosts.layout(size, turn)]

    assert numbers(4, 3) == [0, 1, 2, 3]
    assert numbers(6, 3) == [0, 0, 1, 2, 2, 3]
    assert numbers(2, 0) == [0, 2]
    assert numbers(2, 1) == [1, 3]
    assert [numbers(1, turn) for turn in range(5)] == [[0], [1], [2], [3], [0]]
    assert hosts.processors == 8
    assert hosts.describe() == "4 processes of the launcher (2 on machine0, 2 on machine1)"
    assert interface_of("127.0.0.2") == "lo"
    assert interface_of("203.0.113.1") == ""
