"""Lends devices to the worlds of a user's pytest-xdist workers, so that no two worlds use the same device.

A device is a file that its holder has locked. The kernel releases the lock when the holder's process ends, so no device is
lost. Workers queue for all of a world's devices: the first in the queue waits for as many as it needs, and no worker
overtakes it.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field
from pathlib import Path

from fsdp_testing.errors import PoolBroken

_POLL_SECONDS = 0.05


@dataclass(slots=True)
class Lease:
    """Devices that one world has for itself until `release`."""

    devices: tuple[int, ...]
    _locks: list[int] = field(default_factory=list)

    def release(self) -> None:
        """Give the devices back; safe to call twice."""
        locks, self._locks = self._locks, []
        for lock in locks:
            os.close(lock)


class DeviceSlots:
    """The devices of one machine, as the processes that share `folder` lend them to worlds.

    Args:
        folder: A directory of this user; made if missing. Its empty files stay: removing one would lend its device twice.
        count: Number of devices.
    """

    def __init__(self, folder: Path, count: int) -> None:
        self.count = count
        self._folder = folder
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        owner = folder.lstat().st_uid
        if owner != os.getuid():
            raise PoolBroken(
                f"devices: expected {folder} to be a directory of user {os.getuid()}, got one of user {owner}. "
                "Remove it, or set TMPDIR to a directory of your own."
            )

    def take(self, size: int, seconds: float) -> Lease:
        """Wait until `size` devices are free, and take them.

        Args:
            size: Number of devices; if there are fewer, all of them, which the world's ranks then share.
            seconds: How long to wait.

        Raises:
            PoolBroken: They were not free in time; says how many were.
        """
        wanted, limit = min(size, self.count), time.monotonic() + seconds
        queue = self._lock("queue", limit)
        locks: dict[int, int] = {}
        try:
            while queue is not None:
                self._take_free(locks, wanted)
                if len(locks) == wanted:
                    lease, locks = Lease(tuple(sorted(locks)), list(locks.values())), {}
                    return lease
                if time.monotonic() >= limit:
                    break
                time.sleep(_POLL_SECONDS)
            raise PoolBroken(
                f"devices: expected {wanted} of {self.count} devices to become free within {seconds:g} s, got {len(locks)}. "
                "Other workers of pytest-xdist hold the rest; start fewer (-n), or ask for smaller worlds."
            )
        finally:
            for lock in (*locks.values(), *([queue] if queue is not None else [])):
                os.close(lock)

    def _take_free(self, locks: dict[int, int], wanted: int) -> None:
        for device in range(self.count):
            if device not in locks and len(locks) < wanted:
                lock = self._try(f"device-{device}")
                locks.update({} if lock is None else {device: lock})

    def awaited(self) -> bool:
        """Return whether a process waits for devices: then idle worlds end instead of being kept."""
        lock = self._try("queue")
        if lock is not None:
            os.close(lock)
        return lock is None

    def _try(self, name: str) -> int | None:
        import fcntl  # systems without it have no ranks

        descriptor = os.open(self._folder / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            return None
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor

    def _lock(self, name: str, limit: float) -> int | None:
        while (lock := self._try(name)) is None and time.monotonic() < limit:
            time.sleep(_POLL_SECONDS)
        return lock
