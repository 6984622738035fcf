"""Devices are lent to one world at a time, come back when their holder dies, and nobody in the queue is overtaken."""

from __future__ import annotations

import importlib
import os
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import pytest

from fsdp_testing.errors import PoolBroken
from fsdp_testing.ranks.pool import Pool, PooledWorld, controller
from fsdp_testing.ranks.pool.device_slots import DeviceSlots

HOLDER = """
import sys
from pathlib import Path
from fsdp_testing.ranks.pool.device_slots import DeviceSlots
lease = DeviceSlots(Path(sys.argv[1]), 4).take(3, 30.0)
print(*lease.devices, flush=True)
sys.stdin.read()
"""


def test_devices_of_a_killed_process_are_free_again(tmp_path: Path) -> None:
    slots = DeviceSlots(tmp_path / "slots", 4)
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path / "slots")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as holder:
        assert holder.stdout is not None
        taken = {int(word) for word in holder.stdout.readline().split()}
        assert len(taken) == 3
        mine = slots.take(1, 30.0)
        assert not taken & set(mine.devices)
        with pytest.raises(PoolBroken, match="expected 2 of 4 devices to become free within 0 s, got 0"):
            slots.take(2, 0.0)
        os.kill(holder.pid, signal.SIGKILL)
        theirs = slots.take(3, 60.0)
    assert set(theirs.devices) == taken
    theirs.release()
    theirs.release()
    mine.release()
    assert slots.take(9, 0.0).devices == (0, 1, 2, 3)


def test_who_waits_is_known_and_served_first(tmp_path: Path) -> None:
    slots = DeviceSlots(tmp_path, 2)
    first = slots.take(1, 0.0)
    assert not slots.awaited()
    got: list[tuple[int, ...]] = []
    waiter = threading.Thread(target=lambda: got.append(DeviceSlots(tmp_path, 2).take(2, 60.0).devices))
    waiter.start()
    while not slots.awaited() and waiter.is_alive():
        pass
    with pytest.raises(PoolBroken):
        slots.take(1, 0.0)  # one is free, but not for who came later
    first.release()
    waiter.join(60.0)
    assert got == [(0, 1)]


def test_a_directory_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getuid", lambda: 4242)
    with pytest.raises(PoolBroken, match=f"expected {tmp_path} to be a directory of user 4242"):
        DeviceSlots(tmp_path, 1)


BACKEND = """
import os
from fsdp_testing.base.backends import Backend, register_backend


def prepare(place):
    os.environ["DEVICE"] = str(place.device_index)


def device():
    return int(os.environ["DEVICE"])


register_backend(Backend("four-devices", "cpu", lambda size: None, "gloo", prepare=prepare, device_count=lambda: 4))
"""


def test_worlds_of_two_workers_have_different_devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two pools stand for two workers; ranks learn their device from the backend, as those of nccl do."""
    (tmp_path / "four_devices.py").write_text(BACKEND)
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.import_module("four_devices")
    monkeypatch.setenv("PYTEST_XDIST_WORKER", "gw0")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    mine, other = Pool(("four_devices",)), Pool(("four_devices",))

    def devices_of(world: PooledWorld) -> list[int]:
        return world.execute("four_devices:device").values

    try:
        small = mine.world(1, "four-devices")
        large = other.world(3, "four-devices")
        assert devices_of(small) == [0]
        assert devices_of(large) == [1, 2, 3]
        large.release()
        # Kept, as nobody waits; and taken apart for a larger world of the same worker.
        assert len(other.worlds()) == 1
        monkeypatch.setattr(controller, "_DEVICE_SECONDS", 0.0)
        with pytest.raises(PoolBroken, match="expected 4 of 4 devices to become free within 0 s, got 3"):
            other.world(4, "four-devices")
        assert other.worlds() == ()
        monkeypatch.setattr(controller, "_DEVICE_SECONDS", 60.0)
        slots = DeviceSlots(tmp_path / f"fsdp-testing-devices-{os.getuid()}-4_5_6_7", 4)
        got: list[list[int]] = []

        def use_all() -> None:
            world = other.world(4, "four-devices")
            got.append(devices_of(world))
            world.release()

        waiter = threading.Thread(target=use_all)
        waiter.start()
        while not slots.awaited() and waiter.is_alive():
            pass
        small.release()
        waiter.join(120.0)
        assert got == [[0, 1, 2, 3]]
    finally:
        mine.close()
        other.close()
