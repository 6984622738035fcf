"""The streams that a unit's work runs on, and who waits for whom.

Gathers run on the *unshard* stream, casts and host-to-device copies before them on the *pre-unshard* stream, gradient
casts and reductions on the *post-backward* stream, compute on whatever stream is current. Any device whose module in torch
has streams gets these; elsewhere, and on the CPU, whose streams do nothing, :class:`Streams` has the same methods and does
nothing, so that the runtime has one path.

Discipline, in one place: (1) memory is allocated on the stream that issues its fill; (2) a reader on another
stream first waits for an event; (3) a full buffer goes back to the stream that it came from, once that stream or the host has
waited for its last reader; smaller memory (casts of shards, gradients) is recorded on the stream that reads it
(``record_stream``). No call to a device happens before a unit on it exists.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from fsdp_ref.errors import FsdpRuntimeError
from fsdp_ref.storage.memory import FlatBuffer, pins_memory

# One object for all: it keeps nothing, so it may be entered within itself.
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
        # Pinned where there is such memory: to any other the copy would block the host after all.
        super().__init__(torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=pins_memory(device)))
        # On the current stream, which made the values; the event says when the host may look.
        self._tensor.copy_(tensor, non_blocking=True)
        self._copied = module.Event()
        self._copied.record(module.current_stream(device))

    def values(self) -> list[bool]:
        """Return them; the host waits if the device has not come so far."""
        # For this copy alone, and not for what was issued to the stream later.
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

    def host_after_copies(self) -> None:
        """Make the host wait for copies that do not block it: of shards from its memory, of gradients to it."""

    def used_by_compute(self, tensor: Tensor) -> None:
        """Record that the current stream reads ``tensor``, which is about to be freed."""

    def used_by_reduce(self, tensor: Tensor) -> None:
        """Record that the post-backward stream reads ``tensor``, which was made on the current one."""

    def read_later(self, tensor: Tensor) -> Later:
        """Begin to copy a small tensor of booleans to the host, which reads it later."""
        return Later(tensor)

    def allocate(self, buffer: FlatBuffer) -> None:
        """Give a full buffer its memory, on the unshard stream; call it before anything is issued that fills it."""
        buffer.allocate()

    def free(self, buffer: FlatBuffer) -> None:
        """Take the memory of a full buffer, which the current stream read last; maybe not before :meth:`free_rest`."""
        buffer.free()

    def free_rest(self) -> None:
        """Take the memory of all buffers that were given to :meth:`free`, without stopping the host."""


class DeviceStreams(Streams):
    """The streams of one root on one device; all of its units share them.

    Args:
        device: the compute device.
        limit_all_gathers: the host waits until the device reads at most one other released full buffer.
    """

    # With the buffer that computes and the one that is gathered, three have their memory at most.
    MAX_UNFREED = 1

    def __init__(self, device: torch.device, *, limit_all_gathers: bool) -> None:
        self._device = device
        self._module = torch.get_device_module(device)
        # Without it the host runs ahead as far as its queue lets it, and the memory of gathers with it.
        self._limit = limit_all_gathers
        # High priority: communication that compute waits for goes first on the device.
        self._unshard = self._module.Stream(device, priority=-1)
        # Apart from the gathers, so that the next shard is cast or fetched while the present one is gathered.
        self._pre_unshard = self._module.Stream(device, priority=-1)
        # Apart again: a reduction waits for its gradients, and must not hold up the gather that backward needs next.
        self._post_backward = self._module.Stream(device, priority=-1)
        # Full buffers that were given up and still have their memory, each with the end of its last reader; oldest first.
        self._unfreed: dict[FlatBuffer, Any] = {}
        # Those ends that a limited host has not waited for, of freed buffers too: a pass is shorter than it may run ahead.
        self._unread: list[Any] = []

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
        # On the device; the host goes on and issues the gather at once.
        self._unshard.wait_stream(self._pre_unshard)

    def compute_after_gather(self) -> None:
        # For everything that was gathered so far: gathers are issued in the order in which they are needed.
        self._module.current_stream(self._device).wait_stream(self._unshard)

    def reduce_after_compute(self) -> None:
        # The gradients of this unit, and whatever else compute was given before: it is not far behind.
        self._post_backward.wait_stream(self._module.current_stream(self._device))

    def compute_after_reduce(self) -> None:
        # Once, at the end of backward: the optimizer comes next.
        self._module.current_stream(self._device).wait_stream(self._post_backward)

    def host_after_copies(self) -> None:
        # Both: after forward shards may still be read from the host, after backward gradients are written to it.
        self._pre_unshard.synchronize()
        self._post_backward.synchronize()

    def used_by_compute(self, tensor: Tensor) -> None:
        # The current stream has waited for the gather by now: what it is given later comes after the gather's read.
        tensor.record_stream(self._module.current_stream(self._device))

    def used_by_reduce(self, tensor: Tensor) -> None:
        # Autograd frees it as soon as the host returns; the allocator waits for this stream before it hands the
        # memory out.
        tensor.record_stream(self._post_backward)

    def read_later(self, tensor: Tensor) -> Later:
        return _OnItsWay(tensor, self._device)

    def allocate(self, buffer: FlatBuffer) -> None:
        last_read = self._unfreed.pop(buffer, None)
        self._unread = [event for event in self._unread if event is not last_read]
        while len(self._unread) > self.MAX_UNFREED:
            # Here, and not on the unshard stream alone: gradients, too, are held by kernels that the host issued ahead.
            self._unread.pop(0).synchronize()
        while len(self._unfreed) > self.MAX_UNFREED:
            # The oldest: its readers are the first to end, and the youngest's are what this gather shall overlap with.
            self._free(next(iter(self._unfreed)))
        with self.unshard():
            if last_read is not None:
                # Gathered again before it was freed: the memory is there, and the gather writes over what was read last.
                self._unshard.wait_event(last_read)
            buffer.allocate()

    def free(self, buffer: FlatBuffer) -> None:
        # Not at once: the allocator would hand the memory to the next gather while kernels of this stream still read it.
        # The unshard stream does not wait here either, for then the next gather would not overlap with this computation.
        event = self._module.Event()
        event.record(self._module.current_stream(self._device))
        self._unfreed[buffer] = event
        if self._limit:
            self._unread.append(event)

    def free_rest(self) -> None:
        for buffer in list(self._unfreed):
            self._free(buffer)

    def _free(self, buffer: FlatBuffer) -> None:
        # The memory goes back to the unshard stream, on which later gathers take it: it comes after the last reader.
        self._unshard.wait_event(self._unfreed.pop(buffer))
        buffer.free()


def streams_for(device: torch.device, *, limit_all_gathers: bool) -> Streams:
    """Return the streams for a compute device."""
    # A device that another package registered may have no module: ``torch.get_device_module`` would raise.
    has_streams = device.type != "meta" and hasattr(getattr(torch, device.type, None), "Stream")
    if device.type == "cpu":
        # torch's own do nothing; whoever puts others in their place watches what is asked of them.
        has_streams = torch.cpu.Stream.__module__ != "torch.cpu"
    # One set for each root: what another model gathers is no reason to wait.
    return DeviceStreams(device, limit_all_gathers=limit_all_gathers) if has_streams else Streams()


def refuse_capture(device: torch.device) -> None:
    """Refuse a stream that is captured in a graph, which would replay nothing of what the host decides.

    Raises:
        FsdpRuntimeError: The current one of ``device`` is.
    """
    captures = getattr(getattr(torch, device.type, None), "is_current_stream_capturing", None)
    if captures is not None and captures():
        raise FsdpRuntimeError(
            f"forward: expected a stream that works, got one of {device} that is being captured. A sharded module cannot be "
            "captured in a graph of the device: the host frees and gathers parameters at each step. Capture parts "
            "inside units that hold no parameters, or none."
        )
