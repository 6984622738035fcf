"""Order, memory and precision on devices: what holds however late each stream is, and whatever freed memory holds.

Run as test_cuda_training.py is. What CUDA alone can say is skipped on other devices, with that reason.
"""

from __future__ import annotations

import contextlib
import functools
import gc
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch.nn.modules import module as modules

from fsdp_ref import CPUOffload, MixedPrecision
from fsdp_ref.comm.streams import DeviceStreams
from fsdp_ref.errors import FsdpRuntimeError
from fsdp_ref.plan.traffic import peak_bytes
from fsdp_ref.plan.unit_layouts import unit_layouts
from fsdp_ref.sharded_grad_scaler import ShardedGradScaler
from fsdp_ref.storage.memory import FlatBuffer

pytestmark = [pytest.mark.gpu, pytest.mark.world(2, backend="gloo-cuda")]
CYCLES = 2_000_000  # about a millisecond of a CUDA device


def needs_cuda(device: torch.device, what: str) -> None:
    if device.type != "cuda":
        pytest.skip(f"needs CUDA: {what}")


@contextlib.contextmanager
def asleep(device: torch.device, streams: str) -> Iterator[None]:
    """Work of the default stream, or of the others, is late; a CUDA device sleeps before it."""
    if device.type != "cuda":
        device_module = torch.get_device_module(device)
        device_module.set_late(streams)
        try:
            yield
        finally:
            device_module.set_late("all")
    elif streams == "others":
        enter = torch.cuda.StreamContext.__enter__

        def late(context: Any) -> Any:
            result = enter(context)
            torch.cuda._sleep(CYCLES)
            return result

        with mock.patch.object(torch.cuda.StreamContext, "__enter__", late):
            yield
    else:
        begun = modules.register_module_forward_pre_hook(lambda module, args: torch.cuda._sleep(CYCLES))
        back = modules.register_module_full_backward_pre_hook(lambda module, grads: torch.cuda._sleep(CYCLES))
        try:
            yield
        finally:
            begun.remove()
            back.remove()


@contextlib.contextmanager
def poisoned(*, early: bool = False) -> Iterator[list[int]]:
    """Whoever reads full parameters that were given up reads NaN, written by the stream that the memory goes back to.

    Args:
        early: That stream does not wait for the last reader.
    """
    free, sizes = DeviceStreams._free, []

    def overwritten(streams: DeviceStreams, buffer: FlatBuffer) -> None:
        if not early:
            streams._unshard.wait_event(streams._unfreed[buffer])
        with streams.unshard():
            buffer.tensor.fill_(torch.nan)
        sizes.append(buffer.tensor.nbytes)
        free(streams, buffer)

    with mock.patch.object(DeviceStreams, "_free", overwritten):
        yield sizes


@pytest.mark.parametrize("streams", ["default", "others"])
@pytest.mark.parametrize("offload", [False, True])
def test_order_holds_while_streams_sleep(pair, api, strategy, streams, offload) -> None:
    case = pair(api, strategy, cpu_offload=CPUOffload(offload))
    with asleep(case.device, streams):
        case.train(2)


def test_a_wait_that_is_left_out_shows_while_streams_sleep(pair) -> None:
    case = pair("orig")
    left_out = mock.patch.object(DeviceStreams, "reduce_after_compute", return_value=None)
    with asleep(case.device, "default"), left_out, pytest.raises(AssertionError):
        case.train(2)


def test_nobody_reads_memory_that_was_freed(pair, api, strategy) -> None:
    case = pair(api, strategy)
    with poisoned() as sizes:
        case.train(2)
    assert bool(sizes) == (strategy != "NO_SHARD")


def test_memory_that_is_freed_too_early_is_read(pair) -> None:
    case = pair("orig")
    with asleep(case.device, "default"), poisoned(early=True), pytest.raises(AssertionError):
        case.train(2)


@contextlib.contextmanager
def gathered_bytes() -> Iterator[list[int]]:
    """List how much memory full parameters have whenever that changes."""
    resize, held, totals = torch.UntypedStorage.resize_, {}, [0]

    def noted(storage: torch.UntypedStorage, size: int) -> Any:
        result = resize(storage, size)
        held[storage._cdata] = size
        totals.append(sum(held.values()))
        return result

    with mock.patch.object(torch.UntypedStorage, "resize_", noted):
        yield totals


def test_full_parameters_take_what_is_planned(pair, api, strategy) -> None:
    """To the byte on the host's side; the device has grown by that, and by activations and gradients."""
    wide = functools.partial(pair().Net, 6, 5)
    case = pair(api, strategy, wide)
    names = [f"blocks.{number}" for number in range(5)]
    shards = 1 if strategy == "NO_SHARD" else case.world.size
    units = unit_layouts(wide().double(), world_size=shards, units=names, aligned=api != "flat")
    case.train(1)
    measured = case.device_module
    gc.collect()
    measured.synchronize()
    measured.reset_peak_memory_stats()
    before = measured.memory_allocated()
    with gathered_bytes() as totals:
        case.backward(1)
    measured.synchronize()
    planned = peak_bytes(units, strategy=strategy, has_streams=True)
    assert max(totals) == planned
    assert totals[-1] == 0
    assert measured.max_memory_allocated() - before >= planned


