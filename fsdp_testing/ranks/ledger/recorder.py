"""What a rank does at each collective: record it, compare it with the peers, refuse a mismatch before bytes move.

The comparison needs no message: each rank writes into shared memory and reads what its peers wrote. Whoever comes
second notices a difference, so a mismatch is reported within microseconds instead of after a timeout, and the collective
that would have returned garbage is never issued.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from fsdp_testing.base.compat import other_threads
from fsdp_testing.errors import CollectiveMismatch
from fsdp_testing.ranks.ledger import deadlock
from fsdp_testing.ranks.ledger.memory import ANYBODY, Area, LedgerMemory, OwnArea
from fsdp_testing.ranks.ledger.records import (
    MAKING,
    WAITS_FOR_ALL,
    WAITS_FOR_NOBODY,
    Call,
    GroupIdentity,
    group_string,
)

_MASK = (1 << 64) - 1
_PAUSE_SECONDS = 0.001
# During a store a half-replaced entry looks like a different one: a difference must show in this many readings, a pause
# apart.
_READINGS = 3
# How long torch may take to refuse a call: an exception with a C++ backtrace is slow on a busy machine.
_ASKING_SECONDS = 3.0
_SAME_COLLECTIVES = "All ranks of a group must issue the same collectives in the same order."
_SAME_GROUPS = "All ranks must make the same groups in the same order, also groups that they are no members of."
_NO_SITE = (0, "?", None)

#: Name of a method of `ProcessGroup`, the group, the arguments.
Attempt = tuple[str, Any, tuple[Any, ...]]

#: Called with every collective of this rank: group, call, call site.
Listener = Callable[[GroupIdentity, Call, str], None]


class Line:
    """The collectives of one group in one job, as this rank issues them.

    `peers` are [area, slot or None] of the other members; the slot is looked up until the
    peer has used the group.
    """

    __slots__ = ("digest", "digest_before", "group", "number", "peers", "slot")

    def __init__(self, group: GroupIdentity, slot: int | None, peers: list[list[Any]]) -> None:
        self.group = group
        self.slot = slot
        self.peers = peers
        self.number = 0
        self.digest = 0
        self.digest_before = 0


class Recorder:
    """The ledger of one rank in one world; used by the interception, from any thread that issues collectives."""

    def __init__(self, memory: LedgerMemory, rank: int, *, compare: bool = True) -> None:
        self.rank = rank
        self.compare = compare
        self.world_size = memory.size
        self._areas = memory.areas
        self._area: OwnArea = memory.areas[rank if memory.size > 1 else 0]
        self._words = self._area.words
        self._inside = self._area.inside_word
        self._epoch = 0
        self._refusal = ""
        self._lines: dict[int, Line] = {}
        self._known: dict[Call, tuple[int, int]] = {}
        self._sites: dict[tuple[int, int], tuple[int, str, Any]] = {}
        self._named: set[int] = set()
        self._is_own: dict[str, bool] = {}
        self._cross = memory.fence.cross
        self._deadlocks = deadlock.Deadlocks(memory, rank)
        # Starts of file names of code that issues collectives for others: torch, this package, what wraps calls.
        torch = importlib.util.find_spec("torch")
        here = Path(__file__).parent
        # Replacements of torch's functions while a training is watched are no callers either.
        folders = [
            str(here),
            str(here.parents[1] / "train"),
            str(here.parent / "faults"),
            *((torch and torch.submodule_search_locations) or ()),
        ]
        deprecations = importlib.util.find_spec("typing_extensions")  # torch wraps deprecated functions with it
        wrappers = (contextlib.__file__, str(deprecations and deprecations.origin))
        self._skipped = ("<frozen", "<string>", *wrappers, *(f"{folder}/" for folder in folders))
        self._rare = threading.Lock()
        self.listener: Listener | None = None

    def start_job(self, epoch: int) -> None:
        """Begin job `epoch`: numbers start at 1 again."""
        self._epoch = epoch & 0xFFFFFFFF
        self._refusal = ""
        self._lines.clear()
        self._deadlocks.forget()
        # Ids of strings are void once the area has made room.
        if self._area.start_job(epoch):
            self._known.clear()
            self._sites.clear()
            self._named.clear()

    def issued(self) -> dict[int, int]:
        """Return how many collectives of each group were issued in this job, by group key."""
        return {key: line.number for key, line in self._lines.items()}

    def line(self, group: GroupIdentity) -> Line:
        """Return the line of `group` in this job; begin one if there is none."""
        # Two threads may use a group for the first time at once, and it must get one slot.
        with self._rare:
            line = self._lines.get(group.key)
            if line is None:
                slot = self._area.put_group(group.key)
                if slot is not None and group.key not in self._named:
                    self._named.add(group.key)
                    self._area.put_string(group_string(group))
                peers = [peer for peer in group.members if peer != self.rank] if self.compare else []
                line = self._lines[group.key] = Line(group, slot, [[self._areas[peer], None] for peer in peers])
            return line

    def record(self, line: Line, call: Call, blocking: bool, attempt: Attempt | None = None) -> bool:
        """Record `call` on the group of `line` and compare it with what the peers recorded.

        Args:
            line: The group's.
            call: The call that is about to be issued.
            blocking: Whether the calling thread will wait for the collective.
            attempt: Method, group and arguments, for the question whether torch will take them at all.

        Returns:
            True when the peers disagree but torch will refuse the call anyway: the record is taken back.

        Raises:
            CollectiveMismatch: When a peer issued another collective at the same place of the same group, or waits
                in a collective of another group that this rank has not issued, while this one is about to wait too; and
                at every further call of this job.
        """
        if self._refusal:
            # What is issued now would meet a collective that the peers issued before it.
            raise CollectiveMismatch(f"{self._refusal} This rank caught that error and went on to {call.text}.")
        number = line.number = line.number + 1
        slot = line.slot
        if slot is None:
            return False
        signature, description = self._known.get(call) or self._learn(call)
        mark = number << 32 | self._epoch
        line.digest_before = line.digest
        # Numbers only: unlike texts, they have the same hash in every process.
        digest = line.digest = hash((line.digest, signature)) & _MASK
        site, where, _ = self._call_site()
        if self.listener is not None and call.moves:
            self.listener(line.group, call, where)
        # Before the entry: a peer that finds the entry must find as well that torch may yet refuse it (`_confirm_difference`).
        self._words[self._inside] = mark
        self._area.put_entry(slot, (mark, signature, time.monotonic_ns(), description, site, mark), digest)
        if not line.peers:
            return False
        # Between writing and reading: of two ranks that come at the same moment, one sees the other.
        self._cross()
        words, key = self._words, line.group.key
        for peer in line.peers:
            # Skip a peer that is not in this job or has not used the group: it will compare itself with this rank later.
            theirs = peer[1]
            if theirs is None:
                theirs = self._find_peer(peer, key)
                if theirs is None:
                    continue
            at = peer[0].entry_word(theirs, number)
            # Last word first: the order opposite to writing shows an entry that is being replaced.
            if words[at + 4] == mark and words[at + 1] != signature and words[at] == mark:
                # Nothing will be issued, so no rank disagrees: ranks try refused calls at different moments.
                if attempt is not None and torch_refuses(*attempt):
                    self.withdraw(line, number)
                    return True
                self._confirm_difference(line, peer, mark, signature)
        if blocking and line.group.blocking_host and call.waits_for != WAITS_FOR_NOBODY:
            self._before_blocking(line, call)
        return False

    def taken(self) -> None:
        """Mark the last recorded collective as issued: torch has accepted it."""
        self._words[self._inside] = 0

    def withdraw(self, line: Line, number: int) -> None:
        """Take back collective `number`: torch refuses the call, so nothing is issued."""
        # First: no rank may see this rank stuck in a call that torch has refused.
        self._area.withdraw_waiting()
        if line.slot is not None and line.number == number:
            line.number -= 1
            line.digest = line.digest_before
            self._area.withdraw_entry(line.slot, number, line.digest)
            # A peer that waits for the end of the attempt must find the entry gone.
            self._cross()
        self._words[self._inside] = 0

    def _before_blocking(self, line: Line, call: Call) -> None:
        group = line.group
        awaited = ANYBODY if call.waits_for == WAITS_FOR_ALL else group.members[call.waits_for]
        alone = other_threads() == 0
        self._area.put_waiting(group.key, line.number, awaited, alone=alone)
        if alone:
            # Likewise: of two ranks that block at the same moment, one sees the other.
            self._cross()
        if alone and self._deadlocks.possible(self._lines, group.key, self._epoch):
            chain = self._deadlocks.find(line, awaited, self._epoch)
            if chain:
                time.sleep(_PAUSE_SECONDS)
                # A deadlock lasts; a wait that was read half-written does not.
                chain = self._deadlocks.find(line, awaited, self._epoch)
            if chain:
                self._refuse(self._deadlocks.explain(chain, line))

    def _find_peer(self, peer: list[Any], key: int) -> int | None:
        area: Area = peer[0]
        if area.epoch() & 0xFFFFFFFF != self._epoch:
            return None
        slot = peer[1] = area.slot_of(key)
        return slot

    def _learn(self, call: Call) -> tuple[int, int]:
        digest = hashlib.blake2b(repr(call.what).encode(), digest_size=8).digest()
        with self._rare:
            learnt = self._known[call] = int.from_bytes(digest, "little"), self._area.put_string(call.text)
        return learnt

    def _call_site(self) -> tuple[int, str, Any]:
        # The code object by identity and the instruction: cheaper than a hash of the code and the search for a line.
        try:
            frame: FrameType | None = sys._getframe(3)
        except ValueError:  # a thread of torch that calls from C++
            frame = sys._getframe()
        own = self._is_own
        while frame is not None:
            code = frame.f_code
            file = code.co_filename
            skip = own.get(file)
            if skip is None:
                skip = own[file] = file.startswith(self._skipped)
            if not skip:
                site = self._sites.get((id(code), frame.f_lasti))
                return site if site is not None else self._learn_site(frame)
            frame = frame.f_back
        return _NO_SITE

    def _learn_site(self, frame: FrameType) -> tuple[int, str, Any]:
        code = frame.f_code
        text = f"{code.co_filename}:{frame.f_lineno} in {code.co_qualname}"
        with self._rare:
            # The code object is kept, so that its identity stays its own.
            self._sites[id(code), frame.f_lasti] = site = (self._area.put_string(text), text, code)
        return site

    def _confirm_difference(self, line: Line, peer: list[Any], mark: int, signature: int) -> None:
        """Raise unless the difference goes away: the peer's entry was half-written, or torch refuses its call."""
        words, at, inside = self._words, peer[0].entry_word(peer[1], line.number), peer[0].inside_word
        # From here on this rank insists: without that mark two ranks that differ would each wait for the other to give up.
        words[self._inside + 1] = mark
        asking = time.monotonic() + _ASKING_SECONDS
        for reading in range(_READINGS):
            # If both ranks insist, they do not wait for each other.
            while words[inside] == mark and words[inside + 1] != mark and time.monotonic() < asking:
                time.sleep(_PAUSE_SECONDS)
            self._cross()
            # Withdrawn, or read while half-written: no difference.
            if words[at + 4] != mark or words[at + 1] == signature or words[at] != mark:
                words[self._inside + 1] = 0
                return
            if reading < _READINGS - 1:
                time.sleep(_PAUSE_SECONDS)
        self._refuse(self._explain_difference(line, peer))

    def _refuse(self, why: str) -> NoReturn:
        self._refusal = why
        self._area.put_refused()
        raise CollectiveMismatch(why)

    def _explain_difference(self, line: Line, peer: list[Any]) -> str:
        area: Area = peer[0]
        rank = self._areas.index(area)
        theirs, mine = area.entry(peer[1], line.number), self._area.entry(line.slot or 0, line.number)
        return (
            f"collective #{line.number} of the {line.group.label} differs: "
            f"rank {rank} issued {deadlock.entry_text(area, theirs)}; "
            f"rank {self.rank} issues {deadlock.entry_text(self._area, mine)}. "
            + (_SAME_GROUPS if line.group.label == MAKING else _SAME_COLLECTIVES)
        )


