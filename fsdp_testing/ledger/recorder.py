"""What does a rank do at each collective? Record it, compare it with the peers, refuse a mismatch before bytes move.

The comparison needs no message: each rank writes into shared memory and reads what its peers wrote. Whoever comes
second notices a difference, so a mismatch is told within microseconds instead of after a timeout, and the collective
that would have returned garbage is never issued.
"""

from __future__ import annotations

import hashlib
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType
from typing import Any

from fsdp_testing.errors import CollectiveMismatch
from fsdp_testing.ledger.memory import Area, LedgerMemory

_MASK = (1 << 64) - 1
_SETTLE_SECONDS = 0.001
_LOOKS = 20
_OWN = ("/torch/", "/fsdp_testing/ledger/", "<frozen", "<string>", "/contextlib.py")


@dataclass(frozen=True, slots=True)
class GroupIdentity:
    """A process group as all its ranks know it.

    `key` is equal on every member, `members` are ranks of the world, `label` is for people; `blocking_host` says that
    a synchronous collective of this group keeps the calling thread waiting (gloo), not a device stream (NCCL).
    """

    key: int
    label: str
    members: tuple[int, ...]
    blocking_host: bool


def group_identity(name: str, members: tuple[int, ...], world_size: int, blocking_host: bool) -> GroupIdentity:
    """Identity of the group called `name` on all ranks."""
    digest = hashlib.blake2b(f"{name}|{members}".encode(), digest_size=8).digest()
    whole = len(members) == world_size and name in ("0", "default_pg")
    label = "default group" if whole else f"group {name[:12]!r} of ranks {list(members)}"
    return GroupIdentity(int.from_bytes(digest, "little"), label, members, blocking_host)


@dataclass(frozen=True, slots=True, eq=False)
class Call:
    """One collective about to be issued; calls are compared by identity, the interception makes each once.

    `what` is everything that must be equal on all members: operation, reduce op, root, dtype and sizes. `text` shows
    it. `waits_for_all` is False for an operation that this rank may leave before its peers join (the root of a
    broadcast).
    """

    what: tuple[Any, ...]
    text: str
    waits_for_all: bool = True


#: Told of every collective of this rank: group, call, call site.
Listener = Callable[[GroupIdentity, Call, str], None]


