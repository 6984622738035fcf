"""What happened on a rank, one event at a time: collectives, unit transitions, autograd."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fsdp_testing.records.document import register_union


@dataclass(frozen=True, slots=True)
class Event:
    """Base of all events. `sequence` counts events of one rank; `time` is seconds of a clock shared by the ranks."""

    kind: ClassVar[str] = "event"
    sequence: int
    time: float
    operation: int
    """Index of the program's operation during which it happened; -1 before the first."""


@dataclass(frozen=True, slots=True)
class CollectiveEvent(Event):
    """One collective as issued."""

    kind: ClassVar[str] = "collective"
    name: str
    group: tuple[int, ...]
    dtype: str
    numel: int
    reduce_op: str = ""
    root: int = -1
    call_site: str = ""


@dataclass(frozen=True, slots=True)
class UnitEvent(Event):
    """A unit changes its state: `unshard`, `reshard`, `free`, `prefetch`."""

    kind: ClassVar[str] = "unit"
    unit: str
    transition: str
    parameters: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class AutogradEvent(Event):
    """`pre_forward`, `post_forward`, `pre_backward`, `post_backward` of a module."""

    kind: ClassVar[str] = "autograd"
    module: str
    moment: str


@dataclass(frozen=True, slots=True)
class OperationEvent(Event):
    """An operation of the program begins."""

    kind: ClassVar[str] = "operation"


@dataclass(frozen=True, slots=True)
class WaitEvent(Event):
    """The rank has waited for a collective; `time` is when it began to, `seconds` how long it took."""

    kind: ClassVar[str] = "wait"
    seconds: float


EVENTS: dict[str, type[Event]] = {
    cls.kind: cls for cls in (CollectiveEvent, UnitEvent, AutogradEvent, OperationEvent, WaitEvent)
}

register_union(Event, EVENTS.get)
