"""How are the events of one rank collected? Every source calls one recorder, which numbers and times them.

What happens while the rank trains costs it one time stamp and one tuple; events are made of them when somebody asks.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from fsdp_testing.cases.records.event import (
    AutogradEvent,
    CollectiveEvent,
    Event,
    OperationEvent,
    UnitEvent,
    WaitEvent,
)
from fsdp_testing.ranks.ledger.recorder import Call, GroupIdentity

#: What an adapter's `trace_units` calls for each transition: unit FQN, transition, parameter FQNs.
EmitUnit = Callable[[str, str, tuple[str, ...]], None]

_Maker = Callable[..., Event]


class TraceRecorder:
    """Events of one rank in the order they happened.

    Args:
        operation: Returns the index of the program's operation that runs now.
    """

    def __init__(self, operation: Callable[[], int]) -> None:
        self._operation = operation
        self._recorded: list[tuple[_Maker, float, int, tuple[Any, ...]]] = []
        self._made: list[Event] = []

    @property
    def events(self) -> tuple[Event, ...]:
        for sequence, (make, moment, operation, facts) in enumerate(self._recorded[len(self._made) :], len(self._made)):
            self._made.append(make(sequence, moment, operation, *facts))
        return tuple(self._made)

    def __len__(self) -> int:
        return len(self._recorded)

    def collective(self, group: GroupIdentity, call: Call, site: str) -> None:
        """Record a collective; the ledger's listener."""
        self._recorded.append((_collective, time.monotonic(), self._operation(), (group, call, site)))

    def unit(self, unit: str, transition: str, parameters: tuple[str, ...] = ()) -> None:
        """Record a transition of a unit: `unshard`, `gather`, `reshard`, `free`."""
        self._recorded.append((UnitEvent, time.monotonic(), self._operation(), (unit, transition, parameters)))

    def autograd(self, module: str, moment: str) -> None:
        """Record that a module's forward or backward begins or ends."""
        self._recorded.append((AutogradEvent, time.monotonic(), self._operation(), (module, moment)))

    def operation(self) -> None:
        """Record that an operation of the program begins."""
        self._recorded.append((OperationEvent, time.monotonic(), self._operation(), ()))

    def waited(self, start: float, stop: float) -> None:
        """Record that this rank waited for a collective from `start` to `stop`."""
        self._recorded.append((WaitEvent, start, self._operation(), (stop - start,)))


def _collective(
    sequence: int, moment: float, operation: int, group: GroupIdentity, call: Call, site: str
) -> CollectiveEvent:
    what: tuple[Any, ...] = (*call.what, None, None)
    name, detail, *rest = what
    root = next((part for part in detail or () if isinstance(part, int)), -1)
    reduce_op = next((part for part in detail or () if isinstance(part, str)), "")
    sizes = rest[1]
    return CollectiveEvent(
        sequence,
        moment,
        operation,
        name=name,
        group=group.members,
        dtype=str(rest[0] or ""),
        numel=sum(sizes) if isinstance(sizes, tuple) else int(sizes or 0),
        reduce_op=reduce_op,
        root=root,
        call_site=site,
    )
