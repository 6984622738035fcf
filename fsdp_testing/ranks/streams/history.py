"""The work of one rank, in the order in which the host issued it: the input of `races`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeAlias

from fsdp_testing.ranks.streams.regions import Region

HOST = -1
"""Stands for the host where a stream is named: the host waits, and what it issues later comes after."""

Site: TypeAlias = tuple[str, ...]
"""Places in the code as `file:line in function`, the innermost first."""


@dataclass(frozen=True, slots=True)
class Access:
    """One tensor that a piece of work reads or writes."""

    block: int
    region: Region
    writes: bool


def stream_of_group(name: str) -> str:
    """Return the name of the stream of a process group."""
    return f"the stream of process group {name}"


@dataclass(frozen=True, slots=True)
class Work:
    """An operator or a collective, issued on a stream."""

    stream: int
    name: str
    accesses: tuple[Access, ...]
    site: Site


@dataclass(frozen=True, slots=True)
class Allocated:
    """A block of memory begins: the allocator takes it from the pool of `stream`."""

    block: int
    stream: int
    label: str


@dataclass(frozen=True, slots=True)
class Freed:
    """The host frees a block: from now on the stream that it came from may reuse its memory."""

    block: int
    site: Site


@dataclass(frozen=True, slots=True)
class UseRecorded:
    """`record_stream`: when the block is freed, the allocator waits for the work issued on `stream` until then."""

    block: int
    stream: int


@dataclass(frozen=True, slots=True)
class EventRecorded:
    """Let the event mark all work of `stream` so far."""

    event: int
    stream: int


@dataclass(frozen=True, slots=True)
class EventWaited:
    """What `stream` (or `HOST`) does from now on comes after the event."""

    event: int
    stream: int


@dataclass(frozen=True, slots=True)
class StreamWaited:
    """What `stream` (or `HOST`) does from now on comes after all work of `awaited` so far."""

    stream: int
    awaited: int


Entry: TypeAlias = Work | Allocated | Freed | UseRecorded | EventRecorded | EventWaited | StreamWaited


@dataclass(slots=True)
class History:
    """The entries of one rank, and the names of its streams.

    Attributes:
        entries: Entries in the order in which the host made them.
        streams: A name for each stream that occurs; stream 0 is the default stream.
    """

    entries: list[Entry] = field(default_factory=list)
    streams: dict[int, str] = field(default_factory=lambda: {0: "the default stream"})
