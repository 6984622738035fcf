"""Low-precision computation and reduction, buffers, inputs, evaluation; the oracle makes the same casts."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fsdp_ref import FullyShardedDataParallel, MixedPrecision, ShardingStrategy
from fsdp_ref.annotations import units_under
from fsdp_ref.wrap import ModuleWrapPolicy

LOW = torch.bfloat16


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(6, 8)
        self.b = nn.Linear(8, 4)
        self.register_buffer("shift", torch.full((4,), 1.001))
        self.register_buffer("count", torch.zeros(1, dtype=torch.int64))
        self.seen: list[torch.dtype] = []

    def forward(self, x, extra=None):
        self.seen = [x.dtype, self.a.weight.dtype, self.shift.dtype]
        y = self.b(torch.relu(self.a(x))) + self.shift
        return y if extra is None else y + extra["bias"]


def shard(module, strategy, uo, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return FullyShardedDataParallel(
            module,
            sharding_strategy=ShardingStrategy[strategy],
            auto_wrap_policy=ModuleWrapPolicy({nn.Linear}),
            use_orig_params=uo,
            **options,
        )


def grads_of(model):
    """Full reduced gradients by name."""
    with FullyShardedDataParallel.summon_full_params(model, with_grads=True):
        return {name: param.grad.clone() for name, param in model.named_parameters()}


@pytest.mark.covers("MP-01", "MP-02", "MP-03", "MP-04", "MP-24", "B003", "B004", "RED-03")
@pytest.mark.parametrize("param_dtype", [None, torch.float32, LOW])
@pytest.mark.parametrize("reduce_dtype", [None, torch.float32, LOW])
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])
@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.world(2)
def test_casts_are_those_of_the_rule(world, param_dtype, reduce_dtype, strategy, keep):
    torch.manual_seed(0)
    plain = Plain()
    xs = torch.randn(2, 5, 6)
    policy = MixedPrecision(param_dtype, reduce_dtype, keep_low_precision_grads=keep)
    model = shard(copy.deepcopy(plain), strategy, True, mixed_precision=policy)
    out = model(xs[world.rank])
    assert out.dtype == torch.float32  # the buffer is in full precision and adds it
    out.float().pow(2).mean().backward()
    inferred = reduce_dtype or param_dtype or torch.float32
    want = expected_grads(plain, xs, param_dtype, inferred)
    have = grads_of(model)
    for name, grad in want.items():
        assert have[name].dtype == (inferred if keep else torch.float32)
        assert torch.equal(have[name].float(), grad.float()), name
    assert all(param.dtype == torch.float32 for param in model.parameters())


def expected_grads(plain, xs, param_dtype, reduce_dtype):
    """Per-rank gradients in the parameters' dtype, cast, halved and summed in the reduction dtype (two ranks)."""
    total = None
    for x in xs:
        model = copy.deepcopy(plain)
        if param_dtype:
            for param in model.parameters():
                param.data = param.data.to(param_dtype)
        model(x.to(param_dtype) if param_dtype else x).float().pow(2).mean().backward()
        each = {name: param.grad.to(reduce_dtype).div(2) for name, param in model.named_parameters()}
        total = each if total is None else {name: total[name] + each[name] for name in each}
    return total


@pytest.mark.covers("MP-05", "MP-06", "MP-07", "B005", "B013")
@pytest.mark.world(2)
def test_inputs_are_cast_and_get_gradients(world):
    model = shard(Plain(), "FULL_SHARD", True, mixed_precision=MixedPrecision(LOW))
    x = torch.randn(3, 6, requires_grad=True)
    bias = torch.randn(4, dtype=torch.float64, requires_grad=True)
    model(x=x, extra={"bias": bias}).sum().backward()
    assert x.grad.dtype == torch.float32
    assert bias.grad.dtype == torch.float64
    uncast = shard(Plain(), "FULL_SHARD", True, mixed_precision=MixedPrecision(LOW, cast_root_forward_inputs=False))
    with pytest.raises(RuntimeError, match="must have the same dtype"):
        uncast(x)


@pytest.mark.covers("MP-12", "MP-14", "B001", "B064", "B065")
@pytest.mark.world(2)
def test_buffers_are_cast_once(world):
    model = shard(Plain(), "FULL_SHARD", False, mixed_precision=MixedPrecision(LOW, buffer_dtype=LOW))
    model(torch.randn(3, 6))
    inner = model.module
    assert inner.seen == [LOW, LOW, LOW] or inner.seen[0] == LOW
    assert inner.shift.dtype == LOW
    assert inner.count.dtype == torch.int64
    with FullyShardedDataParallel.summon_full_params(model):
        assert inner.shift.dtype == LOW
        assert all(param.dtype == torch.float32 for param in model.parameters())


