"""Activation checkpointing inside and around units, of both kinds."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper
from torch.utils.checkpoint import checkpoint

from fsdp_ref import ShardingStrategy
from fsdp_ref.annotations import units_under

S = ShardingStrategy
KINDS = {"reentrant": CheckpointImpl.REENTRANT, "non-reentrant": CheckpointImpl.NO_REENTRANT}
kinds = pytest.mark.parametrize("kind", KINDS)


class Chain(nn.Module):
    """Blocks whose input needs a gradient, as reentrant checkpointing requires."""

    def __init__(self, block):
        super().__init__()
        self.inp = nn.Linear(3, 4)
        self.blocks = nn.ModuleList(block(4) for _ in range(3))

    def forward(self, x):
        x = self.inp(x)
        for block in self.blocks:
            x = block(x)
        return x


def compare(lab, model, reference, path, steps=2):
    optim = torch.optim.Adam(model.parameters(), lr=0.05)
    reference_optim = torch.optim.Adam(reference.parameters(), lr=0.05)
    for step in range(steps):
        lab.loss(model, lab.batch(step)).backward()
        if path != "flat" and step == 0:
            for batch in lab.batches(step):
                (lab.loss(reference, batch) / lab.world.size).backward()
            got = {n.replace("_checkpoint_wrapped_module.", ""): g for n, g in lab.grads(model).items()}
            lab.assert_same(got, {n: p.grad for n, p in reference.named_parameters()})
        else:
            lab.reference_step(reference, lab.batches(step))
        optim.step()
        optim.zero_grad()
        reference_optim.step()
        reference_optim.zero_grad()
        got = {n.replace("_checkpoint_wrapped_module.", ""): p for n, p in lab.params(model).items()}
        lab.assert_same(got, {n: p.detach() for n, p in reference.named_parameters()})


@pytest.mark.world(2)
@pytest.mark.covers("AC-01", "B018", "B020", "B034", "AC-05", "COMP-18", "ORIG-17")
@kinds
@pytest.mark.parametrize("where", ["inside", "outside"])
@pytest.mark.parametrize("strategy", [S.FULL_SHARD, S.SHARD_GRAD_OP], ids=lambda s: s.name)
def test_gradients_equal_the_reference(lab, path, kind, where, strategy):
    build = lambda: Chain(lab.Block)
    reference = lab.make(build)
    model = copy.deepcopy(reference)
    options = {"sharding_strategy": strategy}
    for index, block in enumerate(model.blocks):
        if where == "inside":
            model.blocks[index] = lab.shard(checkpoint_wrapper(block, KINDS[kind]), path, **options)
        else:
            model.blocks[index] = checkpoint_wrapper(lab.shard(block, path, **options), KINDS[kind])
    model = lab.shard(model, path, **options)
    assert len(lab.units(model)) == 4
    compare(lab, model, reference, path)


@pytest.mark.world(2)
@pytest.mark.covers("AC-01", "B020", "B013")
@kinds
def test_inputs_by_keyword(lab, path, kind):
    class ByName(nn.Module):
        def __init__(self):
            super().__init__()
            self.inp, self.block = nn.Linear(3, 4), Named()

        def forward(self, x):
            return self.block(scale=2.0, x=self.inp(x))

    class Named(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin = nn.Linear(4, 4)

        def forward(self, *, x, scale):
            return self.lin(x).tanh() * scale

    reference = lab.make(ByName)
    model = copy.deepcopy(reference)
    if kind == "reentrant":
        model.block = lab.shard(model.block, path)
    else:
        model.block = checkpoint_wrapper(lab.shard(model.block, path), KINDS[kind])
    model = lab.shard(model, path)
    compare(lab, model, reference, path)


@pytest.mark.world(2)
@pytest.mark.covers("AC-02")
@kinds
def test_a_recomputed_forward_gathers_nothing_twice(lab, path, kind):
    model = lab.make(lambda: Chain(lab.Block))
    for index, block in enumerate(model.blocks):
        model.blocks[index] = lab.shard(checkpoint_wrapper(block, KINDS[kind]), path)
    model = lab.shard(model, path)
    loss = lab.loss(model, lab.batch())
    with lab.events() as seen:
        loss.backward()
    kinds_seen = [(event.unit, event.kind.name) for event in seen]
    for unit in lab.units(model)[1:]:
        assert kinds_seen.count((unit.name, "GATHER")) <= 1
        assert kinds_seen.count((unit.name, "REDUCE")) == 1


@pytest.mark.world(2)
@pytest.mark.covers("AC-01", "B047", "B132")
@kinds
def test_a_unit_whose_output_is_a_view_that_is_changed_in_place_runs_again(lab, kind):
    """The change gives the output another node, and the hook on the old one never runs."""

    class Views(nn.Module):
        def __init__(self, on):
            super().__init__()
            self.lin, self.on = nn.Linear(4, 4), on

        def forward(self, x):
            y = checkpoint(self.lin, x, use_reentrant=kind == "reentrant") if self.on else self.lin(x)
            return torch.cat([y, y])[: len(x)]

    class Changes(nn.Module):
        def __init__(self, on=True):
            super().__init__()
            self.inp, self.views, self.out = nn.Linear(3, 4), Views(on), nn.Linear(4, 1)

        def forward(self, x):
            y = self.views(self.inp(x))
            y += 1.0
            return self.out(y)

    reference = lab.make(lambda: Changes(on=False))
    model = lab.shard(lab.make(Changes), "composable", policy={Views})
    compare(lab, model, reference, "composable")


@pytest.mark.world(2)
@pytest.mark.covers("AC-03", "B035", "B036")
@kinds
@pytest.mark.parametrize("strategy", [S.FULL_SHARD, S.SHARD_GRAD_OP], ids=lambda s: s.name)
def test_one_unit_in_several_checkpointed_regions(lab, path, kind, strategy):
    class Regions(nn.Module):
        """The root's own layers in several regions, and one unit that is used in two of them."""

        def __init__(self, on=True):
            super().__init__()
            self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)
            self.shared = lab.Block(3)
            self.on = on

        def region(self, f, x):
            return checkpoint(f, x, use_reentrant=kind == "reentrant") if self.on else f(x)

        def forward(self, x):
            x = self.a(x)
            x = self.region(lambda y: self.shared(self.b(y)), x)
            x = self.region(lambda y: self.b(y).tanh(), x)
            return self.region(lambda y: self.shared(self.a(y)), x)

    reference = lab.make(lambda: Regions(on=False))
    model = lab.shard(lab.make(Regions), path, policy={lab.Block}, sharding_strategy=strategy)
    compare(lab, model, reference, path)


