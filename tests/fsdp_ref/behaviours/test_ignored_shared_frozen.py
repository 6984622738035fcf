"""Parameters with a life of their own: ignored, tied, frozen, unused."""

from __future__ import annotations

import copy
from collections import Counter

import pytest
import torch
from torch import nn

from fsdp_ref import ShardingStrategy

S = ShardingStrategy
SHARDED = [S.FULL_SHARD, S.SHARD_GRAD_OP]
strategies = pytest.mark.parametrize("strategy", SHARDED, ids=lambda s: s.name)


# -------------------------------------------------------------------------------------------------- ignored


@pytest.mark.world(2)
@pytest.mark.covers("IGN-01", "B069", "IGN-09", "B067")
def test_ignored_modules_stay_plain_and_local(lab, path):
    local = lab.make()
    plain = copy.deepcopy(local)
    objects = list(plain.blocks[1].parameters())
    model = lab.shard(plain, path, policy={lab.Block}, ignored_modules=[plain.blocks[1]])
    lab.loss(model, lab.batch()).backward()
    lab.reference_step(local, [lab.batch()])
    for p, q in zip(objects, local.blocks[1].parameters(), strict=True):
        assert p.shape == q.shape
        torch.testing.assert_close(p.grad, q.grad, **lab.CLOSE)


@pytest.mark.world(2)
@pytest.mark.covers("B149", "IGN-01")
@pytest.mark.parametrize("foreach", [True, False])
def test_one_optimizer_over_ignored_and_sharded_parameters(lab, path, foreach):
    plain = lab.make()
    ignored = plain.blocks[1]
    model = lab.shard(plain, path, policy={lab.Block}, ignored_modules=[ignored])
    optim = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=foreach)
    before = ignored.lin1.weight.detach().clone()
    for step in range(2):
        lab.loss(model, lab.batch(step)).backward()
        optim.step()
        optim.zero_grad()
    assert not torch.equal(ignored.lin1.weight, before)


@pytest.mark.world(2)
@pytest.mark.covers("IGN-07", "IGN-06")
def test_ranks_may_ignore_differently_many_modules(lab):
    plain = lab.make()
    ignored = [nn.Linear(1, 1) for _ in range(lab.world.rank)] + [plain.blocks[0]]
    model = lab.shard(plain, policy={lab.Block}, ignored_modules=(m for m in ignored))
    lab.loss(model, lab.batch()).backward()
    assert len(lab.units(model)) == 3


# -------------------------------------------------------------------------------------------------- shared


