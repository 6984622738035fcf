"""The ledger's memory: one shared-memory file per world, which outlives any rank.

One area per rank; only that rank writes it, everybody reads it:

    | header | group table: key, count, digest of all entries | per group: ring of the last entries | strings |

and one fence for the whole world, behind the last area.

Header, in words of 8 bytes: epoch, groups used, strings, bytes of strings, waiting group, waiting meta, groups without
room, collectives refused, stamp of the collective that torch is being asked for, the same once its rank insists on it.
The epoch counts jobs: entries of an earlier job never match, so a rank may start a job before its peer has cleared
the last one's entries. The file is sparse: memory is used only for what was written.

Peers read without a lock, so every record is written in an order that shows a half-written one: an entry has its
stamp (number and epoch) first and last, and the meta word of a wait is cleared before its group changes. Aligned words are
stored whole. No processor promises in which order they arrive, so every decision crosses the fence
(`ledger.fence`): between writing and comparing, between the contents of a table and its length, between emptying the tables
and the new epoch. Readers may see part of what an owner wrote since its last crossing. They look again after a millisecond, ten
thousand times as long as a store takes.
"""

from __future__ import annotations

import mmap
import os
import struct
from dataclasses import dataclass

from fsdp_testing.ranks.ledger import fence
from fsdp_testing.ranks.ledger.fence import Fence

GROUPS = 1024
RING = 128
_WORD = 8
# Stamp, signature, moment, description, call site, stamp: if the first and last words differ, the entry is half-written.
_ENTRY = struct.Struct("<QQQIIQ")
_PROGRESS = struct.Struct("<QQ")
_LENGTH = struct.Struct("<H")
ENTRY_WORDS = _ENTRY.size // _WORD
_TABLE_WORDS = 3
_STRINGS_BYTES = 256 * 1024
_HEADER_BYTES = 128
_TABLE_BYTES = GROUPS * _TABLE_WORDS * _WORD
_RINGS_BYTES = GROUPS * RING * _ENTRY.size
AREA_BYTES = _HEADER_BYTES + _TABLE_BYTES + _RINGS_BYTES + _STRINGS_BYTES

_EPOCH, _GROUPS_USED, _STRINGS, _STRING_BYTES, _WAIT_GROUP, _WAIT_META, _OVERFLOW, _REFUSED, _INSIDE, _MEANT = range(10)
_LONGEST_TEXT = 1000
NUMBER_BITS = 32
ANYBODY = 0xFFFF


@dataclass(frozen=True, slots=True)
class Entry:
    """One collective in a ring: 64-bit `signature`, monotonic moment, string ids."""

    signature: int
    moment_ns: int
    description: int
    call_site: int


@dataclass(frozen=True, slots=True)
class Waiting:
    """The blocking collective that a rank issued last.

    `awaited` is the one rank that it needs, or `ANYBODY` when it needs every member; `alone` says that the rank had one Python
    thread, so that no other thread can issue what others wait for.
    """

    group_key: int
    number: int
    awaited: int
    alone: bool


def create(size: int) -> int:
    """Make the shared memory of a world of `size` ranks and return its descriptor (close-on-exec)."""
    descriptor = os.memfd_create("fsdp_testing-ledger", os.MFD_CLOEXEC)
    os.ftruncate(descriptor, size * AREA_BYTES + fence.BYTES)
    made = LedgerMemory(descriptor, size)
    made.fence.initialise()
    made.close()
    return descriptor


class LedgerMemory:
    """All areas of one world, mapped."""

    def __init__(self, descriptor: int, size: int) -> None:
        self.size = size
        self._map = mmap.mmap(descriptor, size * AREA_BYTES + fence.BYTES)
        self._words = memoryview(self._map).cast("Q")
        self.fence = Fence(self._map, size * AREA_BYTES)
        self.areas = tuple(OwnArea(self._map, self._words, self.fence, rank) for rank in range(size))

    def close(self) -> None:
        """Unmap; areas are unusable afterwards. Safe to call twice."""
        # Views first: referenced memory cannot be unmapped.
        self._words.release()
        self.fence.close()
        self._map.close()