@pytest.mark.covers("MP-17", "B032", "B033", "MP-16")
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])
@pytest.mark.parametrize("uo", [False, True])
@pytest.mark.world(2)
def test_accumulation_keeps_the_right_dtypes(world, strategy, uo):
    for keep in (False, True):
        policy = MixedPrecision(LOW, torch.float32 if not keep else None, keep_low_precision_grads=keep)
        model = shard(Plain(), strategy, uo, mixed_precision=policy)
        x = torch.randn(3, 6)
        with model.no_sync():
            model(x).sum().backward()
        assert {param.grad.dtype for param in model.parameters()} == {torch.float32}  # nothing is reduced yet
        for _ in range(2):
            model(x).sum().backward()
            found = {param.grad.dtype for param in model.parameters() if param.grad is not None and param.numel()}
            assert found <= {LOW if keep else torch.float32}


@pytest.mark.covers("MP-19", "MP-20", "B063")
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP"])
@pytest.mark.world(2)
def test_evaluation_in_full_precision(world, strategy, monkeypatch):
    monkeypatch.setenv("FSDP_USE_FULL_PREC_IN_EVAL", "1")
    torch.manual_seed(0)
    plain = Plain()
    model = shard(copy.deepcopy(plain), strategy, True, mixed_precision=MixedPrecision(LOW))
    x = torch.randn(3, 6)
    model(x).sum().backward()
    assert model.module.seen[0] == LOW
    for _ in range(2):
        model.eval()
        assert torch.equal(model(x), plain(x))
        assert model.module.seen[0] == torch.float32
        model.train()
        model(x).sum().backward()
        assert model.module.seen[0] == LOW


@pytest.mark.covers("MP-22", "WRAP-14")
@pytest.mark.world(2)
def test_batch_norms_stay_in_full_precision(world):
    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.Linear(6, 6)
            self.norm = nn.BatchNorm1d(6)
            self.seen: list[torch.dtype] = []

        def forward(self, x):
            y = self.norm(self.lin(x))
            self.seen = [y.dtype]
            return y

    with pytest.warns(UserWarning, match="These modules will be wrapped as separate FSDP"):
        model = FullyShardedDataParallel(
            Normed(), auto_wrap_policy=ModuleWrapPolicy({nn.Linear}), mixed_precision=MixedPrecision(LOW)
        )
    model(torch.randn(4, 6)).sum().backward()
    assert model.module.seen == [LOW]
    norm = next(unit for _, _, unit in units_under(model) if isinstance(unit.module, nn.BatchNorm1d))
    assert norm.handle.precision.compute == torch.float32


@pytest.mark.covers("CTOR-26", "ORIG-18", "B078")
@pytest.mark.parametrize("uo", [False, True])
@pytest.mark.parametrize("moment", ["before", "after"])
@pytest.mark.world(2)
def test_casting_the_whole_model(world, uo, moment):
    torch.manual_seed(0)
    plain = Plain()
    model = shard(copy.deepcopy(plain), "FULL_SHARD", uo)
    xs = torch.randn(2, 5, 6)
    if moment == "after":
        model(xs[0]).sum().backward()
        model.zero_grad()
    model.double()
    plain.double()
    assert all(param.dtype == torch.float64 for param in model.parameters())
    optimizer, plain_optimizer = (torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, plain))
    for _ in range(2):
        (sum(plain(x.double()).pow(2).mean() for x in xs) / 2).backward()
        model(xs[world.rank].double()).pow(2).mean().backward()
        optimizer.step(), plain_optimizer.step()
        optimizer.zero_grad(), plain_optimizer.zero_grad()
    with FullyShardedDataParallel.summon_full_params(model):
        for (name, have), want in zip(model.named_parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(have, want, msg=name)


@pytest.mark.covers("HOOK-01", "HOOK-02", "HOOK-05", "HOOK-06", "HOOK-08", "HOOK-09")
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "NO_SHARD"])
@pytest.mark.world(2)
def test_communication_hooks(world, strategy):
    from fsdp_ref.comm_hooks import (
        DefaultState,
        LowPrecisionState,
        allreduce_hook,
        bf16_compress_hook,
        reduce_scatter_hook,
    )

    torch.manual_seed(0)
    plain, xs = Plain(), torch.randn(2, 5, 6)

    def grads(hook, state, **options):
        model = shard(copy.deepcopy(plain), strategy, True, **options)
        if hook is not None:
            model.register_comm_hook(state, hook)
            with pytest.raises(AssertionError, match="^A communication hook is already registered$"):
                model.register_comm_hook(state, hook)
            with pytest.raises(AssertionError, match="^register_comm_hook can only be called on a root instance.$"):
                model.module.a.register_comm_hook(state, hook)
        model(xs[world.rank]).pow(2).mean().backward()
        return grads_of(model)

    group = dist.group.WORLD
    default = reduce_scatter_hook if strategy == "FULL_SHARD" else allreduce_hook
    built_in = grads(None, None)
    assert all(torch.equal(built_in[k], v) for k, v in grads(default, DefaultState(group)).items())
    low = grads(None, None, mixed_precision=MixedPrecision(reduce_dtype=LOW))
    hooked = grads(bf16_compress_hook, LowPrecisionState(group))
    assert all(torch.equal(low[k], v) for k, v in hooked.items())
