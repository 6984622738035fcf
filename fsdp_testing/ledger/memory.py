"""Where is the ledger kept? In one shared-memory file per world, which outlives any rank.

One area per rank; only that rank writes it, everybody reads it:

    | header | group table: key, count, digest of all entries | per group: ring of the last entries | strings: descriptions, call sites |

An entry is (signature, number, epoch, description, call site, moment). The epoch counts jobs: entries of an earlier
job never match, so a rank may start a job before its peer has cleared the last one's entries. The file is sparse:
memory is used only for what was written. Peers read without a lock, so an entry may be seen half-written: a reader that
finds a difference looks again before it believes it, and what it misses the digests tell at the end of the job.
"""

from __future__ import annotations

import mmap
import os
import struct
from dataclasses import dataclass

GROUPS = 128
RING = 128
_COUNT = struct.Struct("<QQQ")
_PROGRESS = struct.Struct("<QQ")
_ENTRY = struct.Struct("<QQIIII")
_STRINGS_BYTES = 256 * 1024
_HEADER_BYTES = 128
_TABLE_BYTES = GROUPS * _COUNT.size
_RINGS_BYTES = GROUPS * RING * _ENTRY.size
AREA_BYTES = _HEADER_BYTES + _TABLE_BYTES + _RINGS_BYTES + _STRINGS_BYTES

_EPOCH = struct.Struct("<Q")
_WAITING = struct.Struct("<QQI")
_LENGTH = struct.Struct("<H")
_EPOCH_AT = 0
_GROUP_COUNT_AT = 8
_STRING_COUNT_AT = 16
_STRING_BYTES_AT = 24
_WAITING_AT = 32
_OVERFLOW_AT = 64
_U64 = struct.Struct("<Q")


@dataclass(frozen=True, slots=True)
class Entry:
    """One collective in a ring: 64-bit `signature`, `number` in its group from 1, string ids, monotonic moment."""

    signature: int
    moment_ns: int
    number: int
    epoch: int
    description: int
    call_site: int


@dataclass(frozen=True, slots=True)
class Waiting:
    """The blocking collective that a rank issued last: group key, number; `number` 0 means none."""

    group_key: int
    number: int


def create(size: int) -> int:
    """Make the shared memory of a world of `size` ranks; returns its descriptor (close-on-exec)."""
    descriptor = os.memfd_create("fsdp_testing-ledger", os.MFD_CLOEXEC)
    os.ftruncate(descriptor, max(1, size) * AREA_BYTES)
    return descriptor


class LedgerMemory:
    """All areas of one world, mapped."""

    def __init__(self, descriptor: int, size: int) -> None:
        self.size = size
        self._map = mmap.mmap(descriptor, max(1, size) * AREA_BYTES)
        self.areas = tuple(Area(self._map, rank * AREA_BYTES) for rank in range(max(1, size)))

    def close(self) -> None:
        """Unmap; areas are unusable afterwards."""
        self._map.close()


