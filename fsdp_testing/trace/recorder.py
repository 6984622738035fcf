"""How are the events of one rank collected? Every source calls one recorder, which numbers and times them."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from fsdp_testing.ledger.recorder import Call, GroupIdentity
from fsdp_testing.records.event import (
    AutogradEvent,
    CollectiveEvent,
    Event,
    OperationEvent,
    UnitEvent,
    WaitEvent,
)

#: What an adapter's `trace_units` calls for each transition: unit FQN, transition, parameter FQNs.
EmitUnit = Callable[[str, str, tuple[str, ...]], None]


class TraceRecorder:
    """Events of one rank in the order they happened.

    Args:
        operation: tells the index of the program's operation that runs now.
    """

    def __init__(self, operation: Callable[[], int]) -> None:
        self._operation = operation
        self._events: list[Event] = []

    @property
    def events(self) -> tuple[Event, ...]:
        """All events so far."""
        return tuple(self._events)

    def collective(self, group: GroupIdentity, call: Call, site: str) -> None:
        """Record a collective; the ledger's listener."""
        what: tuple[Any, ...] = (*call.what, None, None)
        operation, detail, *rest = what
        words = [str(word) for word in detail or ()]
        root = next((int(word[5:]) for word in words if word.startswith("root=")), -1)
        reduce_op = next((word for word in words if not word.startswith("root=")), "")
        sizes = rest[1]
        self._events.append(
            CollectiveEvent(
                *self._head(),
                name=operation,
                group=group.members,
                dtype=str(rest[0] or ""),
                numel=sum(sizes) if isinstance(sizes, tuple) else int(sizes or 0),
                reduce_op=reduce_op,
                root=root,
                call_site=site,
            )
        )

    def unit(self, unit: str, transition: str, parameters: tuple[str, ...] = ()) -> None:
        """Record a transition of a unit: `unshard`, `gather`, `reshard`, `free`."""
        self._events.append(UnitEvent(*self._head(), unit=unit, transition=transition, parameters=parameters))

    def autograd(self, module: str, moment: str) -> None:
        """Record that a module's forward or backward begins or ends."""
        self._events.append(AutogradEvent(*self._head(), module=module, moment=moment))

    def operation(self) -> None:
        """Record that an operation of the program begins."""
        self._events.append(OperationEvent(*self._head()))

    def waited(self, start: float, stop: float) -> None:
        """Record that this rank waited for a collective from `start` to `stop`."""
        sequence, _, operation = self._head()
        self._events.append(WaitEvent(sequence, start, operation, stop - start))

    def _head(self) -> tuple[int, float, int]:
        return len(self._events), time.monotonic(), self._operation()
