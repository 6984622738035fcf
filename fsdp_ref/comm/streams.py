"""On which stream does which part of a unit's work run, and who waits for whom?

Gathers run on the *unshard* stream, casts and host-to-device copies before them on the *pre-unshard* stream, gradient
casts and reductions on the *post-backward* stream, compute on whatever stream is current. Where the device's module
(``torch.get_device_module``) has no streams, and on the CPU, whose streams do nothing, :class:`Streams` has the same methods
and does nothing, so that the runtime has one path.

Discipline, in one place: (1) memory is allocated on the stream that fills it; (2) whoever reads on another stream
first waits for an event; (3) memory freed after use on another stream is recorded there (``record_stream``), so that
the caching allocator does not hand it out too early. No call to a device happens before a unit on it exists.
"""

from __future__ import annotations

from collections import deque
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

_HERE = nullcontext()


class Later:
    """Values of a tensor of booleans that the host reads some time after they were computed."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor

    def values(self) -> list[bool]:
        """Return them; the host waits if the device has not come so far."""
        values: list[bool] = self._tensor.tolist()
        return values


class _OnItsWay(Later):
    """Values that are copied to memory which the device writes by itself."""

    def __init__(self, tensor: Tensor, device: torch.device) -> None:
        module = torch.get_device_module(device)
        super().__init__(torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=device.type != "cpu"))
        self._tensor.copy_(tensor, non_blocking=True)
        self._copied = module.Event()
        self._copied.record(module.current_stream(device))

    def values(self) -> list[bool]:
        """Return them; the host waits if the device has not come so far."""
        self._copied.synchronize()
        return super().values()


class Streams:
    """What the runtime asks of streams, where there are none (CPU): everything runs where it is called."""

    def unshard(self) -> AbstractContextManager[object]:
        """Issue gathers inside."""
        return _HERE

    def pre_unshard(self) -> AbstractContextManager[object]:
        """Issue what prepares a gather (casts, copies from the host) inside."""
        return _HERE

    def post_backward(self) -> AbstractContextManager[object]:
        """Issue gradient casts, reductions and copies to the host inside."""
        return _HERE

    def gather_after_compute(self) -> None:
        """Make gathers wait for what the current stream did so far to shards (the optimizer step, a user's edit)."""

    def gather_after_prepare(self) -> None:
        """Make the unshard stream wait for the pre-unshard stream."""

    def compute_after_gather(self) -> None:
        """Make the current stream wait for the unshard stream."""

    def reduce_after_compute(self) -> None:
        """Make the post-backward stream wait for the current stream."""

    def compute_after_reduce(self) -> None:
        """Make the current stream wait for the post-backward stream."""

    def host_after_prepare(self) -> None:
        """Make the host wait for the pre-unshard stream, which copies shards from it without blocking."""

    def host_after_reduce(self) -> None:
        """Make the host wait for the post-backward stream, which copied gradients to it without blocking."""

    def used_by_compute(self, tensor: Tensor) -> None:
        """Record that the current stream reads ``tensor``, which is about to be freed."""

    def used_by_reduce(self, tensor: Tensor) -> None:
        """Record that the post-backward stream reads ``tensor``, which was made on the current one."""

    def read_later(self, tensor: Tensor) -> Later:
        """Begin to copy a small tensor of booleans to the host, which reads it later."""
        return Later(tensor)

    def limit_gathers(self) -> None:
        """Block the host until at most two freed full parameters are still in use by the device."""

    def note_free(self) -> None:
        """Remember that a full parameter was freed here (see :meth:`limit_gathers`)."""


class DeviceStreams(Streams):
    """The streams of one root on one device; all of its units share them.

    Args:
        device: the compute device.
        limit_all_gathers: whether the host may run ahead of the device by two full parameters only.
    """

    MAX_INFLIGHT = 2

    def __init__(self, device: torch.device, *, limit_all_gathers: bool) -> None:
        self._device = device
        self._module = torch.get_device_module(device)
        self._limit = limit_all_gathers
        # High priority: communication that compute waits for goes first on the device.
        self._unshard = self._module.Stream(device, priority=-1)
        # Apart from the gathers, so that the next shard is cast or fetched while the present one is gathered.
        self._pre_unshard = self._module.Stream(device, priority=-1)
        self._post_backward = self._module.Stream(device, priority=-1)
        self._frees: deque[Any] = deque()

    def unshard(self) -> AbstractContextManager[object]:
        return self._module.stream(self._unshard)

    def pre_unshard(self) -> AbstractContextManager[object]:
        return self._module.stream(self._pre_unshard)

    def post_backward(self) -> AbstractContextManager[object]:
        return self._module.stream(self._post_backward)

    def gather_after_compute(self) -> None:
        # Both: a gather without a cast reads the shard itself, on the unshard stream.
        current = self._module.current_stream(self._device)
        self._unshard.wait_stream(current)
        self._pre_unshard.wait_stream(current)

    def gather_after_prepare(self) -> None:
        self._unshard.wait_stream(self._pre_unshard)

    def compute_after_gather(self) -> None:
        self._module.current_stream(self._device).wait_stream(self._unshard)

    def reduce_after_compute(self) -> None:
        self._post_backward.wait_stream(self._module.current_stream(self._device))

    def compute_after_reduce(self) -> None:
        self._module.current_stream(self._device).wait_stream(self._post_backward)

    def host_after_reduce(self) -> None:
        self._post_backward.synchronize()

    def host_after_prepare(self) -> None:
        self._pre_unshard.synchronize()

    def used_by_compute(self, tensor: Tensor) -> None:
        tensor.record_stream(self._module.current_stream(self._device))

    def used_by_reduce(self, tensor: Tensor) -> None:
        tensor.record_stream(self._post_backward)

    def read_later(self, tensor: Tensor) -> Later:
        return _OnItsWay(tensor, self._device)

    def limit_gathers(self) -> None:
        # The oldest first: its readers are the first to end.
        while self._limit and len(self._frees) >= self.MAX_INFLIGHT:
            self._frees.popleft().synchronize()

    def note_free(self) -> None:
        if self._limit:
            # On the current stream, which read the freed memory last.
            event = self._module.Event()
            event.record(self._module.current_stream(self._device))
            self._frees.append(event)


def streams_for(device: torch.device, *, limit_all_gathers: bool) -> Streams:
    """Return the streams for a compute device."""
    if _has_streams(device):
        return DeviceStreams(device, limit_all_gathers=limit_all_gathers)
    return Streams()


def _has_streams(device: torch.device) -> bool:
    if device.type == "cpu":
        # torch's own do nothing; whoever puts others in their place watches what is asked of them.
        return torch.cpu.Stream.__module__ != "torch.cpu"
    return device.type != "meta" and hasattr(torch.get_device_module(device), "Stream")
