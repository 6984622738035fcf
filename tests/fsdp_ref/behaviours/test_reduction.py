"""What becomes of gradients on their way from ranks to shards."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from fsdp_ref import MixedPrecision, ShardingStrategy

S = ShardingStrategy
ALL = [S.FULL_SHARD, S.SHARD_GRAD_OP, S.NO_SHARD]
quiet = pytest.mark.filterwarnings("ignore:The `NO_SHARD` sharding strategy:FutureWarning")


class Weight(nn.Module):
    """One weight per element; the gradient is the input."""

    def __init__(self, numel=8):
        super().__init__()
        self.w = nn.Parameter(torch.ones(numel))

    def forward(self, x):
        return (self.w * x.to(self.w.dtype)).sum()


def grad_of(lab, model, path="wrapper"):
    if path == "flat":
        with lab.full(model, writeback=False):
            pass
        handle = lab.units(model)[0].handle
        pieces = lab.world.all_gather_object(handle.flat_param.grad)
        return torch.cat(pieces)[: handle.layout.numel] if handle.sharded else handle.flat_param.grad
    return lab.grads(model)["w"]


@quiet
@pytest.mark.world(2)
@pytest.mark.covers("RED-04", "RED-07", "ACC-06", "B124")
@pytest.mark.parametrize("strategy", ALL, ids=lambda s: s.name)
def test_repeated_backwards_add_up(lab, path, strategy):
    model = lab.shard(lab.make(Weight), path, sharding_strategy=strategy)
    for value in (1.0, 10.0, 100.0):
        model(torch.full((8,), value * (lab.world.rank + 1))).backward()
    torch.testing.assert_close(grad_of(lab, model, path), torch.full((8,), 111 * 1.5, dtype=torch.float64), **lab.CLOSE)


@pytest.mark.world(2)
@pytest.mark.covers("RED-03", "MP-01", "MP-04", "B004")
@pytest.mark.parametrize(
    ("precision", "want"),
    [
        # 1 and 2**-9 on two ranks: their sum survives in float32 and is rounded away in bfloat16.
        (MixedPrecision(), (1 + 2**-9) / 2),
        (MixedPrecision(param_dtype=torch.bfloat16), 0.5),
        (MixedPrecision(reduce_dtype=torch.bfloat16), 0.5),
        (MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32), (1 + 2**-9) / 2),
    ],
    ids=["none", "param", "reduce", "both"],
)
def test_in_which_dtype_is_added_shows_in_the_rounding(lab, path, precision, want):
    model = lab.shard(lab.make(Weight, dtype=torch.float32), path, mixed_precision=precision)
    model(torch.full((8,), 1.0 if lab.world.rank == 0 else 2**-9)).backward()
    grad = grad_of(lab, model, path)
    assert grad.dtype == torch.float32
    assert torch.equal(grad, torch.full((8,), want))


@pytest.mark.world(2)
@pytest.mark.covers("RED-03", "B023")
def test_units_of_one_tree_reduce_in_their_own_dtype(lab):
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = Weight(), Weight()

        def forward(self, x):
            return self.a(x) + self.b(x)

    model = lab.make(Two, dtype=torch.float32)
    model.a = lab.shard(model.a, mixed_precision=MixedPrecision(reduce_dtype=torch.bfloat16))
    model.b = lab.shard(model.b)
    model = lab.shard(model)
    model(torch.full((8,), 1.0 if lab.world.rank == 0 else 2**-9)).backward()
    grads = lab.grads(model)
    assert torch.equal(grads["a.w"], torch.full((8,), 0.5))
    assert torch.equal(grads["b.w"], torch.full((8,), (1 + 2**-9) / 2))


@pytest.mark.world([2, 4])
@pytest.mark.covers("B052", "RED-01")
@pytest.mark.parametrize("size", ["largest", "smallest"])
def test_half_precision_neither_overflows_nor_underflows_in_the_sum(lab, size):
    """Two amounts that are exact only if part of the division comes before the sum and the rest after it.

    Both ranks of two, or all of four, send the same: undivided, the largest would sum to more than 65504. Divided by
    four at once, the smallest (twice the least number there is) would round to nothing.
    """
    value = 2.0**-23 if size == "smallest" else {2: 60000.0, 4: 32000.0}[lab.world.size]
    precision = MixedPrecision(reduce_dtype=torch.float16)
    model = lab.shard(lab.make(Weight, dtype=torch.float32), mixed_precision=precision)
    model(torch.full((8,), value)).backward()
    torch.testing.assert_close(lab.grads(model)["w"], torch.full((8,), value), rtol=0.0, atol=0.0)


@pytest.mark.world(2)
@pytest.mark.covers("RED-05", "B137")
def test_gradients_of_gradients_are_refused_and_the_model_stays_usable(lab, path):
    reference = lab.make()
    model = lab.shard(copy.deepcopy(reference), path, policy={lab.Block})
    with pytest.raises(RuntimeError, match="FSDP does not support gradients of gradients"):
        lab.loss(model, lab.batch()).backward(create_graph=True)
    model.zero_grad()
    lab.loss(model, lab.batch()).backward()
    lab.reference_step(reference, lab.batches())
    if path != "flat":
        lab.assert_grads(model, reference)


@pytest.mark.world(2)
@pytest.mark.covers("RED-08", "B037", "FRZ-07", "ORIG-09")
def test_a_unit_that_is_not_used_reduces_nothing(lab, path):
    class Maybe(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)

        def forward(self, x, both=True):
            y = self.a(x)
            return y + self.b(x) if both else y

    reference = lab.make(Maybe)
    model = lab.shard(copy.deepcopy(reference), path, policy={nn.Linear})
    for step, both in enumerate([True, False, True, False]):
        with lab.events() as seen:
            model(lab.batch(step), both).square().mean().backward()
        reduced = {event.unit for event in seen if event.kind.name == "REDUCE"}
        assert reduced == ({"a", "b"} if both else {"a"})
        assert not any(unit.handle.unsharded for unit in lab.units(model) if unit.handle)
        for batch in lab.batches(step):
            (reference(batch, both).square().mean() / lab.world.size).backward()
        if path != "flat":
            lab.assert_grads(model, reference)
        for m in (model, reference):
            m.zero_grad(set_to_none=step % 2 == 0)


@pytest.mark.world(2)
@pytest.mark.covers("B007", "FLAT-05")
def test_garbage_in_fresh_memory_reaches_no_result(lab, path, monkeypatch):
    empty, empty_like = torch.empty, torch.empty_like

    def poisoned(made):
        return made.fill_(float("nan")) if made.is_floating_point() and made.device.type == "cpu" else made

    monkeypatch.setattr(torch, "empty", lambda *a, **k: poisoned(empty(*a, **k)))
    monkeypatch.setattr(torch, "empty_like", lambda *a, **k: poisoned(empty_like(*a, **k)))
    model = lab.parity(lambda: lab.Net(width=5), path, policy={lab.Block})
    lab.loss(model, lab.batch()).backward()
    for unit in lab.units(model):
        assert not unit.handle.shard_S.isnan().any()
        if path == "flat":
            assert not unit.handle.flat_param.grad.isnan().any()
    if path != "composable":
        assert model.clip_grad_norm_(1.0).isfinite()


@pytest.mark.world(2)
@pytest.mark.covers("B121", "B122", "LIM-07")
def test_reductions_in_flight_are_bounded(lab, path):
    from fsdp_ref.runtime.events import observe

    model = lab.shard(lab.make(lambda: lab.Net(blocks=8)), path, policy={lab.Block})
    loss = lab.loss(model, lab.batch())
    root = lab.units(model)[0].root
    most = 0

    def count(_):
        nonlocal most
        most = max(most, len(root.sync._open))

    with observe(count):
        loss.backward()
    assert 1 <= most <= 2
    assert len(root.sync._open) == 0
