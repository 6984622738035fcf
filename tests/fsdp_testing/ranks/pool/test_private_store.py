"""Ranks meet where nobody else can: not by a port of the machine, and not by a file with a name."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fsdp_testing.ranks.pool import Pool
from fsdp_testing.ranks.pool.private_store import PrivateStore
from fsdp_testing.ranks.pool.processes import memory_file


@pytest.fixture
def stores() -> Iterator[list[PrivateStore]]:
    """Two ranks' views of one store."""
    descriptor = memory_file("store")
    yield [PrivateStore(descriptor) for _ in range(2)]
    os.close(descriptor)


def test_what_one_writes_the_other_reads(stores: list[PrivateStore]) -> None:
    mine, theirs = stores
    mine.set("a", "text")
    assert theirs.get("a") == b"text"
    theirs.set("b", b"\x00\xff")
    assert mine.get("b") == b"\x00\xff"
    assert [mine.add("n", 2), theirs.add("n", 3), mine.add("n", -1)] == [2, 5, 4]
    assert theirs.get("n") == b"4"
    mine.append("a", b"!")
    assert theirs.multi_get(["a", "b"]) == [b"text!", b"\x00\xff"]
    theirs.multi_set(["x", "y"], ["1", b"2"])
    assert mine.check(["x", "y"])
    assert not mine.check(["x", "z"])
    assert sorted(mine.list_keys()) == ["a", "b", "n", "x", "y"]
    assert theirs.num_keys() == 5
    assert mine.delete_key("x")
    assert not theirs.delete_key("x")
    assert not theirs.check(["x"])
    theirs.set("x", "again")
    assert mine.get("x") == b"again"


@pytest.mark.parametrize(
    ("there", "expected", "desired"),
    [(None, "", "n"), (None, "e", "n"), ("e", "e", "n"), ("o", "e", "n"), ("", "", "n")],
)
def test_compare_set_is_that_of_torch(
    there: str | None, expected: str, desired: str, stores: list[PrivateStore]
) -> None:
    model = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for store in (model, stores[0]):
        if there is not None:
            store.set("k", there)
    assert stores[1].compare_set("k", expected, desired) == model.compare_set("k", expected, desired)
    assert stores[0].check(["k"]) == model.check(["k"])


def test_through_the_classes_of_torch(stores: list[PrivateStore]) -> None:
    """C++ asks by other names, and hands values over in its own way."""
    mine, theirs = (dist.PrefixStore("inner", dist.PrefixStore("outer", store)) for store in stores)
    mine.set("a", "text")
    assert theirs.get("a") == b"text"
    assert theirs.add("n", 5) == 5
    mine.append("a", "!")
    assert theirs.multi_get(["a", "n"]) == [b"text!", b"5"]
    theirs.multi_set(["x"], ["1"])
    assert mine.check(["x"])
    assert mine.num_keys() == 3
    assert mine.delete_key("x")
    assert theirs.compare_set("c", "", "new") == b"new"
    assert theirs.has_extended_api()
    with pytest.raises(dist.DistStoreError, match=r"wait timeout after 0\.01 s, keys: .*never"):
        mine.wait(["a", "never"], timedelta(seconds=0.01))


def test_who_waits_is_woken(stores: list[PrivateStore]) -> None:
    mine, theirs = stores
    got: list[bytes] = []
    waiting = threading.Thread(target=lambda: got.append(theirs.get("late")))
    waiting.start()
    mine.set("other", "1")
    mine.set("late", "2")
    waiting.join(10.0)
    assert got == [b"2"]


def test_many_write_at_once_and_nothing_is_lost(pool: Pool) -> None:
    outcome = pool.world(3, isolation="fresh")
    try:
        ended = outcome.execute(count_together, (200,))
    finally:
        outcome.release()
    assert ended.ok, ended.describe()
    assert sorted(number for numbers in ended.values for number in numbers) == list(range(1, 601))


def count_together(times: int) -> list[int]:
    store = dist.distributed_c10d._get_default_store()
    return [store.add("counted", 1) for _ in range(times)]


def pids_and_store() -> tuple[int, str, int]:
    total = torch.ones(2)
    dist.all_reduce(total)
    return os.getpid(), type(dist.distributed_c10d._get_default_store()).__name__, int(total.sum())


def listening_ports(pid: int) -> list[int]:
    """Ports on which a process waits for connections."""
    sockets = set()
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        sockets.add(os.readlink(entry))
    ports = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in sockets:
                ports.append(int(fields[1].rpartition(":")[2], 16))
    return sorted(ports)


# What anybody on the machine may try: ask each port as torch asks a store, and list what the ranks have open.
INTRUDER = """
import json, os, socket, struct, sys
ports, pids = json.loads(sys.argv[1])
if os.geteuid() == 0:  # only now: another user may not be able to read what has to be imported
    os.setgroups([]), os.setgid(65534), os.setuid(65534)
# torch's store: query VALIDATE with its magic number, query PING with a number that comes back.
ping = struct.pack("<BIBI", 0, 0x3C85F7CE, 13, 77)
answered, connected, opened = [], [], []
for port in ports:
    with socket.socket() as sock:
        sock.settimeout(2)
        if sock.connect_ex(("127.0.0.1", port)) == 0:
            connected.append(port)
            try:
                sock.sendall(ping)
                if sock.recv(4) == struct.pack("<I", 77):
                    answered.append(port)
            except OSError:
                pass
for pid in pids:
    try:
        opened += [pid, *os.listdir(f"/proc/{pid}/fd")]
    except PermissionError:
        pass
print(json.dumps([os.geteuid(), answered, connected, opened]))
"""


def intrude(ports: list[int], pids: list[int]) -> Any:
    """Have another user try, where this process may become one; else this user."""
    done = subprocess.run(
        [sys.executable, "-c", INTRUDER, json.dumps([ports, pids])],
        capture_output=True,
        text=True,
        cwd="/",
        check=False,
        timeout=120,
        env={**os.environ, "HOME": "/", "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_no_other_user_reads_or_writes_the_store_of_a_world(pool: Pool) -> None:
    world = pool.world(2, isolation="fresh")
    try:
        outcome = world.execute(pids_and_store)
        assert outcome.ok, outcome.describe()
        pids = [pid for pid, _, _ in outcome.values]
        ports = [port for pid in pids for port in listening_ports(pid)]
        torchs = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        user, answered, connected, opened = intrude([*ports, torchs.port], pids)
        if os.geteuid() == 0:
            assert user != os.geteuid()
            assert opened == [], "another user cannot list what a rank has open"
        assert answered == [torchs.port], "of the world's ports none answers as torch's own store does"
        # What torch leaves open: gloo's own ports take connections. docs/pool.md says so.
        assert connected == [*ports, torchs.port]
        assert len(ports) <= 2, "gloo's alone, one for each rank"
        again = world.execute(pids_and_store)
        assert again.ok, again.describe()
        assert [total for _, _, total in again.values] == [4, 4]
    finally:
        world.release()


def joins_as_under_torchrun() -> tuple[int, int]:
    dist.init_process_group("gloo")
    total = torch.ones(2)
    dist.all_reduce(total)
    dist.destroy_process_group()
    return int(total.sum()), int(os.environ["MASTER_PORT"]) > 0


def test_code_that_makes_its_own_group_finds_a_store_where_torchrun_has_it(pool: Pool) -> None:
    world = pool.world(2, "bare")
    try:
        outcome = world.execute(joins_as_under_torchrun, lasting=None)
    finally:
        world.release()
    assert outcome.ok, outcome.describe()
    assert outcome.values == [(4, True), (4, True)]
