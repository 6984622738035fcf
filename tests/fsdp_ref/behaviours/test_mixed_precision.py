"""Which copy has which dtype, when."""

from __future__ import annotations

import copy
from collections import OrderedDict

import pytest
import torch
from torch import nn

from fsdp_ref import MixedPrecision, ShardingStrategy

BF16, F32, F64 = torch.bfloat16, torch.float32, torch.float64


def x_of(lab, dtype=F32):
    return lab.batch(shape=(2, 4)).to(dtype)


@pytest.mark.world(2)
@pytest.mark.covers("MP-03", "MP-24", "MP-05", "B003")
def test_compute_low_keep_high(lab, path):
    model = lab.make(lab.Chain, dtype=F32)
    spies = [model.first, model.second]
    model = lab.shard(model, path, policy={lab.Spy}, mixed_precision=MixedPrecision(param_dtype=BF16))
    loss = model(x_of(lab)).sum()
    assert loss.dtype == BF16
    loss.backward()
    for spy in spies:
        assert (spy.met["param"], spy.met["input"]) == (BF16, BF16)
    for p in model.parameters():
        assert p.dtype == F32
        assert p.grad is None or p.grad.dtype == F32
    for unit in lab.units(model):
        if unit.handle:
            assert unit.handle.shard_S.dtype == F32


@pytest.mark.world(2)
@pytest.mark.covers("MP-02", "B003")
def test_the_original_dtype_as_param_dtype_is_off_bit_for_bit(lab, path):
    results = []
    for precision in (None, MixedPrecision(param_dtype=F64)):
        model = lab.shard(lab.make(), path, policy={lab.Block}, mixed_precision=precision)
        optim = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(2):
            lab.loss(model, lab.batch(step)).backward()
            optim.step()
            optim.zero_grad()
        results.append(lab.params(model))
        assert all(u.handle.precision.compute == F64 == u.handle.precision.reduce for u in lab.units(model))
    assert all(torch.equal(results[0][name], results[1][name]) for name in results[0])


@pytest.mark.world(2)
@pytest.mark.covers("MP-12", "MP-13", "B001", "B065")
def test_buffers_are_cast_once_by_their_nearest_unit(lab, path):
    class Buffered(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = lab.Spy()
            self.only = nn.Module()
            self.only.register_buffer("table", torch.ones(2))
            self.only.register_buffer("mask", torch.ones(2, dtype=torch.bool))
            self.left = nn.Linear(4, 4)
            self.left.register_buffer("kept", torch.ones(2))

        def forward(self, x):
            return self.inner(x)

    model = lab.make(Buffered, dtype=F32)
    inner, only, left = model.inner, model.only, model.left
    precision = MixedPrecision(param_dtype=BF16, buffer_dtype=BF16)
    if path == "composable":
        lab.shard(inner, path, mixed_precision=MixedPrecision(BF16, buffer_dtype=torch.float16))
        model = lab.shard(model, path, mixed_precision=precision, ignored_modules=[left])
    else:
        model.inner = lab.shard(inner, path, mixed_precision=MixedPrecision(BF16, buffer_dtype=torch.float16))
        model = lab.shard(model, path, mixed_precision=precision, ignored_modules=[left])
    assert only.table.dtype == F32, "buffers are cast at first use, not at construction"
    for _ in range(2):
        model(x_of(lab)).sum().backward()
        assert inner.offset.dtype == torch.float16
        assert inner.count.dtype == torch.int64
        assert only.table.dtype == BF16
        assert only.mask.dtype == torch.bool
        assert left.kept.dtype == F32
    model.eval()
    model(x_of(lab))
    assert only.table.dtype == BF16


@pytest.mark.world(2)
@pytest.mark.covers("MP-14", "MP-21", "MP-18")
def test_summoned_parameters_are_full_precision_and_the_low_copy_is_dropped(lab, path):
    strategy = ShardingStrategy.SHARD_GRAD_OP
    precision = MixedPrecision(param_dtype=BF16, buffer_dtype=BF16)
    model = lab.make(lab.Chain, dtype=F32)
    spy = model.first
    model = lab.shard(model, path, policy={lab.Spy}, mixed_precision=precision, sharding_strategy=strategy)
    before = model(x_of(lab))
    with lab.full(model):
        assert {p.dtype for p in model.parameters()} == {F32}
        assert spy.offset.dtype == BF16
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(3)
    after = model(x_of(lab))
    assert not torch.equal(before, after)
    reference = lab.make(lab.Chain, dtype=F32)
    with torch.no_grad():
        for p in reference.parameters():
            p.mul_(3)
    torch.testing.assert_close(after, reference.to(BF16)(x_of(lab, BF16)), rtol=0.05, atol=0.05)


@pytest.mark.world(2)
@pytest.mark.covers("MP-18")
def test_the_low_precision_copy_exists_only_around_computation(lab, path):
    model = lab.shard(
        lab.make(lab.Chain, dtype=F32), path, policy={lab.Spy}, mixed_precision=MixedPrecision(param_dtype=BF16)
    )
    model(x_of(lab)).sum().backward()
    for unit in lab.units(model):
        if unit.handle:
            assert unit.handle._cast_S is None
            assert all(b.tensor.untyped_storage().nbytes() == 0 for b in unit.handle._buffers.values())


@pytest.mark.world(2)
@pytest.mark.filterwarnings("ignore:The `NO_SHARD` sharding strategy:FutureWarning")
@pytest.mark.covers("MP-16", "B033")
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "NO_SHARD"])
@pytest.mark.parametrize("reduce_dtype", [None, F32, torch.float16])
def test_kept_low_precision_gradients(lab, path, strategy, reduce_dtype):
    precision = MixedPrecision(param_dtype=BF16, reduce_dtype=reduce_dtype, keep_grads_in_reduce_dtype=True)
    model = lab.shard(
        lab.make(lab.Chain, dtype=F32),
        path,
        policy={lab.Spy},
        mixed_precision=precision,
        sharding_strategy=ShardingStrategy[strategy],
    )
    for _ in range(2):
        model(x_of(lab)).sum().backward()
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        assert grads
        assert {g.dtype for g in grads} == {reduce_dtype or BF16}


