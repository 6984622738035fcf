"""The store in which the ranks of a world meet, hidden from other users of this machine: a memory file without a name.

torch's own store listens on a port of the loopback address: every user of the machine can connect to it, list its keys, read
and write them. This store is a log in a memory file, and only the controller's children hold its descriptor. Each rank keeps
what it has read. torch's `FileStore` could use the same file, but polls it only a hundred times a second; here the kernel
wakes a waiting rank.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import platform
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch.distributed as dist

_HEADER = struct.Struct("<Ii")
_REMOVED = -1
# The file begins with the number of writes.
_COUNTER_BYTES = 8
_FUTEX = {"x86_64": 202, "aarch64": 98}.get(platform.machine())
_WAIT, _WAKE, _EVERYBODY = 0, 1, 0x7FFFFFFF
# A waiting rank polls this often, woken or not; if the system call's number is unknown, it only polls.
_LONGEST_PAUSE = 0.25 if _FUTEX is not None else 1e-3


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class PrivateStore(dist.Store):
    """A store of `torch.distributed` in the file behind `descriptor`; one object per process, which must outlive its groups.

    A file lock keeps writers apart, and readers from half-written data. It is released when its rank dies.
    """

    def __init__(self, descriptor: int) -> None:
        super().__init__()
        # Opened again: a lock belongs to the open file, which ranks would share through the inherited descriptor.
        self._file = os.open(f"/proc/self/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC)
        os.posix_fallocate(self._file, 0, _COUNTER_BYTES)  # if several ranks do this, each finds what it needs
        self._writes = ctypes.c_uint32.from_buffer(mmap.mmap(self._file, _COUNTER_BYTES))
        self._call_kernel = ctypes.CDLL(None).syscall
        self._values: dict[str, bytes] = {}
        self._read = _COUNTER_BYTES
        self._threads = threading.Lock()

    def set(self, key: str, value: str | bytes) -> None:
        """Write a value."""
        with self._locked(fcntl.LOCK_EX):
            self._append(key, _bytes(value))

    def get(self, key: str) -> bytes:
        """Return a value, once a rank has written it."""
        self.wait([key])
        return self._values[key]

    def add(self, key: str, amount: int) -> int:
        """Add to a number, by default 0, and return the sum."""
        with self._locked(fcntl.LOCK_EX):
            total = int(self._values.get(key, b"0")) + amount
            self._append(key, str(total).encode())
        return total

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        """Write `desired` if the value is `expected`, or if there is none and none is expected; return the value after that."""
        with self._locked(fcntl.LOCK_EX):
            there = self._values.get(key)
            if there == _bytes(expected) or (there is None and not expected):
                self._append(key, _bytes(desired))
            return self._values.get(key, _bytes(expected))

    def append(self, key: str, value: str | bytes) -> None:
        """Append to a value."""
        with self._locked(fcntl.LOCK_EX):
            self._append(key, self._values.get(key, b"") + _bytes(value))

    def delete_key(self, key: str) -> bool:
        """Remove a value; returns whether there was one."""
        with self._locked(fcntl.LOCK_EX):
            there = key in self._values
            if there:
                self._append(key, None)
        return there

    deleteKey = delete_key  # noqa: N815 - the name by which C++ asks

    def num_keys(self) -> int:
        """Return the number of values."""
        self._catch_up()
        return len(self._values)

    getNumKeys = num_keys  # noqa: N815 - as above

    def list_keys(self) -> list[str]:
        """Return the names of all values."""
        self._catch_up()
        return list(self._values)

    def check(self, keys: list[str]) -> bool:
        """Return whether all exist."""
        self._catch_up()
        return all(key in self._values for key in keys)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        """Return several values, once all exist."""
        self.wait(keys)
        return [self._values[key] for key in keys]

    def multi_set(self, keys: list[str], values: list[str | bytes]) -> None:
        """Write several values."""
        with self._locked(fcntl.LOCK_EX):
            for key, value in zip(keys, values, strict=True):
                self._append(key, _bytes(value))

    def has_extended_api(self) -> bool:
        """Return whether `append`, `multi_get` and `multi_set` are supported."""
        return True

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Wait until all exist.

        Raises:
            DistStoreError: Some do not exist in time; the default is the store's timeout.
        """
        allowed = self.timeout if timeout is None else timeout  # type: ignore[attr-defined]  # of the base class
        limit = time.monotonic() + allowed.total_seconds()
        while True:
            # Read the count before checking: a write in between changes it, and with an old count the kernel does not sleep.
            writes = self._writes.value
            if self.check(keys):
                return
            left = limit - time.monotonic()
            if left <= 0:
                missing = ", ".join(key for key in keys if key not in self._values)
                raise dist.DistStoreError(f"wait timeout after {allowed.total_seconds():g} s, keys: {missing}")
            self._sleep(writes, min(left, _LONGEST_PAUSE))

    def _sleep(self, writes: int, seconds: float) -> None:
        """Sleep until the next write; return at once if there are more than `writes` already."""
        if _FUTEX is None:
            time.sleep(seconds)
            return
        pause = _Timespec(0, int(seconds * 1e9))
        self._call_kernel(_FUTEX, ctypes.byref(self._writes), _WAIT, writes, ctypes.byref(pause), None, 0)

    def _catch_up(self) -> None:
        if os.fstat(self._file).st_size != self._read:
            with self._locked(fcntl.LOCK_SH):
                pass

    @contextmanager
    def _locked(self, kind: int) -> Iterator[None]:
        """Lock the file, and read all that others wrote."""
        with self._threads:
            fcntl.flock(self._file, kind)
            try:
                self._take_in(os.pread(self._file, os.fstat(self._file).st_size - self._read, self._read))
                yield
            finally:
                fcntl.flock(self._file, fcntl.LOCK_UN)

    def _take_in(self, data: bytes) -> None:
        at = 0
        while at < len(data):
            key_length, length = _HEADER.unpack_from(data, at)
            at += _HEADER.size
            key = data[at : at + key_length].decode()
            at += key_length
            if length == _REMOVED:
                self._values.pop(key, None)
            else:
                self._values[key] = data[at : at + length]
                at += length
        self._read += len(data)

    def _append(self, key: str, value: bytes | None) -> None:
        name = key.encode()
        record = _HEADER.pack(len(name), _REMOVED if value is None else len(value)) + name + (value or b"")
        os.pwrite(self._file, record, self._read)
        self._take_in(record)
        # After the record: whoever this wakes finds it.
        self._writes.value += 1
        if _FUTEX is not None:
            self._call_kernel(_FUTEX, ctypes.byref(self._writes), _WAKE, _EVERYBODY, None, None, 0)


def _bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)