class Area:
    """One rank's part. Methods named `put_*` and `start_job` are for that rank alone."""

    def __init__(self, memory: mmap.mmap, base: int) -> None:
        self._map = memory
        self._base = base
        self._table = base + _HEADER_BYTES
        self._rings = self._table + _TABLE_BYTES
        self._strings = self._rings + _RINGS_BYTES

    # Written by the owner

    def start_job(self, epoch: int) -> None:
        """Forget the groups of the last job; strings stay, their ids are cached by the owner."""
        _U64.pack_into(self._map, self._base + _GROUP_COUNT_AT, 0)
        _WAITING.pack_into(self._map, self._base + _WAITING_AT, 0, 0, 0)
        _U64.pack_into(self._map, self._base + _OVERFLOW_AT, 0)
        _EPOCH.pack_into(self._map, self._base + _EPOCH_AT, epoch)

    def put_group(self, key: int) -> int | None:
        """Take the next slot of the group table for `key`; None when the table is full."""
        (slot,) = _U64.unpack_from(self._map, self._base + _GROUP_COUNT_AT)
        if slot >= GROUPS:
            (lost,) = _U64.unpack_from(self._map, self._base + _OVERFLOW_AT)
            _U64.pack_into(self._map, self._base + _OVERFLOW_AT, lost + 1)
            return None
        _COUNT.pack_into(self._map, self._table + slot * _COUNT.size, key, 0, 0)
        _U64.pack_into(self._map, self._base + _GROUP_COUNT_AT, slot + 1)
        return int(slot)

    def put_entry(self, slot: int, entry: tuple[int, int, int, int, int, int], digest: int) -> None:
        """Write `entry` (fields of `Entry` in order) into its group's ring, then the group's count and digest."""
        number = entry[2]
        at = self._rings + (slot * RING + number % RING) * _ENTRY.size
        _ENTRY.pack_into(self._map, at, *entry)
        _PROGRESS.pack_into(self._map, self._table + slot * _COUNT.size + 8, number, digest)

    def put_waiting(self, key: int, number: int) -> None:
        """Say that the owner is about to block in collective `number` of group `key` until every member joins."""
        _WAITING.pack_into(self._map, self._base + _WAITING_AT, key, number, 1)

    def put_string(self, text: str) -> int:
        """Append a description or call site; returns its id, 0 when there is no more room (id 0 reads as '?')."""
        (used,) = _U64.unpack_from(self._map, self._base + _STRING_BYTES_AT)
        (count,) = _U64.unpack_from(self._map, self._base + _STRING_COUNT_AT)
        data = text.encode("utf-8", "replace")[:1000]
        if used + len(data) + _LENGTH.size > _STRINGS_BYTES:
            return 0
        at = self._strings + used
        _LENGTH.pack_into(self._map, at, len(data))
        self._map[at + _LENGTH.size : at + _LENGTH.size + len(data)] = data
        _U64.pack_into(self._map, self._base + _STRING_BYTES_AT, used + _LENGTH.size + len(data))
        _U64.pack_into(self._map, self._base + _STRING_COUNT_AT, count + 1)
        return int(count) + 1

    # Read by anyone

    def epoch(self) -> int:
        """Number of the job whose entries the area holds."""
        return int(_EPOCH.unpack_from(self._map, self._base + _EPOCH_AT)[0])

    def uncompared(self) -> int:
        """How many groups found no room in the table during this job; their collectives were not recorded."""
        return int(_U64.unpack_from(self._map, self._base + _OVERFLOW_AT)[0])

    def groups(self) -> list[tuple[int, int, int]]:
        """(key, collectives issued, digest) of every group that the owner has used in this job, by first use."""
        (count,) = _U64.unpack_from(self._map, self._base + _GROUP_COUNT_AT)
        return [_COUNT.unpack_from(self._map, self._table + slot * _COUNT.size) for slot in range(count)]

    def slot_of(self, key: int) -> int | None:
        """The slot of group `key`, if the owner has used the group in this job."""
        (count,) = _U64.unpack_from(self._map, self._base + _GROUP_COUNT_AT)
        for slot in range(count):
            if _U64.unpack_from(self._map, self._table + slot * _COUNT.size)[0] == key:
                return slot
        return None

    def issued(self, key: int) -> int:
        """How many collectives of group `key` the owner has issued in this job."""
        slot = self.slot_of(key)
        return 0 if slot is None else int(_U64.unpack_from(self._map, self._table + slot * _COUNT.size + 8)[0])

    def entry_fields(self, slot: int, number: int) -> tuple[int, int, int, int, int, int]:
        """The fields at ring position `number` of a group, whatever they hold: check epoch and number."""
        return _ENTRY.unpack_from(self._map, self._rings + (slot * RING + number % RING) * _ENTRY.size)  # type: ignore[return-value]  # struct gives tuple[Any, ...]

    def entry(self, slot: int, number: int) -> Entry | None:
        """Collective `number` of the group in `slot`, if it was issued in this job and is still in the ring."""
        entry = Entry(*self.entry_fields(slot, number))
        return entry if entry.number == number and entry.epoch == self.epoch() & 0xFFFFFFFF else None

    def waiting(self) -> Waiting | None:
        """The blocking collective issued last in this job."""
        key, number, is_set = _WAITING.unpack_from(self._map, self._base + _WAITING_AT)
        return Waiting(key, number) if is_set else None

    def strings(self) -> list[str]:
        """All strings of the owner; index is the id, 0 is '?'."""
        texts = ["?"]
        (count,) = _U64.unpack_from(self._map, self._base + _STRING_COUNT_AT)
        at = self._strings
        for _ in range(count):
            (length,) = _LENGTH.unpack_from(self._map, at)
            at += _LENGTH.size
            texts.append(self._map[at : at + length].decode("utf-8", "replace"))
            at += length
        return texts
