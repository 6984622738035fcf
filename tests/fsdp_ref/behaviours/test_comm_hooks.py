"""A user's reduction in place of the built-in one."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_wrapper
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import powerSGD_hook

from fsdp_ref import FullyShardedDataParallel as FSDP
from fsdp_ref import MixedPrecision, ShardingStrategy
from fsdp_ref.comm_hooks import (
    DefaultState,
    LowPrecisionState,
    allreduce_hook,
    bf16_compress_hook,
    fp16_compress_hook,
    reduce_scatter_hook,
)

S = ShardingStrategy
quiet = pytest.mark.filterwarnings("ignore:The `NO_SHARD` sharding strategy:FutureWarning")


def train(lab, model, steps=3):
    optim = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(steps):
        lab.loss(model, lab.batch(step).to(next(model.parameters()).dtype)).backward()
        optim.step()
        optim.zero_grad()
    return lab.params(model)


@quiet
@pytest.mark.world([2, 3])
@pytest.mark.covers("HOOK-05", "HOOK-03", "HOOK-04", "B166")
@pytest.mark.parametrize("strategy", [S.FULL_SHARD, S.NO_SHARD], ids=lambda s: s.name)
@pytest.mark.parametrize("orig", [True, False])
def test_the_default_hook_equals_the_built_in_path_bit_for_bit(lab, strategy, orig):
    path = "wrapper" if orig else "flat"
    plain = train(lab, lab.shard(lab.make(), path, policy={lab.Block}, sharding_strategy=strategy))
    model = lab.shard(lab.make(), path, policy={lab.Block}, sharding_strategy=strategy)
    state = DefaultState(lab.world.group)
    assert model._comm_hook is None
    model.register_comm_hook(state, allreduce_hook if strategy is S.NO_SHARD else reduce_scatter_hook)
    assert all(each._comm_hook_state is state for each in FSDP.fsdp_modules(model))
    hooked = train(lab, model)
    assert all(torch.equal(plain[name], hooked[name]) for name in plain)


@quiet
@pytest.mark.world([2, 3])
@pytest.mark.covers("HOOK-06", "HOOK-07")
@pytest.mark.parametrize("strategy", [S.FULL_SHARD, S.NO_SHARD], ids=lambda s: s.name)
@pytest.mark.parametrize(
    ("hook", "dtype"),
    [(fp16_compress_hook, torch.float16), (bf16_compress_hook, torch.bfloat16)],
    ids=["fp16", "bf16"],
)
def test_compressing_hooks_equal_a_low_reduce_dtype(lab, strategy, hook, dtype):
    options = {"policy": {lab.Block}, "sharding_strategy": strategy}
    make = lambda: lab.make(dtype=torch.float32)
    low = train(lab, lab.shard(make(), mixed_precision=MixedPrecision(reduce_dtype=dtype), **options))
    model = lab.shard(make(), **options)
    model.register_comm_hook(LowPrecisionState(lab.world.group), hook)
    with lab.collectives() as seen:
        hooked = train(lab, model)
    reductions = [call for call in seen if "gather" not in call.op and call.unit != "order of units"]
    assert {call.tensor.dtype for call in reductions} == {dtype}
    assert all(torch.equal(low[name], hooked[name]) for name in low)
    high = train(lab, lab.shard(make(), **options))
    assert any(not torch.equal(high[name], hooked[name]) for name in high)


@pytest.mark.world(2)
@pytest.mark.covers("HOOK-01", "HOOK-02", "HOOK-10")
def test_registration(lab):
    model = lab.shard(lab.make(), policy={lab.Block})
    state = DefaultState(lab.world.group)
    with pytest.raises(ValueError, match="callable"):
        model.register_comm_hook(state, None)
    model.check_is_root()
    with pytest.raises(AssertionError, match=r"^register_comm_hook can only be called on a root instance\.$"):
        model.module.blocks[0].register_comm_hook(state, reduce_scatter_hook)
    # DDP's hooks take a bucket: they would fail in the middle of backward.
    with pytest.raises(
        AssertionError, match=r"expected hook\(state, grad\[, output\]\), got powerSGD_hook, which takes a DDP bucket"
    ):
        model.register_comm_hook(state, powerSGD_hook)
    with pytest.raises(AssertionError, match="got bf16_compress_wrapper_hook, which takes a DDP bucket"):
        model.register_comm_hook(state, bf16_compress_wrapper(powerSGD_hook))
    model.register_comm_hook(state, reduce_scatter_hook)
    with pytest.raises(AssertionError, match="^A communication hook is already registered$"):
        model.register_comm_hook(state, reduce_scatter_hook)
    with pytest.raises(ValueError, match="Expected to pass in an explicit ProcessGroup"):
        DefaultState(None)


@quiet
@pytest.mark.world(2)
@pytest.mark.covers("HOOK-04", "HOOK-08", "HOOK-09", "HOOK-03")
@pytest.mark.parametrize("strategy", [S.FULL_SHARD, S.NO_SHARD], ids=lambda s: s.name)
def test_what_a_users_hook_is_given_and_how_often(lab, strategy):
    reference = lab.make()
    model = lab.shard(copy.deepcopy(reference), policy={lab.Block}, sharding_strategy=strategy)
    calls = []

    def keep_own(state, grad, output=None):
        calls.append((state, grad.numel(), None if output is None else output.numel()))
        if output is not None:
            output.copy_(grad.chunk(lab.world.size)[lab.world.rank])

    state = object()
    model.register_comm_hook(state, keep_own)
    with model.no_sync():
        lab.loss(model, lab.batch(0)).backward()
    assert calls == []
    model.zero_grad()
    lab.loss(model, lab.batch(0)).backward()
    assert len(calls) == 4
    assert all(call[0] is state for call in calls)
    maps = [unit.handle.shard_map for unit in lab.units(model)]
    sizes = [(m.padded_numel, m.shard_numel if strategy is S.FULL_SHARD else None) for m in maps]
    assert sorted(call[1:] for call in calls) == sorted(sizes)
    # Nobody divided: each rank kept its own gradient for its own shard.
    lab.reference_step(reference, [lab.batch(0)])
    want = dict(reference.named_parameters())
    for unit in lab.units(model):
        handle = unit.handle
        pieces = handle.originals.pieces_of(handle.grads.reduced_S)
        spans = {piece.param_index: piece.span_in_param for piece in handle.shard_map.param_spans(handle.shard_rank)}
        for index, fqn in enumerate(handle.fqns):
            if index in spans:
                name = f"{unit.name}.{fqn}" if unit.name else fqn
                grad = want[name].grad.reshape(-1)[spans[index].as_slice()]
                torch.testing.assert_close(pieces[index].reshape(-1), grad, **lab.CLOSE)