class TiedInside(nn.Module):
    """A tie within one unit, one that is used twice, and an odd size."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(3, 5, bias=False)
        self.mid = nn.Linear(5, 5)
        self.again = self.mid
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x):
        x = self.again(self.mid(self.embed(x)).tanh())
        return x @ self.head.weight


@pytest.mark.world([2, 3])
@pytest.mark.covers("SHR-01", "SHR-02", "SHR-04", "B081", "B140")
@pytest.mark.parametrize("set_to_none", [True, False])
@strategies
def test_a_tie_within_a_unit(lab, path, strategy, set_to_none):
    reference = lab.make(TiedInside)
    model = lab.shard(copy.deepcopy(reference), path, sharding_strategy=strategy)
    optim = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    reference_optim = torch.optim.SGD(reference.parameters(), lr=0.1, momentum=0.9)
    for step in range(2):
        lab.loss(model, lab.batch(step)).backward()
        optim.step()
        optim.zero_grad(set_to_none=set_to_none)
        lab.reference_step(reference, lab.batches(step), optim=reference_optim)
        lab.assert_params(model, reference)
    inner = model if path == "composable" else model.module
    if path != "flat":
        assert inner.head.weight is inner.embed.weight
    with lab.full(model):
        assert inner.head.weight is inner.embed.weight
        names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
        assert {"again.weight", "mid.weight", "head.weight", "embed.weight"} <= set(names)


class Leaf(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(3, 3)

    def forward(self, x):
        return x + self.lin(x).tanh()


# -------------------------------------------------------------------------------------------------- frozen


@pytest.mark.world(2)
@pytest.mark.covers("FRZ-01", "FRZ-02", "B039")
@pytest.mark.parametrize("input_grad", [True, False])
def test_frozen_units_are_given_up_in_backward_and_never_reduced(lab, path, input_grad):
    reference = lab.make()
    for block in reference.blocks:
        block.requires_grad_(False)
    model = lab.shard(copy.deepcopy(reference), path, policy={lab.Block})
    x = lab.batch()
    if input_grad:
        x.requires_grad_()
    with lab.events() as seen:
        lab.loss(model, x).backward()
    kinds = Counter((event.unit, event.kind.name) for event in seen)
    for i in range(3):
        assert kinds[f"blocks.{i}", "REDUCE"] == 0
        assert kinds[f"blocks.{i}", "RESHARD"] >= 2
    assert kinds["", "REDUCE"] == 1
    assert not any(unit.handle.unsharded for unit in lab.units(model))
    assert all(p.grad is None for u in lab.units(model)[1:] for p in (*u.handle.originals.params, u.handle.flat_param))
    lab.reference_step(reference, lab.batches())
    if path != "flat":
        lab.assert_grads(model, reference)


@pytest.mark.world(2)
@pytest.mark.covers("FRZ-01", "LIM-07", "B039")
def test_frozen_units_do_not_pile_up_during_backward(lab, path):
    from fsdp_ref.runtime.events import observe
    from fsdp_ref.states import UnitState

    plain = lab.make(lambda: lab.Net(blocks=6))
    for block in plain.blocks:
        block.requires_grad_(False)
    model = lab.shard(plain, path, policy={lab.Block})
    loss = lab.loss(model, lab.batch())
    peak = 0

    def count(_):
        nonlocal peak
        alive = [u for u in lab.units(model)[1:] if u.handle.state is not UnitState.SHARDED]
        peak = max(peak, len(alive))

    with observe(count):
        loss.backward()
    assert peak == 2  # the one that is differentiated and the one that is gathered ahead, however deep the stack is


@pytest.mark.world(2)
@pytest.mark.covers("FRZ-03", "FRZ-08", "B040", "B162")
@strategies
def test_freezing_and_thawing_between_steps(lab, path, strategy):
    reference = lab.make()
    model = lab.shard(copy.deepcopy(reference), path, policy={lab.Block}, sharding_strategy=strategy)
    optim = torch.optim.SGD(model.parameters(), lr=0.1)
    reference_optim = torch.optim.SGD(reference.parameters(), lr=0.1)
    for step, frozen in enumerate([{0}, {0, 1}, set(), {2}, set(), {0, 1, 2}, set()]):
        for i in range(3):
            for p in lab.units(model)[1 + i].module.parameters():
                p.requires_grad_(i not in frozen)
            reference.blocks[i].requires_grad_(i not in frozen)
        lab.loss(model, lab.batch(step)).backward()
        optim.step()
        optim.zero_grad()
        lab.reference_step(reference, lab.batches(step), optim=reference_optim)
        lab.assert_params(model, reference)


class Twice(nn.Module):
    """Calls one unit several times, sometimes without gradients."""

    def __init__(self):
        super().__init__()
        self.inp = nn.Linear(3, 3)
        self.leaf = Leaf()

    def forward(self, x):
        x = self.leaf(self.inp(x))
        with torch.no_grad():
            target = self.leaf(x)
        return self.leaf(self.leaf(x)) - target


@pytest.mark.world(2)
@pytest.mark.covers("FRZ-04", "B036", "B039", "RUN-07")
@pytest.mark.parametrize("frozen", [False, True])
@strategies
def test_a_unit_called_many_times(lab, path, strategy, frozen):
    freeze = lambda m: m.leaf.requires_grad_(not frozen)
    lab.parity(Twice, path, policy={Leaf}, sharding_strategy=strategy, prepare=freeze)


class UnusedInput(nn.Module):
    def __init__(self):
        super().__init__()
        self.inp = nn.Linear(3, 3)
        self.frozen = TakesTwo()

    def forward(self, x):
        y = self.inp(x)
        return self.frozen(x, y).sum() + y.square().mean()


class TakesTwo(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(3, 3)
        self.lin.requires_grad_(False)

    def forward(self, used, unused):
        return self.lin(used)


@pytest.mark.world(2)
@pytest.mark.covers("FRZ-05", "B041")
@strategies
def test_a_frozen_unit_with_an_input_that_it_does_not_use(lab, path, strategy):
    lab.parity(UnusedInput, path, policy={TakesTwo}, sharding_strategy=strategy, loss=lambda m, x: m(x))


@pytest.mark.world(2)
@pytest.mark.covers("FRZ-09", "B037", "B164")
def test_a_unit_that_one_rank_alone_leaves_out_of_the_loss(lab):
    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = Leaf(), Leaf()

        def forward(self, x):
            return self.a(x), self.b(x)

    reference = lab.make(Both)
    model = lab.shard(copy.deepcopy(reference), policy={Leaf})

    def loss_of(outputs, rank):
        # The other unit is run by all and counts for nothing on rank 1, as a user must write it.
        return outputs[0].square().mean() + outputs[1].square().mean() * (0.0 if rank == 1 else 1.0)

    for step in range(2):
        loss_of(model(lab.batch(step)), lab.world.rank).backward()
        for rank, batch in enumerate(lab.batches(step)):
            (loss_of(reference(batch), rank) / lab.world.size).backward()
    lab.assert_grads(model, reference)


@pytest.mark.world(2)
@pytest.mark.covers("FRZ-10", "RUN-14", "RUN-04")
def test_no_grad_forwards_leave_nothing_behind(lab, path):
    model = lab.shard(lab.make(), path, policy={lab.Block})
    with torch.no_grad():
        output = model(lab.batch())
    assert output._backward_hooks is None
    assert not any(unit.awaits_backward for unit in lab.units(model))
    plain = torch.ones(2, requires_grad=True)
    with lab.events() as seen:
        (output.sum() + plain.sum()).backward()
    assert seen == []


@pytest.mark.world(2)
@pytest.mark.covers("FRZ-07", "B037", "RUN-06")
@strategies
def test_an_output_that_the_loss_does_not_use(lab, path, strategy):
    class TwoHeads(nn.Module):
        def __init__(self):
            super().__init__()
            self.inp = nn.Linear(3, 3)
            self.a, self.b = Leaf(), Leaf()

        def forward(self, x):
            x = self.inp(x)
            return {"a": self.a(x), "b": self.b(x)}

    for used in ("a", "b"):
        model = lab.parity(
            TwoHeads,
            path,
            policy={Leaf},
            sharding_strategy=strategy,
            loss=lambda m, x, used=used: m(x)[used].square().mean(),
            optim=torch.optim.SGD,
        )
        assert not any(unit.handle.unsharded for unit in lab.units(model))
