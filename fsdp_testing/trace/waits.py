"""How long does a rank wait for its collectives? `Work.wait` is timed while the trace lasts.

Waits inside C++ (DDP's reducer) are not seen.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

from fsdp_testing.trace.recorder import TraceRecorder


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

    setattr(dist.Work, "wait", wait)  # noqa: B010 - a method of torch's, replaced for the length of the trace
    try:
        yield
    finally:
        setattr(dist.Work, "wait", original)  # noqa: B010 - as above
