"""CPU offload where the CPU computes too: accepted, and numerically nothing."""

from __future__ import annotations

import copy
from contextlib import contextmanager

import pytest
import torch
from torch.overrides import TorchFunctionMode

from fsdp_ref import CPUOffload, MixedPrecision, ShardingStrategy
from fsdp_ref.comm.streams import Streams
from fsdp_ref.runtime import grad_sync


@pytest.mark.world(2)
@pytest.mark.covers("OFF-02", "OFF-08")
def test_the_clipped_norm_is_on_the_cpu(lab):
    model = lab.shard(lab.make(), policy={lab.Block}, cpu_offload=CPUOffload(True))
    lab.loss(model, lab.batch()).backward()
    assert model.clip_grad_norm_(1.0).device.type == "cpu"
    assert {p.device.type for p in model.parameters()} == {"cpu"}


@pytest.mark.world(2)
@pytest.mark.covers("B033", "OFF-02")
def test_offload_with_kept_low_precision_gradients(lab):
    precision = MixedPrecision(torch.bfloat16, buffer_dtype=torch.bfloat16, keep_low_precision_grads=True)
    model = lab.shard(
        lab.make(dtype=torch.float32), policy={lab.Block}, cpu_offload=CPUOffload(True), mixed_precision=precision
    )
    for _ in range(2):
        lab.loss(model, lab.batch()).backward()
        assert {p.grad.dtype for p in model.parameters() if p.grad is not None} == {torch.bfloat16}


class SlowCopies(Streams):
    """A device whose copies to the host take as long as nobody waits for them.

    Inside the post-backward stream, what ``to(..., non_blocking=True)`` returns is not there yet (NaN). It is filled when
    the host waits for the stream, or asks the stream for a copy that it does wait for.
    """

    def __init__(self):
        self.waited = 0
        self.copied = 0
        self._late = []

    @contextmanager
    def post_backward(self):
        with _Late(self):
            yield

    def copy_later(self, source):
        target = torch.full_like(source, float("nan"))
        self._late.append((target, source))
        self.copied += 1
        return target

    def arrive(self):
        for target, source in self._late:
            target.copy_(source)
        self._late.clear()

    def host_after_copies(self):
        self.waited += 1
        self.arrive()


class _Late(TorchFunctionMode):
    def __init__(self, streams):
        super().__init__()
        self._streams = streams

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is not torch.Tensor.to:
            return func(*args, **kwargs)
        if kwargs.pop("non_blocking", False):
            return self._streams.copy_later(func(*args, **kwargs))
        self._streams.arrive()
        return func(*args, **kwargs)


@pytest.mark.world(2)
@pytest.mark.covers("B008", "OFF-06")
@pytest.mark.filterwarnings("ignore:The `NO_SHARD`:FutureWarning")
@pytest.mark.parametrize("strategy", [ShardingStrategy.NO_SHARD, ShardingStrategy.FULL_SHARD], ids=lambda s: s.name)
def test_nobody_reads_an_offloaded_gradient_before_its_copy_has_ended(lab, orig_path, strategy):
    reference = lab.make()
    options = {"policy": {lab.Block}, "sharding_strategy": strategy, "cpu_offload": CPUOffload(True)}
    model = lab.shard(copy.deepcopy(reference), orig_path, **options)
    with torch.no_grad():
        model(lab.batch())  # the units have a root now
    streams = SlowCopies()
    root = lab.units(model)[0].root
    root.streams = streams
    for unit in lab.units(model):
        unit.handle.streams = streams
    seen_by_hooks = []
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(lambda p: seen_by_hooks.append(p.grad.clone()))
    optim = torch.optim.SGD(model.parameters(), lr=0.1)
    reference_optim = torch.optim.SGD(reference.parameters(), lr=0.1)
    for step in range(2):
        for part in range(2):  # the second adds to a gradient whose copy may still be under way
            lab.loss(model, lab.batch(2 * step + part)).backward()
            lab.reference_step(reference, lab.batches(2 * step + part))
        optim.step()
        optim.zero_grad()
        reference_optim.step()
        reference_optim.zero_grad()
        lab.assert_params(model, reference)
    assert streams.copied >= 2 * len(lab.units(model))
    assert streams.waited == 8  # of each of 4 passes one in forward, for shards, and one in backward, for gradients
    assert seen_by_hooks
    assert all(grad.isfinite().all() for grad in seen_by_hooks)


@pytest.mark.world(2)
def test_a_failed_backward_shows_no_gradient_whose_copy_is_under_way(lab, orig_path, monkeypatch):
    model = lab.shard(lab.make(), orig_path, policy={lab.Block}, cpu_offload=CPUOffload(True))
    with torch.no_grad():
        model(lab.batch())
    monkeypatch.setattr(grad_sync, "IN_FLIGHT", 0)  # results go home as soon as they are there
    streams = SlowCopies()
    lab.units(model)[0].root.streams = streams
    for unit in lab.units(model):
        unit.handle.streams = streams
    hook = next(m for m in model.modules() if isinstance(m, lab.Block)).register_full_backward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        lab.loss(model, lab.batch()).backward()
    hook.remove()
    assert streams.copied
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())
    model.zero_grad()
    lab.loss(model, lab.batch()).backward()
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)
