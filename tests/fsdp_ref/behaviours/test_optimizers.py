"""Optimizers over parameters that users hold: groups, parts, orders, foreach, hooks."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn


@pytest.mark.world(2)
@pytest.mark.covers("ORIG-06")
@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("set_to_none", [False, True])
@pytest.mark.parametrize("when", ["before forward", "between"])
def test_parameter_groups_inside_one_flat_parameter(lab, orig_path, foreach, set_to_none, when):
    reference = lab.make()
    model = lab.shard(copy.deepcopy(reference), orig_path)

    def optimizer(m):
        biases = [p for n, p in m.named_parameters() if n.endswith("bias")]
        others = [p for n, p in m.named_parameters() if not n.endswith("bias")]
        groups = [{"params": biases, "weight_decay": 0.1}, {"params": others, "lr": 0.02}]
        return torch.optim.AdamW(groups, lr=0.05, foreach=foreach)

    optim, reference_optim = optimizer(model), optimizer(reference)
    for step in range(3):
        if when == "before forward":
            optim.zero_grad(set_to_none=set_to_none)
        loss = lab.loss(model, lab.batch(step))
        if when == "between":
            optim.zero_grad(set_to_none=set_to_none)
        loss.backward()
        optim.step()
        reference_optim.zero_grad(set_to_none=set_to_none)
        lab.reference_step(reference, lab.batches(step))
        reference_optim.step()
        lab.assert_params(model, reference)


@pytest.mark.world(2)
@pytest.mark.covers("ORIG-08")
def test_adam_counts_steps_of_unused_parameters_as_one_process_does(lab, orig_path):
    reference = lab.make(lab.Lin)
    model = lab.shard(copy.deepcopy(reference), orig_path)
    optim = torch.optim.Adam(model.parameters(), lr=0.1)
    reference_optim = torch.optim.Adam(reference.parameters(), lr=0.1)
    for step in range(3):
        lab.loss(model, lab.batch(step)).backward()
        lab.reference_step(reference, lab.batches(step))
        if step == 1:
            params = dict(
                zip(lab.units(model)[0].handle.fqns, lab.units(model)[0].handle.originals.params, strict=True)
            )
            params["a.weight"].grad = None
            reference.a.weight.grad = None
        optim.step()
        reference_optim.step()
        optim.zero_grad()
        reference_optim.zero_grad()
        lab.assert_params(model, reference)


@pytest.mark.world(4)
@pytest.mark.covers("ORIG-23")
def test_a_thousand_empty_shards_and_a_foreach_optimizer(lab, orig_path):
    class Many(nn.Module):
        def __init__(self):
            super().__init__()
            self.weights = nn.ParameterList(nn.Parameter(torch.ones(1)) for _ in range(1000))

        def forward(self, x):
            return x.sum() * torch.cat([w for w in self.weights]).sum()

    model = lab.shard(lab.make(Many), orig_path)
    optim = torch.optim.Adam(model.parameters(), lr=0.1, foreach=True)
    assert sum(p.numel() == 0 for p in model.parameters()) >= 500
    model(lab.batch()).backward()
    optim.step()
    optim.zero_grad()


@pytest.mark.world(2)
@pytest.mark.covers("B049", "B151")
def test_hooks_of_parameters_fire(lab, orig_path):
    reference = lab.make(lab.Lin)
    model = copy.deepcopy(reference)
    counts = {"sharded": 0, "plain": 0}
    for m, key in ((model, "sharded"), (reference, "plain")):
        m.a.weight.register_hook(lambda grad: grad * 2)

        def count(_, key=key):
            counts[key] += 1

        m.b.weight.register_post_accumulate_grad_hook(count)
    model = lab.shard(model, orig_path)
    lab.loss(model, lab.batch()).backward()
    lab.reference_step(reference, lab.batches())
    lab.assert_grads(model, reference)
    handle = lab.units(model)[0].handle
    # Where a rank holds none of a parameter there is no gradient to run after.
    assert counts["plain"] == 1
    assert counts["sharded"] == int(handle.originals.present(handle.fqns.index("b.weight")))
    assert sum(lab.world.all_gather_object(counts["sharded"])) > 0


@pytest.mark.world(2)
@pytest.mark.covers("B095", "ORIG-06")
def test_an_optimizer_over_some_of_the_parameters(lab, orig_path):
    reference = lab.make()
    model = lab.shard(copy.deepcopy(reference), orig_path, policy={lab.Block})

    def some(m):
        return torch.optim.SGD([p for n, p in m.named_parameters() if "lin2" in n], lr=0.1, momentum=0.9)

    optim, reference_optim = some(model), some(reference)
    for step in range(3):
        lab.loss(model, lab.batch(step)).backward()
        optim.step()
        lab.reference_step(reference, lab.batches(step))
        reference_optim.step()
        lab.assert_params(model, reference)


@pytest.mark.world([2, 3])
@pytest.mark.covers("B096", "ORIG-06")
def test_each_rank_gives_its_parameters_in_another_order(lab, orig_path):
    reference = lab.make()
    model = lab.shard(copy.deepcopy(reference), orig_path, policy={lab.Block})

    def permuted(m):
        params = list(m.parameters())
        order = torch.randperm(len(params), generator=torch.Generator().manual_seed(lab.world.rank)).tolist()
        return torch.optim.Adam([{"params": [params[place]]} for place in order], lr=0.05), order

    optim, order = permuted(model)
    assert len({tuple(each) for each in lab.world.all_gather_object(order)}) > 1
    reference_optim = torch.optim.Adam(reference.parameters(), lr=0.05)
    for step in range(4):
        lab.loss(model, lab.batch(step)).backward()
        optim.step()
        optim.zero_grad()
        lab.reference_step(reference, lab.batches(step), optim=reference_optim)
        lab.assert_params(model, reference)
        if step == 1:  # a state saved and loaded on the same rank finds its parameters again
            saved = copy.deepcopy(optim.state_dict())
            optim, _ = permuted(model)
            optim.load_state_dict(saved)


@pytest.mark.world([2, 3])
@pytest.mark.covers("B094", "ORIG-23")
@pytest.mark.parametrize("kind", ["sgd", "momentum", "adam"])
def test_optimizer_states_with_empty_entries_are_saved_and_loaded_on_each_rank(lab, path, kind):
    def optimizer(m):
        if kind in {"sgd", "momentum"}:
            return torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.9 if kind == "momentum" else 0.0)
        return torch.optim.Adam(m.parameters(), lr=0.05)

    reference = lab.make()
    model = lab.shard(copy.deepcopy(reference), path, policy={lab.Block})
    optim, reference_optim = optimizer(model), optimizer(reference)
    for step in range(3):
        saved = copy.deepcopy(optim.state_dict())  # before the first step it holds no state
        optim = optimizer(model)
        optim.load_state_dict(saved)
        lab.loss(model, lab.batch(step)).backward()
        optim.step()
        optim.zero_grad()
        lab.reference_step(reference, lab.batches(step), optim=reference_optim)
        lab.assert_params(model, reference)
