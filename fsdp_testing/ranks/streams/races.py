"""Finds unordered accesses to memory, and how far the host runs ahead: vector clocks over a recorded history.

Each stream counts its work. A clock holds, for each stream, the last piece of work known to be done. A wait takes over the clock
of what it waits for. An access is ordered after an earlier one if its stream's clock knows that the earlier one is done
(Lamport 1978; torch's CUDA sanitizer, pytorch PR 83984, decides in the same way).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from fsdp_testing.ranks.streams.history import (
    HOST,
    Access,
    Allocated,
    EventRecorded,
    EventWaited,
    Freed,
    History,
    Site,
    StreamWaited,
    UseRecorded,
    Work,
)

Clock = dict[int, int]
_MOST_RACES = 10
GATHERS = frozenset(
    {
        *("allgather_", "_allgather_base_", "allgather_coalesced_", "allgather_into_tensor_coalesced_"),
        *("all_gather_into_tensor", "all_gather_into_tensor_out", "all_gather_into_tensor_coalesced"),  # functional
    }
)
"""Collectives whose results are full parameters."""


@dataclass(frozen=True, slots=True)
class Use:
    """One access as reported: the operation, its stream and where it was called."""

    name: str
    stream: str
    writes: bool
    site: Site

    def __str__(self) -> str:
        """Return the access with its place in the code."""
        verb = "writes" if self.writes else "reads"
        return f"{self.name} {verb} on {self.stream}" + "".join(f"\n      {place}" for place in self.site)


@dataclass(frozen=True, slots=True)
class Race:
    """Two uses of the same memory that nothing orders.

    Attributes:
        block: The memory: shape and dtype of the tensor that it was made for.
        earlier: The use that may not be over.
        later: The use that may come too early.
        reused: The second use that the memory was made for, if it was freed in between; else empty.
        freed: The place in the code that freed it.
    """

    block: str
    earlier: Use
    later: Use
    reused: str = ""
    freed: Site = ()

    @property
    def summary(self) -> str:
        """The race in one sentence."""
        first, then = f"{self.earlier.name} on {self.earlier.stream}", f"{self.later.name} on {self.later.stream}"
        if self.reused:
            return f"memory of {self.block} is freed and given to {self.reused} although nothing orders {then} after {first}"
        return f"nothing orders {then} after {first}, in {self.block}"

    def __str__(self) -> str:
        """Return the sentence and the places in the code."""
        lines = [f"{self.summary[0].upper()}{self.summary[1:]}.", f"    first  {self.earlier}"]
        advice = f"Make {self.later.stream} wait for {self.earlier.stream} in between (wait_stream, or an event)"
        if self.reused:
            lines.append("    freed" + "".join(f"\n      {place}" for place in self.freed))
            advice += ", or call record_stream before the last reference goes"
        return "\n".join([*lines, f"    then   {self.later}", f"  {advice}."])


@dataclass(slots=True)
class _Done:
    """An access that a later one must be ordered after."""

    tick: int
    stream: int
    access: Access
    work: Work


@dataclass(frozen=True, slots=True)
class _Former:
    """A use of memory that was freed since."""

    done: _Done
    label: str
    freed: Site


@dataclass(slots=True)
class _Block:
    """One block of memory.

    Attributes:
        label: The memory's purpose.
        owner: The stream whose pool it comes from, and goes back to.
        accesses: Uses that a later one may have to be ordered after.
        recorded: Streams given to `record_stream`.
        former: Uses of freed memory that the block may reuse, until its first use is compared with them.
    """

    label: str
    owner: int
    accesses: list[_Done] = field(default_factory=list)
    recorded: set[int] = field(default_factory=set)
    former: list[_Former] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class FullBuffers:
    """How many full parameters a device may still use when an all-gather begins, if it lags as far as the host allows.

    Attributes:
        held: The largest number not freed.
        occupied: The largest number not freed, or freed while their last use may not have been complete.
        site: Call of the all-gather that reached that number.
    """

    held: int = 0
    occupied: int = 0
    site: Site = ()


def races(history: History) -> list[Race]:
    """Return every pair of conflicting uses that nothing orders, each pair of places once, in the order of the history."""
    return _Judge(history).run()


class _Judge:
    def __init__(self, history: History, no_parameters: Collection[str] = ()) -> None:
        self._history = history
        self._no_parameters = {number for number, name in history.streams.items() if name in no_parameters}
        self._clocks: dict[int, Clock] = {}
        self._events: dict[int, Clock] = {}
        self._blocks: dict[int, _Block] = {}
        self._former: dict[int, list[_Former]] = {}
        self._races: dict[tuple[Use, Use, bool], Race] = {}
        self._released: list[Clock] = []
        self._held: set[int] = set()
        self.full_buffers = FullBuffers()

    def run(self) -> list[Race]:
        for entry in self._history.entries:
            match entry:
                case Work():
                    self._work(entry)
                case Allocated(block, stream, label):
                    self._allocate(block, stream, label)
                case Freed(block, site):
                    self._free(block, site)
                case UseRecorded(block, stream):
                    self._block(block).recorded.add(stream)
                case EventRecorded(event, stream):
                    self._events[event] = dict(self._clock(stream))
                case EventWaited(event, stream):
                    # An event that was never recorded counts as done, as on CUDA.
                    self._join(stream, self._events.get(event, {}))
                case StreamWaited(stream, awaited):
                    self._join(stream, self._clock(awaited))
        return list(self._races.values())

    def _clock(self, stream: int) -> Clock:
        return self._clocks.setdefault(stream, {})

    def _join(self, stream: int, awaited: Clock) -> None:
        clock = self._clock(stream)
        for number, tick in awaited.items():
            if clock.get(number, 0) < tick:
                clock[number] = tick

    def _block(self, block: int) -> _Block:
        return self._blocks.setdefault(block, _Block(f"block {block}", 0))

    def _work(self, work: Work) -> None:
        # Work that the host has waited for is done before anything that it issues now.
        self._join(work.stream, self._clock(HOST))
        clock = self._clock(work.stream)
        clock[work.stream] = tick = clock.get(work.stream, 0) + 1
        if work.name in GATHERS and work.stream not in self._no_parameters:
            self._gather(work)
        for access in work.accesses:
            self._access(_Done(tick, work.stream, access, work), clock)

    def _gather(self, work: Work) -> None:
        self._held |= {access.block for access in work.accesses if access.writes}
        host = self._clock(HOST)
        self._released = [
            uses for uses in self._released if any(host.get(stream, 0) < tick for stream, tick in uses.items())
        ]
        most, occupied = self.full_buffers, len(self._held) + len(self._released)
        self.full_buffers = FullBuffers(
            max(most.held, len(self._held)),
            max(most.occupied, occupied),
            work.site if occupied > most.occupied else most.site,
        )

    def _access(self, now: _Done, clock: Clock) -> None:
        block, pending = self._block(now.access.block), []
        for former in block.former:
            if clock.get(former.done.stream, 0) < former.done.tick:
                self._race(Race(former.label, self._use(former.done), self._use(now), block.label, former.freed))
        block.former = []
        for before in block.accesses:
            ordered = clock.get(before.stream, 0) >= before.tick
            if not ordered and _conflict(before.access, now.access):
                self._race(Race(block.label, self._use(before), self._use(now)))
            if not (ordered and _supersedes(now, before)):
                pending.append(before)
        pending.append(now)
        block.accesses = pending

    def _allocate(self, number: int, stream: int, label: str) -> None:
        """Take memory from a stream's pool: any that was freed there may be given out again, at once."""
        clock, host = self._clock(stream), self._clock(HOST)
        waiting = [
            former
            for former in self._former.get(stream, ())
            if max(clock.get(former.done.stream, 0), host.get(former.done.stream, 0)) < former.done.tick
        ]
        self._former[stream] = waiting
        self._blocks[number] = _Block(label, stream, former=list(waiting))

    def _free(self, number: int, site: Site) -> None:
        block = self._blocks.pop(number, None)
        # Memory of the host that a device still copies to or from is kept by the allocator of pinned memory.
        if block is None or block.owner == HOST:
            return
        if number in self._held:
            self._held.remove(number)
            uses: Clock = {}
            for before in block.accesses:
                uses[before.stream] = max(uses.get(before.stream, 0), before.tick)
            self._released.append(uses)
        # The allocator waits for the work of recorded streams so far, and for everything ordered before it.
        clocks = [self._clock(stream) for stream in sorted(block.recorded)]
        self._former.setdefault(block.owner, []).extend(
            _Former(before, block.label, site)
            for before in block.accesses
            if before.stream not in (block.owner, *block.recorded)
            and not any(clock.get(before.stream, 0) >= before.tick for clock in clocks)
        )

    def _race(self, race: Race) -> None:
        # In a list, every parameter races at the same two places.
        self._races.setdefault((race.earlier, race.later, bool(race.reused)), race)

    def _use(self, done: _Done) -> Use:
        return Use(done.work.name, self._name(done.stream), done.access.writes, done.work.site)

    def _name(self, stream: int) -> str:
        return "the host" if stream == HOST else self._history.streams.get(stream, f"stream {stream}")


