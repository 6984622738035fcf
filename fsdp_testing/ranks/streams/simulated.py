"""Streams and events that compute nothing and note which stream waits for which.

They have the methods of `torch.cuda.Stream` and `torch.cuda.Event` that sharding code calls. While a rank is observed they
replace those of `torch.cpu`, which do nothing.
"""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager
from types import TracebackType

from fsdp_testing.ranks.streams.history import HOST, Entry, EventRecorded, EventWaited, History, StreamWaited


class Device:
    """The streams of one observed rank.

    Args:
        history: Receives the calls of streams and events.
    """

    def __init__(self, history: History) -> None:
        self.history = history
        self._lock = threading.Lock()
        self._events = 0
        self._streams = 0
        self._current = threading.local()
        self.default = Stream(self, "the default stream")

    def note(self, entry: Entry) -> None:
        """Add an entry to the history; overridden to note something before it."""
        self.history.entries.append(entry)

    def settle(self) -> None:
        """Really wait, where work is not done when it is issued."""

    def new_stream(self, name: str) -> int:
        """Return the number of a new stream."""
        with self._lock:
            number, self._streams = self._streams, self._streams + 1
        self.history.streams[number] = name or f"stream {number}"
        return number

    def new_event(self) -> int:
        """Return the number of a new event."""
        with self._lock:
            number, self._events = self._events, self._events + 1
        return number

    @property
    def current(self) -> Stream:
        """The stream that this thread issues work on."""
        stream: Stream = getattr(self._current, "stream", self.default)
        return stream

    def enter(self, stream: Stream) -> None:
        """Issue this thread's work on `stream` from now on."""
        self._current.stream = stream

    def synchronize(self) -> None:
        """Make the host wait for all streams."""
        self.settle()
        for number in list(self.history.streams):
            self.note(StreamWaited(HOST, number))


class Event:
    """Stands for the work of a stream up to the place where it was recorded."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self.number = device.new_event()

    def record(self, stream: Stream | None = None) -> None:
        """Stand for all work given to `stream` (default: the current one) so far."""
        self._device.note(EventRecorded(self.number, (stream or self._device.current).number))

    def wait(self, stream: Stream | None = None) -> None:
        """Make `stream`, by default the current one, wait for the event."""
        self._device.note(EventWaited(self.number, (stream or self._device.current).number))

    def synchronize(self) -> None:
        """Make the host wait for the event."""
        self._device.settle()
        self._device.note(EventWaited(self.number, HOST))

    def query(self) -> bool:
        """Wait for the event and return True: the caller may then read the results of its work."""
        self.synchronize()
        return True


class Stream:
    """An order of work; equal to itself alone."""

    def __init__(self, device: Device, name: str = "") -> None:
        self._device = device
        self.number = device.new_stream(name)

    def wait_stream(self, stream: Stream) -> None:
        """Wait for all that `stream` was given so far."""
        self._device.note(StreamWaited(self.number, stream.number))

    def wait_event(self, event: Event) -> None:
        """Wait for `event`."""
        event.wait(self)

    def record_event(self, event: Event | None = None) -> Event:
        """Record `event`, by default a new one, and return it."""
        event = event or Event(self._device)
        event.record(self)
        return event

    def synchronize(self) -> None:
        """Make the host wait for all that the stream was given so far."""
        self._device.settle()
        self._device.note(StreamWaited(HOST, self.number))

    def query(self) -> bool:
        """Wait for the stream and return True."""
        self.synchronize()
        return True


class StreamContext(AbstractContextManager[None]):
    """Issues the work of this thread on `stream`; None changes nothing."""

    def __init__(self, device: Device, stream: Stream | None) -> None:
        self._device = device
        self._stream = stream
        self._before: list[Stream] = []

    def __enter__(self) -> None:
        self._before.append(self._device.current)
        if self._stream is not None:
            self._device.enter(self._stream)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._device.enter(self._before.pop())
