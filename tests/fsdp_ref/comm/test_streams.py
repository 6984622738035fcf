"""Who waits for whom, and which memory is recorded before it is given back: the order of calls, seen without a device.

That the calls do on a device what they say is shown by tests/fsdp_ref/behaviours/gpu.
"""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch import nn

from fsdp_ref import CPUOffload, MixedPrecision
from fsdp_ref import FullyShardedDataParallel as FSDP
from fsdp_ref.annotations import units_under
from fsdp_ref.api.trees import no_sync
from fsdp_ref.comm.streams import DeviceStreams, Streams, streams_for
from fsdp_ref.runtime.unit import Ahead
from fsdp_ref.states import ReshardReason
from fsdp_ref.storage.memory import FlatBuffer, ScratchPool

pytestmark = pytest.mark.world(2, backend="fake")


class Recording(Streams):
    """Notes what it is asked for; tensors that are recorded must still have their memory."""

    def __init__(self):
        self.calls = []
        self.unfreed = []
        self.where = "compute"

    def note(self, what, tensor=None):
        if tensor is not None:
            assert tensor.untyped_storage().size() >= tensor.nbytes > 0
            what = f"{what} {str(tensor.dtype).removeprefix('torch.')}[{tensor.numel()}] on {self.where}"
        self.calls.append(what)

    @contextlib.contextmanager
    def on(self, where):
        before, self.where = self.where, where
        try:
            yield
        finally:
            self.where = before

    def post_backward(self):
        return self.on("post-backward")

    def gather_after_compute(self):
        self.note("gathers wait for compute")

    def compute_after_gather(self):
        self.note("compute waits for gathers")

    def reduce_after_compute(self):
        self.note("reductions wait for compute")

    def compute_after_reduce(self):
        self.note("compute waits for reductions")

    def host_after_copies(self):
        self.note("the host waits for copies")

    def used_by_compute(self, tensor):
        self.note("compute reads", tensor)

    def free(self, buffer):
        self.note("free after compute", buffer.tensor)
        self.unfreed.append(buffer)

    def free_rest(self):
        while self.unfreed:
            self.unfreed.pop().free()

    def used_by_reduce(self, tensor):
        self.note("reduction reads", tensor)


@pytest.fixture
def sharded(world):
    """A unit of 12 elements (6 a rank) in float32 that computes in bfloat16, with recording streams."""
    model = FSDP(nn.Linear(3, 4, bias=False), mixed_precision=MixedPrecision(torch.bfloat16), use_orig_params=True)
    model(torch.ones(1, 3))
    (_, _, unit), *_ = units_under(model)
    streams = unit.root.streams = unit.handle.streams = Recording()
    unit.reshard(ReshardReason.OUT_OF_DATE)
    streams.calls.clear()
    return model, unit, streams


def test_memory_is_recorded_where_it_was_read_before_it_is_freed(sharded):
    _, unit, streams = sharded
    unit.unshard()
    # Only when compute has waited for the gather does compute's place in time say that the gather has read the cast.
    assert streams.calls == ["compute waits for gathers", "compute reads bfloat16[6] on compute"]
    streams.calls.clear()
    unit.handle.reshard()
    assert streams.calls == ["free after compute bfloat16[12] on compute"]


def test_a_gather_that_nobody_used_is_waited_for_before_it_is_freed(sharded):
    _, unit, streams = sharded
    unit.handle.start_unshard()
    unit.handle.reshard()
    assert streams.calls[0] == "compute waits for gathers"
    assert streams.calls[-1] == "free after compute bfloat16[12] on compute"


def test_gathers_wait_for_what_changed_the_shard(sharded):
    model, unit, streams = sharded
    with torch.no_grad():
        model(torch.ones(1, 3))
    assert streams.calls[0] == "gathers wait for compute"  # the optimizer's step
    streams.calls.clear()
    for param in model.parameters():
        param.data = torch.ones_like(param)
    unit.unshard(Ahead.USER)
    assert streams.calls == ["gathers wait for compute"] * 2  # the copy of what was assigned; whatever came before
    unit.reshard(ReshardReason.OUT_OF_DATE)


def test_reductions_wait_and_kept_gradients_are_recorded(sharded):
    model, _, streams = sharded
    with no_sync(model):
        model(torch.ones(1, 3)).sum().backward()
    loss = model(torch.ones(1, 3)).sum()
    streams.calls.clear()
    loss.backward()
    calls = [call for call in streams.calls if "reduc" in call]
    assert calls == [
        "reductions wait for compute",
        "reduction reads bfloat16[12] on compute",  # this backward's gradient
        "reduction reads float32[12] on post-backward",  # what no_sync kept
        "compute waits for reductions",
    ]