def _conflict(before: Access, now: Access) -> bool:
    return (before.writes or now.writes) and before.region.overlaps(now.region)


def _supersedes(now: _Done, before: _Done) -> bool:
    """Whether everything that is ordered after `now` is ordered after `before`, and conflicts with `now` if with `before`."""
    return before.access.region == now.access.region and (now.access.writes or not before.access.writes)


@dataclass(frozen=True, slots=True)
class StreamAccount:
    """The judgement of a history, small enough to report.

    Attributes:
        streams: Names of the streams that were given work.
        work: How many operators and collectives they were given.
        races: The first.
        race_count: How many there are.
        full_buffers: How many full parameters the device may have used at once.
    """

    streams: tuple[str, ...]
    work: int
    races: tuple[Race, ...]
    race_count: int
    full_buffers: FullBuffers = FullBuffers()

    @classmethod
    def of(cls, history: History, no_parameters: Collection[str] = ()) -> StreamAccount:
        """Judge a history; on the streams with the names `no_parameters` other things than parameters are gathered."""
        streams = Counter(entry.stream for entry in history.entries if isinstance(entry, Work) and entry.stream != HOST)
        names = tuple(history.streams[number] for number in sorted(streams))
        judge = _Judge(history, no_parameters)
        pairs = judge.run()
        return cls(names, streams.total(), tuple(pairs[:_MOST_RACES]), len(pairs), judge.full_buffers)

    def __str__(self) -> str:
        """Return the races as text, numbered."""
        more = self.race_count - len(self.races)
        return tell(self.races) + (f"\n  and {more} more" if more else "")


def tell(found: Iterable[Race]) -> str:
    """Return races as text, numbered."""
    return "\n".join(f"  {number}. {race}" for number, race in enumerate(found, start=1))
