"""Collects the events of one rank: every source calls one recorder, which numbers and times them.

Each event costs the training rank one time stamp and one tuple; `Event` objects are made on request.

Modules and waits are watched from outside, through public hooks and `Work.wait`; the graph is not changed. Waits inside C++
(DDP's reducer) are not recorded.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._pytree import tree_leaves

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


@contextmanager
def watch_modules(recorder: TraceRecorder, names: Mapping[nn.Module, str]) -> Iterator[None]:
    """Record pre_forward, post_forward and pre_backward of the modules in `names` while the context lasts.

    pre_backward is reported at the first gradient that reaches an output of the module; modules whose outputs need no
    gradient have none.
    """

    def first_gradient(name: str, reported: list[bool]) -> None:
        if not reported:
            reported.append(True)
            recorder.autograd(name, "pre_backward")

    def before(module: nn.Module, _args: Any) -> None:
        if module in names:
            recorder.autograd(names[module], "pre_forward")

    def after(module: nn.Module, _args: Any, output: Any) -> None:
        if module not in names:
            return
        recorder.autograd(names[module], "post_forward")
        reported: list[bool] = []
        # Most modules return one tensor; walking a tree with one leaf costs more than everything else here.
        for leaf in (output,) if isinstance(output, torch.Tensor) else tree_leaves(output):
            if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
                leaf.register_hook(lambda _grad, name=names[module]: first_gradient(name, reported))

    handles = [register_module_forward_pre_hook(before), register_module_forward_hook(after)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def watch_waits(recorder: TraceRecorder) -> Iterator[None]:
    """Record every wait for a collective while the context lasts."""
    original = dist.Work.wait

    def wait(work: dist.Work, *args: Any, **kwargs: Any) -> Any:
        start = time.monotonic()
        try:
            return original(work, *args, **kwargs)
        finally:
            recorder.waited(start, time.monotonic())

    with mock.patch.object(dist.Work, "wait", wait):
        yield
