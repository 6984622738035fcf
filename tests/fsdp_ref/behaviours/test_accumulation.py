"""Accumulating gradients over backward passes, with and without communication."""

from __future__ import annotations

import copy
from collections import Counter
from contextlib import nullcontext

import pytest
import torch
from torch import nn

from fsdp_ref import CPUOffload, MixedPrecision, ShardingStrategy
from fsdp_ref.composable import no_sync

S = ShardingStrategy
ALL = [S.FULL_SHARD, S.SHARD_GRAD_OP, S.NO_SHARD]
quiet = pytest.mark.filterwarnings("ignore:The `NO_SHARD` sharding strategy:FutureWarning")


def accumulate(lab, model, reference, schedule, loss=None):
    """n: inside no_sync, s: outside."""
    for step, kind in enumerate(schedule):
        with model.no_sync() if kind == "n" else nullcontext():
            (loss or lab.loss)(model, lab.batch(step)).backward()
        lab.reference_step(reference, lab.batches(step), loss)


@quiet
@pytest.mark.world(2)
@pytest.mark.covers("ACC-03", "ACC-06", "ACC-07", "ACC-08", "B002", "B029", "OFF-06", "B124")
@pytest.mark.parametrize("strategy", ALL, ids=lambda s: s.name)
@pytest.mark.parametrize("schedule", ["s", "nnss", "nsns", "snns", "nnns"])
@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("orig", [True, False])
def test_any_interleaving_equals_one_batch(lab, strategy, schedule, offload, orig):
    reference = lab.make()
    model = lab.shard(
        copy.deepcopy(reference),
        "wrapper" if orig else "flat",
        policy={lab.Block},
        sharding_strategy=strategy,
        cpu_offload=CPUOffload(offload),
    )
    accumulate(lab, model, reference, schedule)
    if orig:
        lab.assert_grads(model, reference)
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    torch.optim.SGD(reference.parameters(), lr=0.1).step()
    lab.assert_params(model, reference)


@pytest.mark.world(2)
@pytest.mark.covers("B031", "OFF-02", "OFF-05")
@pytest.mark.parametrize("set_to_none", [True, False])
def test_offload_no_sync_and_original_parameters_over_several_steps(lab, set_to_none):
    reference = lab.make()
    model = lab.shard(copy.deepcopy(reference), policy={lab.Block}, cpu_offload=CPUOffload(True))
    assert all(unit.config.cpu_offload.offload_params for unit in lab.units(model))
    optim = torch.optim.Adam(model.parameters(), lr=0.05)
    reference_optim = torch.optim.Adam(reference.parameters(), lr=0.05)
    for _ in range(3):
        accumulate(lab, model, reference, "ns")
        optim.step()
        reference_optim.step()
        optim.zero_grad(set_to_none=set_to_none)
        reference_optim.zero_grad(set_to_none=set_to_none)
        lab.assert_params(model, reference)


@pytest.mark.world(2)
@pytest.mark.covers("ACC-01", "RUN-10")
def test_no_sync_is_for_an_idle_root(lab):
    model = lab.shard(lab.make(), policy={lab.Block})
    model(lab.batch())
    with (
        pytest.raises(RuntimeError, match=r"`no_sync\(\)` on inner FSDP instances is not supported"),
        model.module.blocks[0].no_sync(),
    ):
        pass
    with lab.full(model), pytest.raises(ValueError, match="expected to be in states"), model.no_sync():
        pass


@pytest.mark.world(2)
@pytest.mark.covers("ACC-01", "STRAT-04")
def test_no_sync_decides_the_root(lab):
    model = lab.shard(lab.make(), policy={lab.Block})
    with model.no_sync():
        pass
    assert model._is_root