@pytest.mark.world(2)
@pytest.mark.covers("MP-19", "MP-20", "B063", "ENV-04")
@pytest.mark.parametrize("own", [True, False])
def test_evaluation_in_full_precision_by_environment(lab, path, own, monkeypatch):
    monkeypatch.setenv("FSDP_USE_FULL_PREC_IN_EVAL", "1")
    model = lab.make(lab.Chain, dtype=F32)
    if own:
        model.extra = nn.Parameter(torch.ones(1))
    plain = copy.deepcopy(model)
    spies = [model.first, model.second]
    precision = MixedPrecision(param_dtype=BF16, buffer_dtype=BF16)
    model = lab.shard(model, path, policy={lab.Spy}, mixed_precision=precision)
    monkeypatch.delenv("FSDP_USE_FULL_PREC_IN_EVAL")
    for _ in range(2):
        model.train()
        model(x_of(lab)).sum().backward()
        assert {tuple(spy.met.values()) for spy in spies} == {(BF16, BF16, BF16)}
        model.eval()
        output = model(x_of(lab))
        assert {tuple(spy.met.values()) for spy in spies} == {(F32, F32, F32)}
        assert torch.equal(output, plain(x_of(lab)))


@pytest.mark.world(2)
@pytest.mark.covers("MP-22", "WRAP-14")
def test_batch_norms_compute_in_full_precision_and_return_what_came_in(lab, path):
    class Normed(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.norm, self.b = lab.Spy(), nn.BatchNorm1d(4), lab.Spy()

        def forward(self, x):
            return self.b(self.norm(self.a(x)))

    model = lab.make(Normed, dtype=F32)
    met = []
    model.norm.register_forward_pre_hook(lambda m, args: met.append(args[0].dtype) or None)
    norm, last = model.norm, model.b
    with pytest.warns(UserWarning, match="These modules will be wrapped as separate FSDP"):
        model = lab.shard(model, path, policy={lab.Spy}, mixed_precision=MixedPrecision(BF16, buffer_dtype=BF16))
    output = model(x_of(lab))
    assert output.dtype == BF16
    assert last.met["input"] == BF16
    assert met == [F32]
    assert norm.running_mean.dtype == F32
    output.sum().backward()


@pytest.mark.world(2)
@pytest.mark.covers("MP-23", "B042")
def test_evaluation_sees_an_average_that_was_written_under_summon(lab, path):
    strategy = ShardingStrategy.SHARD_GRAD_OP
    model = lab.shard(
        lab.make(lab.Chain, dtype=F32),
        path,
        policy={lab.Spy},
        mixed_precision=MixedPrecision(BF16),
        sharding_strategy=strategy,
        forward_prefetch=True,
    )
    ema = lab.make(lab.Chain, dtype=F32)
    optim = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        model(x_of(lab)).sum().backward()
        optim.step()
        optim.zero_grad()
        with lab.full(model), torch.no_grad():
            for p, average in zip(model.parameters(), ema.parameters(), strict=True):
                average.lerp_(p, 0.5)
                p.copy_(average)
        with torch.no_grad():
            for _ in range(2):
                got = model(x_of(lab))
            want = copy.deepcopy(ema).to(BF16)(x_of(lab, BF16))
        assert torch.equal(got, want)


@pytest.mark.world(2)
@pytest.mark.covers("B142", "FRZ-03")
def test_thawing_a_unit_that_was_frozen_at_first_keeps_its_dtypes(lab, orig_path):
    model = lab.make(lab.Chain, dtype=F32)
    model.second.requires_grad_(False)
    model = lab.shard(model, orig_path, policy={lab.Spy}, mixed_precision=MixedPrecision(param_dtype=BF16))
    x = x_of(lab).requires_grad_()
    model(x).sum().backward()
    for p in model.parameters():
        p.requires_grad_(True)
    model(x).sum().backward()
    grads = lab.grads(model)
    assert {g.dtype for g in grads.values()} == {F32}


@pytest.mark.world(2)
@pytest.mark.covers("MP-15", "B001", "SUM-19")
def test_a_state_dict_of_summoned_parameters_is_in_full_precision(lab, path):
    model = lab.shard(lab.make(lab.Chain, dtype=F32), path, policy={lab.Spy}, mixed_precision=MixedPrecision(BF16))
    model(x_of(lab)).sum().backward()
    with lab.full(model, writeback=False):
        state = OrderedDict((name, p.detach().clone()) for name, p in model.named_parameters())
    assert {value.dtype for value in state.values()} == {F32}


class Counting(nn.Module):
    """Changes its buffer in place, as running statistics are."""

    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(2, 2)
        self.register_buffer("seen", torch.zeros(2))

    def forward(self, x):
        self.seen.add_(x.detach().sum(0))
        return self.lin(x) + self.seen


@pytest.mark.world(2)
def test_a_first_forward_in_inference_mode_leaves_buffers_that_can_be_changed(lab, path):
    model = lab.shard(Counting(), path, mixed_precision=MixedPrecision(buffer_dtype=BF16))
    with torch.inference_mode():
        model(torch.ones(1, 2))
    model(torch.ones(1, 2)).sum().backward()
    (seen,) = model.buffers()
    assert seen.dtype == BF16
    assert torch.equal(seen, torch.full((2,), 2.0, dtype=BF16))


@pytest.mark.world(2)
@pytest.mark.parametrize(
    "strategy", [ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy.FULL_SHARD], ids=lambda s: s.name
)
def test_data_assigned_between_forward_and_backward_is_not_rounded(lab, orig_path, strategy):
    """A unit that stays unsharded shows no copy in low precision: what users make of it would come back rounded."""
    model = lab.make(lab.Lin, dtype=torch.float32)
    want = {name: p.detach() * 1.5 for name, p in model.named_parameters()}
    policy = MixedPrecision(torch.bfloat16)
    model = lab.shard(model, orig_path, sharding_strategy=strategy, mixed_precision=policy)
    model(lab.batch().float()).sum()
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    for p in model.parameters():
        p.data = p.data * 1.5
    model(lab.batch().float()).sum().backward()
    lab.assert_same(lab.params(model), want, rtol=0.0, atol=0.0)