class Recorder:
    """The ledger of one rank in one world; used by the interception, from any thread that issues collectives."""

    def __init__(self, memory: LedgerMemory, rank: int, *, compare: bool = True) -> None:
        self._memory = memory
        self._rank = rank
        self._area: Area = memory.areas[rank if compare else 0]
        self._compare = compare
        self._epoch = 0
        self._slots: dict[int, int | None] = {}
        self._peer_slots: dict[tuple[int, int], int] = {}
        self._numbers: dict[int, int] = {}
        self._digests: dict[int, int] = {}
        self._signatures: dict[Call, tuple[int, int]] = {}
        self._sites: dict[tuple[str, int], int] = {}
        self._site_texts: dict[int, str] = {}
        self._is_own: dict[str, bool] = {}
        self.listener: Listener | None = None
        self._labels: dict[int, int] = {}
        self._memberships: dict[int, bool] = {}
        self._thread: int | None = None
        self._threaded = False
        self.total = 0

    def start_job(self, epoch: int) -> None:
        """Begin job `epoch`: numbers start at 1 again."""
        self._epoch = epoch & 0xFFFFFFFF
        self._slots.clear()
        self._peer_slots.clear()
        self._numbers.clear()
        self._digests.clear()
        self._thread = None
        self._threaded = False
        self.total = 0
        self._area.start_job(epoch)

    def issued(self) -> dict[int, int]:
        """Collectives issued in this job by group key."""
        return dict(self._numbers)

    def record(self, group: GroupIdentity, call: Call, blocking: bool) -> None:
        """Record `call` on `group` and compare it with what the peers recorded.

        Raises:
            CollectiveMismatch: when a peer issued another collective at the same place of the same group, or waits
                in a collective of another group that this rank has not issued, while this one is about to block too.
        """
        key = group.key
        number = self._numbers.get(key, 0) + 1
        self._numbers[key] = number
        self.total += 1
        slot = self._slots.get(key, -1)
        if slot == -1:
            slot = self._slots[key] = self._area.put_group(key)
            self._name_group(group)
        if slot is None:
            return
        known = self._signatures.get(call)
        if known is None:
            known = self._signatures[call] = self._learn(call)
        signature, description = known
        epoch = self._epoch
        site = self._call_site()
        digest = self._digests[key] = hash((self._digests.get(key, 0), signature)) & _MASK
        self._area.put_entry(slot, (signature, time.monotonic_ns(), number, epoch, description, site), digest)
        if self.listener is not None:
            self.listener(group, call, self._site_texts.get(site, "?"))
        if self._compare:
            self._compare_with_peers(group, number, signature)
            if blocking and group.blocking_host and call.waits_for_all:
                self._before_blocking(group, number)

    def _before_blocking(self, group: GroupIdentity, number: int) -> None:
        # A second thread may issue what a waiting first one does not: then no wait is certain to last.
        thread = threading.get_ident()
        if self._thread is None:
            self._thread = thread
        self._threaded |= thread != self._thread
        if not self._threaded:
            self._refuse_crossed_wait(group, number)
            self._area.put_waiting(group.key, number)
        else:
            self._area.put_waiting(0, 0)

    def _name_group(self, group: GroupIdentity) -> None:
        if group.key not in self._labels:
            members = ",".join(map(str, group.members))
            self._labels[group.key] = self._area.put_string(f"\x00{group.key}\x00{group.label}\x00{members}")
        self._memberships[group.key] = True

    def _is_member(self, key: int, peer: int) -> bool:
        known = self._memberships.get(key)
        if known is None:
            members = group_fact(self._memory.areas[peer].strings(), key, 3)
            known = self._memberships[key] = str(self._rank) in members.split(",")
        return known

    def _learn(self, call: Call) -> tuple[int, int]:
        digest = hashlib.blake2b(repr(call.what).encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little"), self._area.put_string(call.text)

    def _call_site(self) -> int:
        # File names, not code objects, are looked up: a string keeps its hash, a code object computes it each time.
        frame: FrameType | None = sys._getframe(3)
        own = self._is_own
        while frame is not None:
            file = frame.f_code.co_filename
            skip = own.get(file)
            if skip is None:
                skip = own[file] = any(part in file for part in _OWN)
            if not skip:
                place = (file, frame.f_lineno)
                site = self._sites.get(place)
                return self._learn_site(frame, place) if site is None else site
            frame = frame.f_back
        return 0

    def _learn_site(self, frame: FrameType, place: tuple[str, int]) -> int:
        text = f"{place[0]}:{place[1]} in {frame.f_code.co_qualname}"
        site = self._sites[place] = self._area.put_string(text)
        self._site_texts[site] = text
        return site

    def _compare_with_peers(self, group: GroupIdentity, number: int, signature: int) -> None:
        epoch, me, areas = self._epoch, self._rank, self._memory.areas
        for peer in group.members:
            if peer == me:
                continue
            slot = self._peer_slots.get((peer, group.key))
            if slot is None:
                found = areas[peer].slot_of(group.key) if areas[peer].epoch() & 0xFFFFFFFF == epoch else None
                if found is None:
                    continue
                slot = self._peer_slots[peer, group.key] = found
            fields = areas[peer].entry_fields(slot, number)
            if fields[2] == number and fields[3] == epoch and fields[0] != signature:
                self._confirm_difference(group, number, peer, signature)

    def _confirm_difference(self, group: GroupIdentity, number: int, peer: int, signature: int) -> None:
        """Raise unless the difference was a half-written entry.

        Peers write at the same moment as a rule, since the last collective released them together: a few looks settle
        it in a microsecond, and only a difference that stays is given the time of a scheduler's pause.
        """
        slot = self._peer_slots[peer, group.key]
        area = self._memory.areas[peer]
        for look in range(_LOOKS + 1):
            fields = area.entry_fields(slot, number)
            if fields[2] != number or fields[3] != self._epoch or fields[0] == signature:
                return
            if look == _LOOKS - 1:
                time.sleep(_SETTLE_SECONDS)
        raise CollectiveMismatch(self._tell_difference(group, number, peer, fields))

    def _tell_difference(self, group: GroupIdentity, number: int, peer: int, fields: tuple[int, ...]) -> str:
        mine = self._area.strings()
        theirs = self._memory.areas[peer].strings()
        slot = self._slots[group.key]
        entry = self._area.entry_fields(slot or 0, number)
        return (
            f"collective #{number} of the {group.label} differs: "
            f"rank {peer} issued {theirs[fields[4]]} at {theirs[fields[5]]}; "
            f"rank {self._rank} issues {mine[entry[4]]} at {mine[entry[5]]}. "
            "All ranks of a group must issue the same collectives in the same order."
        )

    def _refuse_crossed_wait(self, group: GroupIdentity, number: int) -> None:
        """Notice a certain deadlock: a peer of this group waits in another group for this rank.

        Certain, because the peer cannot leave that collective before this rank issues it, nor this rank leave the
        present one before the peer issues that.
        """
        for peer in group.members:
            if peer == self._rank:
                continue
            area = self._memory.areas[peer]
            waiting = area.waiting()
            if waiting is None or waiting.group_key == group.key or area.epoch() & 0xFFFFFFFF != self._epoch:
                continue
            if area.issued(group.key) >= number or self._numbers.get(waiting.group_key, 0) >= waiting.number:
                continue
            if self._is_member(waiting.group_key, peer):
                raise CollectiveMismatch(self._tell_crossed(group, number, peer, waiting.group_key, waiting.number))

    def _tell_crossed(self, group: GroupIdentity, number: int, peer: int, other: int, other_number: int) -> str:
        area = self._memory.areas[peer]
        strings = area.strings()
        slot = area.slot_of(other)
        entry = area.entry(slot, other_number) if slot is not None else None
        label = group_fact(strings, other, 2) or "another group"
        what = strings[entry.description] if entry else "a collective"
        site = strings[entry.call_site] if entry else "?"
        mine = self._area.strings()
        own = self._area.entry_fields(self._slots[group.key] or 0, number)
        return (
            f"groups are used in opposite order: rank {peer} waits in {what} (#{other_number} of the {label}) at {site} "
            f"for rank {self._rank}, which is about to wait in {mine[own[4]]} (#{number} of the {group.label}) at "
            f"{mine[own[5]]} for rank {peer}. Use groups that share ranks in one order on all of them."
        )


def group_fact(strings: list[str], key: int, field: int) -> str:
    """Label (2) or comma-separated members (3) of group `key` from a rank's strings; '' when not told there."""
    start = f"\x00{key}\x00"
    return next((text.split("\x00")[field] for text in strings if text.startswith(start)), "")
