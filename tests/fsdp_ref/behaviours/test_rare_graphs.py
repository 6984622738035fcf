"""What graphs seldom do: a unit inside itself, parameters that autograd passes by, saved parameters read by hand."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from fsdp_ref import MixedPrecision, ShardingStrategy
from fsdp_ref.composable import replicate
from fsdp_ref.states import UnitState

S = ShardingStrategy


class Again(nn.Module):
    """Calls the sharded module that it is a part of, once more, before or instead of an error."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(3, 3)
        self.whole = [self]
        self.fails = False

    def forward(self, x, again=True):
        y = self.lin(x).tanh()
        if again:
            return self.whole[0](y, again=False)
        if self.fails:
            raise ValueError("inside itself")
        return y


@pytest.mark.world(2)
@pytest.mark.parametrize("strategy", [S.FULL_SHARD, S.SHARD_GRAD_OP], ids=lambda s: s.name)
def test_a_unit_inside_itself(lab, path, strategy):
    reference = lab.make(Again)
    inner = lab.make(Again)
    model = lab.shard(inner, path, sharding_strategy=strategy)
    inner.whole = [model]
    for fails in (False, True, False):
        inner.fails = fails
        if fails:
            with pytest.raises(ValueError, match="inside itself"):
                model(lab.batch())
        else:
            for module in (model, reference):
                module.zero_grad()
            lab.loss(model, lab.batch()).backward()
            lab.reference_step(reference, lab.batches())
            for module in (model, reference):
                torch.optim.SGD(module.parameters(), lr=0.1).step()
            lab.assert_params(model, reference)
        assert [unit.state for unit in lab.units(model)] == [UnitState.SHARDED]


class PassedBy(torch.autograd.Function):
    """Uses a weight that is given no gradient."""

    @staticmethod
    def forward(ctx, x, weight):
        return x * weight.sum()

    @staticmethod
    def backward(ctx, grad):
        return grad, None