class Area:
    """One rank's part, read by anyone.

    `words` is all shared memory as 64-bit words; `entry_word` and `waiting_word` say where to look, for readers that cannot
    afford a call.
    """

    def __init__(self, memory: mmap.mmap, words: memoryview, fence: Fence, index: int) -> None:
        self.words = words
        self._map = memory
        self._fence = fence
        self._base = index * AREA_BYTES
        self._head = self._base // _WORD
        self._table = (self._base + _HEADER_BYTES) // _WORD
        self._rings = self._base + _HEADER_BYTES + _TABLE_BYTES
        self._texts = self._rings + _RINGS_BYTES

    @property
    def inside_word(self) -> int:
        """Index in `words` of the stamp of the collective that torch has not yet taken, nor refused; 0 for none.

        The next word is the same stamp once the owner insists on it: the owner compares it, and knows no reason for torch to
        refuse it.
        """
        return self._head + _INSIDE

    @property
    def waiting_word(self) -> int:
        """Index in `words` of the group that the owner waits in; the next word is 0 while it waits in none."""
        return self._head + _WAIT_GROUP

    def epoch(self) -> int:
        """Return the number of the job whose entries are in the area."""
        return self.words[self._head + _EPOCH]

    def uncompared(self) -> int:
        """Return how many groups did not fit in the table during this job; their collectives were not recorded."""
        return self.words[self._head + _OVERFLOW]

    def refused(self) -> int:
        """Return how many collectives the ledger refused the owner in this job."""
        return self.words[self._head + _REFUSED]

    def groups(self) -> list[tuple[int, int, int]]:
        """(key, collectives issued, digest) of every group that the owner has used in this job, by first use."""
        words, table = self.words, self._table
        slots = range(table, table + self._written(_GROUPS_USED) * _TABLE_WORDS, _TABLE_WORDS)
        return [(words[at], words[at + 1], words[at + 2]) for at in slots]

    def slot_of(self, key: int) -> int | None:
        """Return the slot of group `key`, if the owner has used the group in this job."""
        words, table = self.words, self._table
        for slot in range(self._written(_GROUPS_USED)):
            if words[table + slot * _TABLE_WORDS] == key:
                return slot
        return None

    def _written(self, length: int) -> int:
        """Return the length of a table in this job, read so that its rows can be read; the caller has checked the epoch."""
        self._fence.cross()
        count = self.words[self._head + length]
        self._fence.cross()
        return count

    def issued(self, key: int) -> int:
        """Return how many collectives of group `key` the owner has issued in this job."""
        slot = self.slot_of(key)
        return 0 if slot is None else self.words[self._table + slot * _TABLE_WORDS + 1]

    def entry_word(self, slot: int, number: int) -> int:
        """Return the index of the first word of collective `number` in `words`: stamp, signature, moment, ids, stamp."""
        return (self._rings + (slot * RING + number % RING) * _ENTRY.size) // _WORD

    def entry(self, slot: int, number: int) -> Entry | None:
        """Collective `number` of the group in `slot`: None when not issued in this job, or no longer in the ring."""
        wanted = stamp(number, self.epoch())
        at = self._rings + (slot * RING + number % RING) * _ENTRY.size
        fields = _ENTRY.unpack_from(self._map, at)
        # The first stamp is read again: a writer that had begun a later entry would have changed it by now.
        if fields[5] != wanted or self.words[at // _WORD] != wanted:
            return None
        return Entry(*fields[1:5])

    def waiting(self) -> Waiting | None:
        """Return the blocking collective issued last in this job."""
        words, head = self.words, self._head
        # Meta, group, meta again: an owner that has gone on to another group has cleared meta in between.
        meta = words[head + _WAIT_META]
        key = words[head + _WAIT_GROUP]
        if not meta or words[head + _WAIT_META] != meta:
            return None
        return Waiting(key, meta >> NUMBER_BITS, (meta >> 1) & ANYBODY, bool(meta & 1))

    def strings(self) -> list[str]:
        """Return all strings of the owner; index is the id, 0 is '?'."""
        texts = ["?"]
        at = self._texts
        for _ in range(self._written(_STRINGS)):
            (length,) = _LENGTH.unpack_from(self._map, at)
            at += _LENGTH.size
            texts.append(self._map[at : at + length].decode("utf-8", "replace"))
            at += length
        return texts


class OwnArea(Area):
    """One rank's part, as that rank itself writes it; nobody else may."""

    def start_job(self, epoch: int) -> bool:
        """Clear the groups of the last job.

        Returns:
            True when the strings were cleared too, to make room; the owner's ids are then void.
        """
        words, head = self.words, self._head
        words[head + _WAIT_META] = 0
        words[head + _GROUPS_USED] = 0
        words[head + _OVERFLOW] = 0
        words[head + _REFUSED] = 0
        words[head + _INSIDE] = words[head + _MEANT] = 0
        # Strings outlive jobs, so that each is written once; they are cleared only when they fill half of their room.
        crowded = words[head + _STRING_BYTES] > _STRINGS_BYTES // 2
        if crowded:
            words[head + _STRINGS] = 0
            words[head + _STRING_BYTES] = 0
        # The epoch comes last: readers of the new epoch find empty tables, never the last job's entries under it.
        self._fence.cross()
        words[head + _EPOCH] = epoch
        return crowded

    def put_group(self, key: int) -> int | None:
        """Take the next slot of the group table for `key`; None when the table is full."""
        words, slot = self.words, self.words[self._head + _GROUPS_USED]
        if slot >= GROUPS:
            words[self._head + _OVERFLOW] += 1
            return None
        at = self._table + slot * _TABLE_WORDS
        words[at], words[at + 1], words[at + 2] = key, 0, 0
        # The slot before its count: readers of the new count find the key.
        self._fence.cross()
        words[self._head + _GROUPS_USED] = slot + 1
        return slot

    def put_entry(self, slot: int, entry: tuple[int, int, int, int, int, int], digest: int) -> None:
        """Write `entry` (stamp, signature, moment, description, call site, stamp), then its group's count and digest."""
        # The entry, then its count; a reader that relies on this order has crossed the fence.
        number = entry[0] >> NUMBER_BITS
        _ENTRY.pack_into(self._map, self._rings + (slot * RING + number % RING) * _ENTRY.size, *entry)
        _PROGRESS.pack_into(self._map, (self._table + slot * _TABLE_WORDS + 1) * _WORD, number, digest)

    def withdraw_entry(self, slot: int, number: int, digest: int) -> None:
        """Take back collective `number`, the last of its group; `digest` is the group's digest without it."""
        at = self.entry_word(slot, number)
        # Both stamps: neither half may pass for the whole. Then the count, so that the number can be given again.
        self.words[at] = self.words[at + ENTRY_WORDS - 1] = 0
        _PROGRESS.pack_into(self._map, (self._table + slot * _TABLE_WORDS + 1) * _WORD, number - 1, digest)

    def put_waiting(self, key: int, number: int, awaited: int, *, alone: bool) -> None:
        """Say that the owner is about to block in collective `number` of group `key`."""
        words, head = self.words, self._head
        # Cleared before the group changes: a number of one group beside the key of another would be a wait that never was.
        if words[head + _WAIT_GROUP] != key:
            words[head + _WAIT_META] = 0
            words[head + _WAIT_GROUP] = key
        words[head + _WAIT_META] = number << NUMBER_BITS | awaited << 1 | alone

    def put_refused(self) -> None:
        """Record that the last collective was refused: it takes no part in comparisons."""
        self.words[self._head + _WAIT_META] = self.words[self._head + _INSIDE] = 0
        self.words[self._head + _REFUSED] += 1

    def withdraw_waiting(self) -> None:
        """Say that the owner does not block."""
        self.words[self._head + _WAIT_META] = 0

    def put_string(self, text: str) -> int:
        """Append a description or call site; returns its id, 0 when there is no more room (id 0 reads as '?')."""
        words, head = self.words, self._head
        used, count = words[head + _STRING_BYTES], words[head + _STRINGS]
        data = text.encode("utf-8", "replace")[:_LONGEST_TEXT]
        if used + len(data) + _LENGTH.size > _STRINGS_BYTES:
            return 0
        at = self._texts + used
        _LENGTH.pack_into(self._map, at, len(data))
        self._map[at + _LENGTH.size : at + _LENGTH.size + len(data)] = data
        # The text before its count, as for groups.
        self._fence.cross()
        words[head + _STRING_BYTES] = used + _LENGTH.size + len(data)
        words[head + _STRINGS] = count + 1
        return count + 1


def stamp(number: int, epoch: int) -> int:
    """Return the stamp of collective `number` of job `epoch`: one word, so that it is read whole."""
    return number << NUMBER_BITS | epoch & 0xFFFFFFFF
