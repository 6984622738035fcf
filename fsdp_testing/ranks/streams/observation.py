"""Observes what a rank issues on which stream: on a device, or on the CPU as if it were a device with streams.

The device's module (`torch.cpu`, `torch.cuda`, a vendor's) gets recorded streams and events, and all work really runs on one
stream. A dispatch mode sees each operator with the tensors that it reads and writes. On a device the host counts as a stream for
its own reads and writes: a non-blocking copy to or from pinned memory is not complete until the host waits.
A collective runs on a stream of its group, as NCCL's do, from the current stream's state until a wait for it; a collective
that returns only when complete runs on the current stream. Collectives that C++ code issues and awaits (DDP's reducer) count as
awaited at once, since their waits cannot be seen.

The numbers are those of an unobserved run. Do not observe inside `deliver_late`, whose copies the observation cannot see.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from fsdp_testing.base.compat import operators_run_by, storage_key
from fsdp_testing.errors import HarnessError
from fsdp_testing.ranks.ledger.readers import METHODS
from fsdp_testing.ranks.streams.history import History, UseRecorded
from fsdp_testing.ranks.streams.recorder import StreamRecorder, run_noted
from fsdp_testing.ranks.streams.simulated import Event, Stream, StreamContext


@contextmanager
def observe(device: torch.device | str = "cpu") -> Iterator[History]:
    """Record what this thread and its autograd engine issue on which stream while the context lasts.

    Make the model, or at least run its first step, inside: streams made earlier are not recorded.

    Args:
        device: The device on which the rank computes.

    Yields:
        The history, complete when the context has ended.

    Raises:
        HarnessError: The device's module has no streams.
    """
    kind = torch.device(device).type
    module = getattr(torch, kind, None)
    if not all(hasattr(module, name) for name in ("Stream", "Event", "current_stream", "stream")):
        raise HarnessError(
            f"streams: expected torch.{kind} to have Stream, Event, current_stream and stream, but some are missing. "
            "The streams of such a device cannot be checked; have its package register a module with them."
        )
    with operators_run_by(partial(run_noted, StreamRecorder(History(), kind))):
        torch.empty(0)  # the first operator under a mode makes torch import its compiler, which must not be observed
    history = History()
    recorder = StreamRecorder(history, kind)
    with ExitStack() as stack:
        for change in _replacements(recorder, module):
            stack.enter_context(change)
        stack.enter_context(operators_run_by(partial(run_noted, recorder)))
        try:
            yield history
        finally:
            recorder.close()


def _replacements(recorder: StreamRecorder, module: Any) -> Iterator[Any]:
    """Yield context managers that replace parts of torch while a rank is observed."""

    def current_stream(device: Any = None) -> Stream:
        return recorder.current

    def default_stream(device: Any = None) -> Stream:
        return recorder.default

    def stream_context(stream: Stream | None) -> StreamContext:
        return StreamContext(recorder, stream)

    def make_stream(*args: Any, **kwargs: Any) -> Stream:
        return Stream(recorder)

    def make_event(*args: Any, **kwargs: Any) -> Event:
        return Event(recorder)

    def synchronize(device: Any = None) -> None:
        recorder.synchronize()

    def record_stream(tensor: Tensor, stream: Stream) -> None:
        recorder.note(UseRecorded(recorder.block(tensor).number, stream.number))

    for name, value in {
        "Stream": make_stream,
        "Event": make_event,
        "current_stream": current_stream,
        "default_stream": default_stream,
        "set_stream": recorder.enter,
        "stream": stream_context,
        "StreamContext": stream_context,
        "synchronize": synchronize,
    }.items():
        if hasattr(module, name):
            yield patch.object(module, name, value)
    yield patch.object(Tensor, "record_stream", record_stream)
    yield from _of_fsdp1(record_stream)
    yield patch.object(torch.UntypedStorage, "resize_", _resizing(recorder, torch.UntypedStorage.resize_))
    yield patch.object(dist.Work, "wait", _waiting(recorder, dist.Work.wait))
    for name in METHODS:
        if (method := vars(dist.ProcessGroup).get(name)) is not None:
            yield patch.object(dist.ProcessGroup, name, _issuing(recorder, method))


def _of_fsdp1(record_stream: Callable[[Tensor, Stream], None]) -> Iterator[Any]:
    """FSDP1 calls record_stream only on devices that it knows; its functions hold this one under another name."""
    for module in list(sys.modules.values()):
        if getattr(module, "__name__", "").startswith(
            "torch.distributed.fsdp."
        ) and "_no_dispatch_record_stream" in vars(module):
            yield patch.object(module, "_no_dispatch_record_stream", record_stream)


def _resizing(recorder: StreamRecorder, method: Callable[..., Any]) -> Callable[..., Any]:
    def resize(storage: torch.UntypedStorage, size: int) -> Any:
        if size != storage.nbytes():
            recorder.sweep()
            recorder.freed(storage_key(storage))
        result = method(storage, size)
        if size:
            recorder.block(torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage), made=True)
        return result

    return resize


def _waiting(recorder: StreamRecorder, method: Callable[..., Any]) -> Callable[..., Any]:
    def wait(work: Any, *args: Any, **kwargs: Any) -> Any:
        # gloo copies a result to its place at the wait; on a device it is already there.
        before, recorder.silent = recorder.silent, True
        try:
            result = method(work, *args, **kwargs)
        finally:
            recorder.silent = before
        recorder.waited(work)
        return result

    return wait


def _issuing(recorder: StreamRecorder, method: Callable[..., Any]) -> Callable[..., Any]:
    """Tie the work object that a group's method returns to the collective that it issued."""

    def issue(group: Any, *args: Any, **kwargs: Any) -> Any:
        before, recorder.caller, recorder.issued = recorder.caller, group, None
        try:
            result = method(group, *args, **kwargs)
        finally:
            recorder.caller = before
        if recorder.issued is not None and isinstance(result, dist.Work):
            recorder.pend(result, recorder.issued)
        return result

    return issue