@pytest.mark.filterwarnings("ignore:.*:UserWarning")
@pytest.mark.parametrize("offload", [False, True])
def test_the_host_waits_only_for_gradients_that_it_reads_itself(world, offload):
    model = FSDP(nn.Linear(3, 4), cpu_offload=CPUOffload(offload), use_orig_params=True)
    model(torch.ones(1, 3))
    (_, _, unit), *_ = units_under(model)
    streams = unit.root.streams = unit.handle.streams = Recording()
    loss = model(torch.ones(1, 3)).sum()
    streams.calls.clear()
    loss.backward()
    assert ("the host waits for copies" in streams.calls) == offload


def test_gradients_of_a_failed_backward_are_waited_for_too(sharded):
    model, _, streams = sharded
    x = torch.ones(1, 3, requires_grad=True)
    loss = model(x).sum()
    x.register_hook(lambda grad: 1 / 0)
    streams.calls.clear()
    with pytest.raises(ZeroDivisionError):
        loss.backward()
    assert streams.calls[-1] == "compute waits for reductions"


@pytest.mark.filterwarnings("ignore:.*:UserWarning")
@pytest.mark.parametrize("offload", [False, True])
def test_the_host_waits_for_shards_that_the_device_reads_from_it(world, offload):
    model = FSDP(nn.Linear(3, 4), cpu_offload=CPUOffload(offload), use_orig_params=True)
    model(torch.ones(1, 3))
    (_, _, unit), *_ = units_under(model)
    streams = unit.root.streams = unit.handle.streams = Recording()
    with torch.no_grad():
        model(torch.ones(1, 3))
    assert ("the host waits for copies" in streams.calls) == offload


def test_scratch_keeps_memory_of_the_host_only():
    pool = ScratchPool()
    for device in ("cpu", "meta"):
        pool.give(pool.take(4, torch.float32, torch.device(device)))
    assert pool.free_bytes == 16


class Logged:
    """A device's module whose streams and events note what they are asked for."""

    def __init__(self, log):
        self.log = log

    def Event(self):
        event = self
        number = self.log.count("recorded")

        class Event:
            def record(self, stream):
                event.log.append("recorded")

            def synchronize(self):
                event.log.append(f"host waits for {number}")

            def __repr__(self):
                return str(number)

        return Event()

    def Stream(self, device, priority):
        log = self.log

        class Stream:
            def wait_event(self, event):
                log.append(f"gathers wait for {event}")

        return Stream()

    def current_stream(self, device):
        return "compute"

    def stream(self, stream):
        return contextlib.nullcontext()


@pytest.mark.parametrize("limit", [False, True])
def test_a_full_buffer_is_freed_when_its_readers_are_waited_for(monkeypatch, limit):
    log = []
    monkeypatch.setattr(torch, "get_device_module", lambda device: Logged(log))
    streams = DeviceStreams(torch.device("cpu"), limit_all_gathers=limit)
    first, second, third = (FlatBuffer(4, torch.float32, torch.device("cpu")) for _ in range(3))
    for buffer in (first, second):
        streams.allocate(buffer)
        streams.free(buffer)
    # The gather of the third overlaps with what reads the second, and gets the memory of the first.
    log.clear()
    streams.allocate(third)
    assert log == ["host waits for 0"] * limit + ["gathers wait for 0"]
    assert [each.allocated for each in (first, second, third)] == [False, True, True]
    # Gathered again before it was freed.
    log.clear()
    streams.allocate(second)
    assert log == ["gathers wait for 1"]
    assert second.allocated
    streams.free(third)
    streams.free_rest()
    assert [each.allocated for each in (first, second, third)] == [False, True, False]


@pytest.mark.parametrize("limit", [False, True])
def test_a_limit_of_gathers_holds_over_steps(monkeypatch, limit):
    """A pass of one unit never had two buffers at once, and its host ran ahead of the device by any number of steps."""
    log = []
    monkeypatch.setattr(torch, "get_device_module", lambda device: Logged(log))
    streams = DeviceStreams(torch.device("cpu"), limit_all_gathers=limit)
    buffer = FlatBuffer(4, torch.float32, torch.device("cpu"))
    for _ in range(4):
        streams.allocate(buffer)
        streams.free(buffer)
        streams.free_rest()
    assert [line for line in log if line.startswith("host")] == ["host waits for 0", "host waits for 1"] * limit


def test_a_device_whose_module_nobody_registered_has_no_streams(monkeypatch):
    monkeypatch.setattr(torch, "get_device_module", None)
    assert type(streams_for(torch.device("maia"), limit_all_gathers=True)) is Streams
