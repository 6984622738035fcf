"""Races: waits that the reference, FSDP2 or FSDP1 leaves out, and memory that one of them gives back too early.

Numbers stay right on the CPU. The faults are planted in the real implementations, whose unbroken selves are the control.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from planting import planted
from torch.distributed.fsdp import _limiter_utils, _runtime_utils
from torch.distributed.fsdp._fully_shard import _fsdp_param_group as fsdp2

from fsdp_ref.comm.streams import DeviceStreams
from fsdp_ref.storage.memory import FlatBuffer
from fsdp_testing.adapters.adapter import Adapter


def reference(method: str, caught_by: str) -> Callable[[Callable[..., Any]], Adapter]:
    return planted("fsdp_ref-wrapper", DeviceStreams, method, caught_by)


@reference("compute_after_gather", "streams.mixed_precision")
def computes_before_gathered(_original: Any, _streams: DeviceStreams) -> None:
    """Compute does not wait for the unshard stream, which casts what is not gathered."""


@reference("reduce_after_compute", "streams.accumulation")
def reduces_before_computed(_original: Any, _streams: DeviceStreams) -> None:
    """The reduction does not wait for the gradients."""


@reference("free", "streams.forward_only")
def frees_what_compute_reads(_original: Any, _streams: DeviceStreams, buffer: FlatBuffer) -> None:
    """Full parameters are freed at once: the next gather gets memory that kernels still read."""
    buffer.free()


@reference("__init__", "streams.limited_gathers")
def never_waits_for_released_units(original: Any, streams: DeviceStreams, device: Any, **_limit: Any) -> None:
    """The host gathers without a limit (the option is read, and not obeyed)."""
    original(streams, device, limit_all_gathers=False)


@reference("used_by_reduce", "streams.accumulation")
def frees_what_is_reduced(_original: Any, _streams: DeviceStreams, _tensor: Any) -> None:
    """Full gradients are freed while the reduction reads them."""


@reference("gather_after_compute", "streams.training")
def gathers_before_the_step(_original: Any, _streams: DeviceStreams) -> None:
    """Gathers do not wait for the optimizer's step (pytorch PR 74998)."""


@reference("gather_after_compute", "streams.summon")
def gathers_before_the_edit(_original: Any, _streams: DeviceStreams) -> None:
    """Gathers do not wait for an edit of full parameters."""


@reference("gather_after_prepare", "streams.mixed_precision")
def gathers_before_the_cast(_original: Any, _streams: DeviceStreams) -> None:
    """The gather does not wait for the cast of its shard."""


@reference("compute_after_reduce", "streams.clipping")
def clips_before_reduced(_original: Any, _streams: DeviceStreams) -> None:
    """Clipping and the step do not wait for reductions."""


@planted("torch-fsdp2", fsdp2.FSDPParamGroup, "_wait_all_gather_streams_on_event", "streams.prefetch")
def copies_in_too_early(_original: Any, _group: Any, _event: Any) -> None:
    """The next gather does not wait until the last one was copied out."""


@planted("torch-fsdp2", fsdp2, "foreach_all_gather", "streams.unshard")
def records_the_event_too_early(original: Any, params: Any, group: Any, async_op: bool, *rest: Any) -> Any:
    """The event of a gather is recorded before the gather is issued."""
    event = rest[1].record_event()
    result = original(params, group, async_op, *rest)
    return None if result is None else result._replace(all_gather_event=event)


@planted("torch-fsdp2", fsdp2, "foreach_reduce", "streams.training")
def reuses_a_buffer_that_is_read(original: Any, *arguments: Any) -> Any:
    """The reduce-scatter's input is not held until it has been read (pytorch PR 177319)."""
    first, *others = original(*arguments)
    return (first[:0].clone(), *others)


@planted("torch-fsdp2", fsdp2, "foreach_reduce", "streams.hybrid")
def frees_before_the_second_reduction(original: Any, *arguments: Any) -> Any:
    """The input of the reduction over replicas is not held (pytorch PR 140044, 180900)."""
    *others, all_reduce_input, event, partial = original(*arguments)
    return (*others, None if all_reduce_input is None else all_reduce_input[:0].clone(), event, partial)


@planted("torch-fsdp1", _limiter_utils._FreeEventQueue, "dequeue_if_needed", "streams.limited_gathers")
def never_takes_from_the_queue(_original: Any, _queue: Any) -> None:
    """The host never waits for the events of released units."""


@planted("torch-fsdp1", _runtime_utils, "_wait_for_computation_stream", "streams.state")
def unshards_before_the_step(_original: Any, *_arguments: Any) -> None:
    """Gathers do not wait for the step, nor for a loaded state."""