@pytest.mark.world(2)
def test_a_unit_whose_parameters_autograd_passes_by(lab, path):
    class Unit(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin = nn.Linear(3, 3)

        def forward(self, x):
            return PassedBy.apply(x, self.lin.weight)

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.inp, self.unit = nn.Linear(3, 3), Unit()

        def forward(self, x):
            return self.unit(self.inp(x))

    model = lab.shard(lab.make(Model), path, policy={Unit})
    with lab.collectives() as seen:
        lab.loss(model, lab.batch()).backward()
    root, unit = lab.units(model)
    assert [call.unit for call in seen if call.op == "reduce_scatter"] == [root.name]
    assert root.handle.grads.reduced_S is not None
    assert unit.handle.grads.reduced_S is None
    assert not unit.handle.unsharded


@pytest.mark.world(2)
def test_saved_parameters_read_outside_of_backward_are_copies(lab, path):
    """Somebody who inspects the graph finds values, also of units that were freed, and backward is none the worse."""
    reference = lab.make()
    model = lab.shard(copy.deepcopy(reference), path, policy={lab.Block})
    loss = lab.loss(model, lab.batch())
    found, waiting, seen = [], [loss.grad_fn], set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if getattr(node, "_saved_mat2", None) is not None:
            found.append(node._saved_mat2)
        waiting.extend(following for following, _ in node.next_functions)
    wanted = [param.detach().t() for name, param in reference.named_parameters() if name.endswith("lin1.weight")]
    for each in wanted:
        assert sum(each.shape == other.shape and torch.equal(each, other) for other in found) == 1
    loss.backward()
    lab.reference_step(reference, lab.batches())
    for module in (model, reference):
        torch.optim.SGD(module.parameters(), lr=0.1).step()
    lab.assert_params(model, reference)
    assert all(each.isfinite().all() for each in found)


@pytest.mark.world(2)
def test_sparse_tensors_that_autograd_saves(lab, path):
    class Neighbours(nn.Module):
        def __init__(self):
            super().__init__()
            self.inp, self.out = nn.Linear(3, 3), nn.Linear(3, 1)

        def forward(self, x):
            near = torch.eye(len(x), dtype=x.dtype).flip(0).to_sparse()
            return self.out(torch.sparse.mm(near, self.inp(x).tanh()))

    lab.parity(Neighbours, path)


@pytest.mark.world(2)
def test_hooks_on_a_flat_parameter_see_its_whole_gradient_zeros_for_what_is_unused(lab):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.unused = nn.Linear(3, 2), nn.Linear(2, 2)

        def forward(self, x):
            return self.used(x)

    reference = lab.make(Model)
    model = lab.shard(copy.deepcopy(reference), "flat")
    (unit,) = lab.units(model)
    seen = []
    unit.handle.flat_param.register_hook(seen.append)
    unit.handle.flat_param.register_hook(lambda grad: 2 * grad)
    lab.loss(model, lab.batch()).backward()
    lab.loss(reference, lab.batch()).backward()
    own = [torch.zeros_like(param) if param.grad is None else param.grad for param in reference.parameters()]
    torch.testing.assert_close(seen[0], torch.cat([grad.reshape(-1) for grad in own]), **lab.CLOSE)
    assert len(seen) == 1
    reference.zero_grad()
    lab.reference_step(reference, lab.batches())
    for param in reference.used.parameters():
        param.grad.mul_(2)
    for module in (model, reference):
        torch.optim.SGD(module.parameters(), lr=0.1).step()
    lab.assert_params(model, reference)


@pytest.mark.world(2)
def test_an_evaluation_in_full_precision_before_the_backward_of_a_low_one(lab, path, monkeypatch):
    """Backward reads what its forward computed with, though the unit has computed in another precision since."""
    monkeypatch.setenv("FSDP_USE_FULL_PREC_IN_EVAL", "1")
    steps = []
    for between in (False, True):
        model = lab.shard(
            lab.make(dtype=torch.float32),
            path,
            policy={lab.Block},
            mixed_precision=MixedPrecision(param_dtype=torch.bfloat16, buffer_dtype=torch.bfloat16),
        )
        loss = lab.loss(model, lab.batch().float())
        if between:
            model.eval()
            with torch.no_grad():
                assert model(lab.batch().float()).dtype is torch.float32
        loss.backward()
        model.train()
        torch.optim.SGD(model.parameters(), lr=0.1).step()
        steps.append(lab.params(model))
    assert all(torch.equal(value, steps[1][name]) for name, value in steps[0].items())


@pytest.mark.world(2)
def test_parameters_replaced_while_a_unit_stays_unsharded_in_no_sync(lab):
    reference = lab.make()
    model = lab.shard(copy.deepcopy(reference), policy={lab.Block}, sharding_strategy=S.SHARD_GRAD_OP)
    with model.no_sync():
        lab.loss(model, lab.batch(0)).backward()
    kept = [unit for unit in lab.units(model) if unit.handle.unsharded]
    assert kept
    model.zero_grad()
    for module in (model, reference):
        for param in module.parameters():
            param.data = param.data * 2
    torch.testing.assert_close(model(lab.batch(1)), reference(lab.batch(1)), **lab.CLOSE)


@pytest.mark.world(2)
def test_replicas_whose_outputs_are_nested_and_whose_backward_reaches_nothing(lab):
    class Maybe(nn.Module):
        used = True

        def __init__(self):
            super().__init__()
            self.lin = nn.Linear(3, 3)

        def forward(self, x):
            return {"pair": (self.lin(x) if self.used else x * 2, [None])}

    reference = lab.make(Maybe)
    model = replicate(copy.deepcopy(reference))
    model.used = lab.world.rank == 0
    model({"x": lab.batch().requires_grad_()}["x"])["pair"][0].sum().backward()
    reference(lab.batch(rank=0))["pair"][0].sum().div(lab.world.size).backward()
    for param, wanted in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(param.grad, wanted.grad, **lab.CLOSE)