@pytest.mark.world(2)
@pytest.mark.covers("AC-04")
def test_checkpointed_submodules_under_sibling_units(lab):
    class Sibling(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two = lab.Block(3), lab.Block(3)

        def forward(self, x):
            return self.two(self.one(x))

    reference = lab.make(Sibling)
    model = copy.deepcopy(reference)
    for name in ("one", "two"):
        block = getattr(model, name)
        block.lin1 = checkpoint_wrapper(block.lin1, CheckpointImpl.NO_REENTRANT)
        lab.shard(block, "composable")
    lab.shard(model, "composable")
    compare(lab, model, reference, "composable")


@pytest.mark.world(2)
@pytest.mark.parametrize("where", ["inside", "outside", "before a layer"])
def test_a_penalty_on_gradients_of_inputs_runs_it_again(lab, path, where):
    """The graph of the first backward reads what the second forward computed with, when the buffer is gone.

    Before a layer, the second forward of a unit begins before its output has a gradient.
    """

    def loss(model, batch):
        x = batch.clone().requires_grad_()
        (grad,) = torch.autograd.grad(model(x).pow(3).sum(), x, create_graph=True)
        return model(x).sum() + grad.pow(2).sum()

    reference = lab.make(lambda: Chain(lab.Block))
    model = copy.deepcopy(reference)
    for index, block in enumerate(model.blocks):
        if where == "inside":
            model.blocks[index] = lab.shard(checkpoint_wrapper(block, KINDS["non-reentrant"]), path)
        elif where == "before a layer":
            behind = nn.Sequential(lab.shard(block, path), nn.Tanh())
            model.blocks[index] = checkpoint_wrapper(behind, KINDS["non-reentrant"])
            reference.blocks[index] = nn.Sequential(reference.blocks[index], nn.Tanh())
        else:
            model.blocks[index] = checkpoint_wrapper(lab.shard(block, path), KINDS["non-reentrant"])
    model = lab.shard(model, path)
    for step in range(2):
        loss(model, lab.batch(step)).backward()
        for batch in lab.batches(step):
            (loss(reference, batch) / lab.world.size).backward()
    for each in (model, reference):
        torch.optim.SGD(each.parameters(), lr=0.01).step()
    got = {n.replace("_checkpoint_wrapped_module.", ""): p for n, p in lab.params(model).items()}
    lab.assert_same(got, {n: p.detach() for n, p in reference.named_parameters()})


@pytest.mark.world(2)
@kinds
@pytest.mark.parametrize("strategy", [S.FULL_SHARD, S.SHARD_GRAD_OP], ids=lambda s: s.name)
@pytest.mark.parametrize("when", ["within the forward", "before backward"])
def test_a_pass_without_gradients_before_backward_changes_nothing(lab, path, kind, strategy, when):
    class Region(nn.Module):
        def __init__(self, on):
            super().__init__()
            self.a, self.b, self.on = nn.Linear(4, 4), nn.Linear(4, 4), on

        def forward(self, x):
            x, on = self.a(x), self.on and torch.is_grad_enabled()
            return checkpoint(self.b, x, use_reentrant=kind == "reentrant") if on else self.b(x)

    class Looks(nn.Module):
        def __init__(self, on=True):
            super().__init__()
            self.inp, self.region, self.out = nn.Linear(3, 4), Region(on), nn.Linear(4, 1)

        def forward(self, x):
            y = self.region(self.inp(x).tanh()).sin()
            if when == "within the forward":
                with torch.no_grad():
                    target = self.region(y)
                y = y * target
            return self.out(y)

    reference = lab.make(lambda: Looks(on=False))
    model = lab.shard(lab.make(Looks), path, policy={Region}, sharding_strategy=strategy)
    loss = model(lab.batch()).pow(2).sum()
    if when == "before backward":
        with torch.no_grad():
            model(lab.batch(1))
    loss.backward()
    for batch in lab.batches():
        (reference(batch).pow(2).sum() / lab.world.size).backward()
    for each in (model, reference):
        torch.optim.SGD(each.parameters(), lr=0.01).step()
    lab.assert_params(model, reference)


@pytest.mark.world(2)
def test_a_pass_that_creates_a_graph_is_known_as_one_though_something_in_it_runs_without_gradients(lab, path):
    model = lab.shard(lab.make(lambda: Chain(lab.Block)), path)
    x = lab.batch(0).clone().requires_grad_()
    output = model(x)
    root = next(unit.root for _, _, unit in units_under(model) if unit.root is not None)
    known = []

    def read_without_gradients(_):
        with torch.no_grad():
            root.enter_backward()
        known.append(root.creates_graph)

    x.register_hook(read_without_gradients)
    torch.autograd.grad(output.pow(3).sum(), x, create_graph=True)
    model(x).sum().backward()
    assert known == [True, False]