@pytest.mark.world(2)
@pytest.mark.covers("ACC-02")
@pytest.mark.parametrize("orig", [True, False])
def test_inside_gradients_are_whole_and_local(lab, orig):
    reference = lab.make()
    model = lab.shard(copy.deepcopy(reference), "wrapper" if orig else "flat", policy={lab.Block})
    with lab.collectives() as seen, model.no_sync():
        lab.loss(model, lab.batch()).backward()
    assert {call.op for call in seen} == {"all_gather"}
    lab.reference_step(reference, [lab.batch()])
    if orig:
        for (name, p), q in zip(model.named_parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(p.grad, q.grad, **lab.CLOSE, msg=name)
    else:
        for unit in lab.units(model):
            assert unit.handle.flat_param.grad.numel() == unit.handle.layout.numel


@pytest.mark.world(2)
@pytest.mark.covers("ACC-04", "RUN-11")
def test_flags_nest_and_are_restored_whatever_happens(lab):
    model = lab.shard(lab.make(), policy={lab.Block})
    flags = lambda: {unit.sync_gradients for unit in lab.units(model)}
    with model.no_sync():
        with model.no_sync():
            assert flags() == {False}
        assert flags() == {False}
    assert flags() == {True}
    with pytest.raises(RuntimeError, match="boom"), model.no_sync():
        raise RuntimeError("boom")
    assert flags() == {True}


@pytest.mark.world(2)
@pytest.mark.covers("ACC-05", "CPU-02")
@pytest.mark.parametrize(
    ("strategy", "counts"),
    [
        (S.FULL_SHARD, {"n": (4, 3, 0), "nn": (4, 3, 0), "s": (4, 3, 4), "ns": (4, 3, 4)}),
        (S.SHARD_GRAD_OP, {"n": (4, 0, 0), "nn": (0, 0, 0), "s": (4, 0, 4), "ns": (0, 0, 4)}),
    ],
    ids=["FULL_SHARD", "SHARD_GRAD_OP"],
)
def test_collectives_per_iteration(lab, strategy, counts):
    model = lab.shard(lab.make(), policy={lab.Block}, sharding_strategy=strategy, backward_prefetch=None)
    for schedule, want in counts.items():
        model.zero_grad()
        for step, kind in enumerate(schedule):
            with model.no_sync() if kind == "n" else nullcontext(), lab.collectives() as seen:
                loss = lab.loss(model, lab.batch(step))
                forward = Counter(call.op for call in seen)["all_gather"]
                loss.backward()
            total = Counter(call.op for call in seen)
            got = (forward, total["all_gather"] - forward, total["reduce_scatter"])
        assert got == want, schedule
        if schedule[-1] == "n":  # bring every unit back to its shard
            lab.loss(model, lab.batch()).backward()


@quiet
@pytest.mark.world(2)
@pytest.mark.covers("B164", "ACC-03", "ACC-07")
@pytest.mark.parametrize("strategy", ALL, ids=lambda s: s.name)
@pytest.mark.parametrize("orig", [True, False])
def test_units_used_inside_no_sync_only_are_reduced_at_the_end_all_the_same(lab, strategy, orig):
    class Routed(nn.Module):
        def __init__(self):
            super().__init__()
            self.paths = nn.ModuleList(nn.Linear(3, 3) for _ in range(3))

        def forward(self, x, which):
            return self.paths[which](x)

    reference = lab.make(Routed)
    model = lab.shard(
        copy.deepcopy(reference), "wrapper" if orig else "flat", policy={nn.Linear}, sharding_strategy=strategy
    )
    for step, (kind, which) in enumerate([("n", 0), ("n", 1), ("s", 2)]):
        with model.no_sync() if kind == "n" else nullcontext():
            model(lab.batch(step), which).square().mean().backward()
        for batch in lab.batches(step):
            (reference(batch, which).square().mean() / lab.world.size).backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    torch.optim.SGD(reference.parameters(), lr=0.1).step()
    lab.assert_params(model, reference)


@quiet
@pytest.mark.world(2)
@pytest.mark.covers("MP-17", "B032", "MP-16", "B033")
@pytest.mark.parametrize("strategy", ALL, ids=lambda s: s.name)
@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("orig", [True, False])
def test_dtypes_of_accumulated_gradients(lab, strategy, keep, orig):
    low = torch.bfloat16
    precision = MixedPrecision(low, None if keep else torch.float32, low, keep_low_precision_grads=keep)
    model = lab.shard(
        lab.make(dtype=torch.float32),
        "wrapper" if orig else "flat",
        policy={lab.Block},
        sharding_strategy=strategy,
        mixed_precision=precision,
    )

    def dtypes():
        return {p.grad.dtype for p in model.parameters() if p.grad is not None}

    # What is not reduced yet is kept in the wider of the dtypes of parameters and of reduction.
    with model.no_sync():
        for step in (0, 1):
            lab.loss(model, lab.batch(step)).backward()
            assert dtypes() == {torch.float32}
    for step in (2, 3):
        lab.loss(model, lab.batch(step)).backward()
        assert dtypes() == {torch.bfloat16 if keep else torch.float32}


@pytest.mark.world([2, 3])
@pytest.mark.covers("ACC-07", "ORIG-07")
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("by_data", [False, True])
def test_zeroing_in_place_after_no_sync_clears_what_was_reduced_before(lab, path, bias, by_data):
    """Users see the local part alone then; zeroed, it must not leave the reduced part behind.

    Without biases no gradient has the shape of its sharded parameter, so that none can be put on it as it is.
    """

    def build():
        return nn.Sequential(nn.Linear(3, 4, bias=bias), nn.Tanh(), nn.Linear(4, 2, bias=bias))

    reference = lab.make(build)
    model = lab.shard(copy.deepcopy(reference), path)
    optim = torch.optim.SGD(model.parameters(), lr=0.1)
    lab.loss(model, lab.batch(0)).backward()
    with no_sync(model):
        lab.loss(model, lab.batch(1)).backward()
    if by_data:  # raises no counter
        for param in model.parameters():
            if param.grad is not None:
                param.grad.data.zero_()
    else:
        optim.zero_grad(set_to_none=False)
    lab.loss(model, lab.batch(2)).backward()
    optim.step()
    lab.reference_step(reference, lab.batches(2), optim=torch.optim.SGD(reference.parameters(), lr=0.1))
    lab.assert_params(model, reference)


@pytest.mark.world([2, 3])
@pytest.mark.covers("ACC-07", "ORIG-07", "ORIG-08")
@pytest.mark.parametrize("set_to_none", [True, False])
def test_an_optimizer_over_some_parameters_clears_those_after_no_sync(lab, orig_path, set_to_none):
    def build():
        return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))

    reference = lab.make(build)
    model = lab.shard(copy.deepcopy(reference), orig_path)
    lab.loss(model, lab.batch(0)).backward()
    with no_sync(model):
        lab.loss(model, lab.batch(1)).backward()
    torch.optim.SGD(list(model.parameters())[:2], lr=0.1).zero_grad(set_to_none)
    lab.loss(model, lab.batch(2)).backward()
    for step in range(2):
        lab.reference_step(reference, lab.batches(step))
    torch.optim.SGD(list(reference.parameters())[:2], lr=0.1).zero_grad(set_to_none)
    lab.reference_step(reference, lab.batches(2))
    lab.assert_grads(model, reference)


@pytest.mark.world(2)
def test_zeroing_after_no_sync_that_an_inference_is_the_first_to_see(world, trial, api, strategy):
    """What the zeros become is made under ``inference_mode()``, and later backwards add to it."""
    t = trial(api, strategy)
    t.both_backward(0)
    with t.no_sync():
        t.both_backward(1)
    t.zero_grad(set_to_none=False)
    with torch.inference_mode():
        t.loss(t.inputs(2))
    t.both_backward(3)
    t.step()
    t.compare()