__all__ = ["Call", "GroupIdentity", "Line", "Listener", "Recorder"]


def torch_refuses(name: str, group: Any, args: tuple[Any, ...]) -> bool:
    """Return whether method `name` of a `ProcessGroup` certainly raises for these arguments; False when in doubt.

    Asked only when the ranks disagree: of a call that torch must refuse nothing is issued, and a peer may be at its next
    collective. What torch refuses only while it waits for the work was issued on every rank.
    """
    check = _CHECKS.get(name)
    try:
        return check is not None and check(group.size(), args[0], args[1])
    except (AttributeError, IndexError, TypeError):
        return False


def _not_gathered(size: int, whole: Any, part: Any) -> bool:
    return whole.numel() != part.numel() * size or whole.dtype != part.dtype


# From the size of the group, the outputs and the inputs.
_CHECKS: dict[str, Callable[[int, Any, Any], bool]] = {
    "allgather": lambda size, outs, inputs: (
        len(outs[0]) != size or any(out.dtype != inputs[0].dtype for out in outs[0])
    ),
    "reduce_scatter": lambda size, outs, inputs: len(inputs[0]) != size,
    "_allgather_base": _not_gathered,
    "all_gather_single": _not_gathered,
    "_reduce_scatter_base": lambda size, part, whole: _not_gathered(size, whole, part),
    "reduce_scatter_single": lambda size, part, whole: _not_gathered(size, whole, part),
}