@contextlib.contextmanager
def still_read(device: torch.device) -> Iterator[list[int]]:
    """List, whenever a gather gets its memory, how many full buffers that were given up the device still reads."""
    free, allocate, one, counts = DeviceStreams.free, DeviceStreams.allocate, torch.ones(1, device=device), []
    over: dict[FlatBuffer, torch.Tensor] = {}

    def given_up(streams: DeviceStreams, buffer: FlatBuffer) -> None:
        over[buffer] = torch.zeros(1, pin_memory=True)
        over[buffer].copy_(one, non_blocking=True)  # after the last reader, and before what the host may wait for
        free(streams, buffer)

    def gathered(streams: DeviceStreams, buffer: FlatBuffer) -> None:
        allocate(streams, buffer)
        over.pop(buffer, None)
        counts.append(sum(value.item() != 1 for value in over.values()))

    with mock.patch.object(DeviceStreams, "free", given_up), mock.patch.object(DeviceStreams, "allocate", gathered):
        yield counts


@pytest.mark.parametrize(("api", "limit"), [("flat", True), ("orig", True), ("orig", False), ("composable", True)])
def test_a_limit_of_gathers_holds_the_host_back(pair, api, limit) -> None:
    """One full buffer may still be read, in whatever step it was given up; without the limit more are."""
    options = {} if api == "composable" else {"limit_all_gathers": limit}
    case = pair(api, "FULL_SHARD", functools.partial(pair().Net, 6, 5, slow=True), **options)
    case.train(1)
    with still_read(case.device) as counts:
        for seed in range(3):
            case.model(case.inputs(seed)[case.world.rank]).square().mean().backward()
            case.optimizer.step()
            case.optimizer.zero_grad()
    assert len(counts) >= 3 * 10
    assert max(counts) <= 1 if limit else max(counts) > 1


def test_offloaded_shards_are_pinned(pair, api) -> None:
    case = pair(api, cpu_offload=CPUOffload(True))
    case.train(1)
    handles = [unit.handle for unit in case.units() if unit.handle.fqns]
    assert handles
    assert all(handle.shard_S.is_pinned() for handle in handles)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_scaled_gradients_in_half_precision(pair, api, dtype) -> None:
    """A scale that is a power of two changes no bit; a step that one rank cannot take is skipped on all.

    Below 2**-14 float16 has steps of 2**-24, and a scale does change bits: the loss is a multiple that keeps gradients above.
    """
    cases = [pair(api, mixed_precision=MixedPrecision(dtype, reduce_dtype=torch.float32)) for _ in range(2)]
    scalers = [ShardedGradScaler(cases[0].device.type, init_scale=4.0, enabled=enabled) for enabled in (True, False)]
    for case, scaler in zip(cases, scalers, strict=True):
        optimizer = torch.optim.SGD(case.model.parameters(), lr=0.5 / 1024)
        for seed in range(3):
            broken = seed == 1
            if broken and not scaler.is_enabled():
                continue
            loss = 1024 * case.model(case.inputs(seed)[case.world.rank]).square().mean()
            scaler.scale(loss).backward()
            if broken and case.world.rank == 1:
                next(param for param in case.model.parameters() if param.grad is not None).grad.fill_(torch.inf)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    assert scalers[0].get_scale() == 2.0
    mine, other = (case.params() for case in cases)
    for name, value in mine.items():
        torch.testing.assert_close(value, other[name], rtol=0.0, atol=0.0)


@pytest.mark.parametrize("api", ["orig", "composable"])  # gradients are shown on originals only
def test_autocast_with_a_scaler(pair, api) -> None:
    case = pair(api)
    scaler = ShardedGradScaler(case.device.type, init_scale=4.0)
    with torch.autocast(case.device.type, dtype=torch.bfloat16):
        xs = case.inputs(0).float()
        out = case.model.float()(xs[case.world.rank])
        loss = out.square().mean()
    assert out.dtype == torch.bfloat16
    scaler.scale(loss).backward()
    scaler.unscale_(case.optimizer)
    plain = case.plain.float()
    for x in xs:
        # A context for each: within one, autocast keeps the copy of a weight, whose gradients would add up in bfloat16.
        with torch.autocast(case.device.type, dtype=torch.bfloat16):
            loss = plain(x).square().mean()
        loss.backward()
    with case.full(with_grads=True):
        for have, other in zip(case.model.parameters(), plain.parameters(), strict=True):
            # Each rank's gradient is the same to the bit; their mean in float32 has a rounding for each rank, and one more.
            want = other.grad / case.world.size
            bound = (case.world.size + 1) * 2.0**-24 * float(other.grad.abs().max()) * case.world.size
            torch.testing.assert_close(have.grad, want, rtol=0.0, atol=bound)


def test_a_captured_forward_is_refused(pair, api) -> None:
    case = pair(api)
    case.train(1)
    x = case.inputs(1)[case.world.rank]
    with contextlib.ExitStack() as stack:
        if case.device.type == "cuda":
            stack.enter_context(torch.cuda.graph(torch.cuda.CUDAGraph()))
        else:
            stack.enter_context(
                mock.patch.object(case.device_module, "is_current_stream_capturing", return_value=True, create=True)
            )
        with pytest.raises(FsdpRuntimeError, match="cannot be captured in a graph of the device"):
            case.model(x)
    case.train(2)


@pytest.mark.world(2, backend="nccl")
def test_gathers_overlap_with_computation(pair) -> None:
    """Some kernel of NCCL runs while a kernel of another stream does: seen in the profiler's events of one step."""
    case = pair("orig", "FULL_SHARD", functools.partial(pair().Net, slow=True))
    needs_cuda(case.device, "a profiler's events of kernels")
    case.train(2)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        case.backward(2)
        torch.cuda.synchronize()
    spans: dict[bool, list[Any]] = {True: [], False: []}
    for event in profile.events():
        if event.device_type == torch.autograd.DeviceType.CUDA and "mem" not in event.name.lower():
            spans["nccl" in event.name.lower()].append(event.time_range)
    assert any(one.start < other.end and other.start < one.end for one in spans[True] for other in spans[False])
