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
from fsdp_ref.comm.streams import Streams
from fsdp_ref.runtime.reduction_settings import no_sync
from fsdp_ref.states import ReshardReason
from fsdp_ref.storage.scratch import ScratchPool

pytestmark = pytest.mark.world(2, backend="fake")


class Recording(Streams):
    """Notes what it is asked for; tensors that are recorded must still have their memory."""

    def __init__(self):
        self.calls = []
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

    def host_after_prepare(self):
        self.note("the host waits for shards")

    def host_after_reduce(self):
        self.note("the host waits for reductions")

    def used_by_compute(self, tensor):
        self.note("compute reads", tensor)

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
    assert streams.calls == ["compute reads bfloat16[12] on compute"]


def test_a_gather_that_nobody_used_is_waited_for_before_it_is_freed(sharded):
    _, unit, streams = sharded
    unit.handle.start_unshard()
    unit.handle.reshard()
    assert streams.calls[0] == "compute waits for gathers"
    assert streams.calls[-1] == "compute reads bfloat16[12] on compute"


def test_gathers_wait_for_what_changed_the_shard(sharded):
    model, unit, streams = sharded
    with torch.no_grad():
        model(torch.ones(1, 3))
    assert streams.calls[0] == "gathers wait for compute"  # the optimizer's step
    streams.calls.clear()
    for param in model.parameters():
        param.data = torch.ones_like(param)
    unit.ask_early()
    assert streams.calls == ["gathers wait for compute"] * 2  # the copy of what was assigned; whatever came before
    unit.reshard(ReshardReason.OUT_OF_DATE)


def test_reductions_wait_and_kept_gradients_are_recorded(sharded):
    model, unit, streams = sharded
    with no_sync(unit):
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
    model(torch.ones(1, 3)).sum().backward()
    assert ("the host waits for reductions" in streams.calls) == offload


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
    assert ("the host waits for shards" in streams.calls) == offload


def test_scratch_keeps_memory_of_the_host_only():
    pool = ScratchPool()
    for device in ("cpu", "meta"):
        pool.give(pool.take(4, torch.float32, torch.device(device)))
    assert pool.free_bytes == 16
