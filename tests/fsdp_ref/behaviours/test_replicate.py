"""Replicated modules, alone and beside sharded ones."""

from __future__ import annotations

import copy
from contextlib import ExitStack

import pytest
import torch
from torch import nn

from fsdp_ref.annotations import unit_of
from fsdp_ref.composable import fully_shard, replicate
from fsdp_ref.errors import FsdpRuntimeError
from fsdp_ref.wrap import ModuleWrapPolicy


def unwrapped_step(lab, reference, step):
    lab.reference_step(reference, lab.batches(step))


MIXES = {
    "1fm,1r": lambda m: (fully_shard(m.u1), replicate(m.u2)),
    "1r,1fm": lambda m: (replicate(m.u1), fully_shard(m.u2)),
    "1r,1fa": lambda m: (replicate(m.u1), fully_shard(m.u2, policy=ModuleWrapPolicy({nn.Linear}))),
    "1r1fm,1fm": lambda m: (fully_shard(m.u1.seq), replicate(m.u1), fully_shard(m.u2)),
    "1r1fa,1fm": lambda m: (
        fully_shard(m.u1.seq, policy=ModuleWrapPolicy({nn.Linear})),
        replicate(m.u1),
        fully_shard(m.u2),
    ),
    "1fm1fm,1r1r,1fm": lambda m: (
        fully_shard(m.u1.seq),
        fully_shard(m.u1),
        replicate(m.u2.l1),
        replicate(m.u2.seq),
        fully_shard(m.u2.l2),
    ),
}


@pytest.mark.world(2)
@pytest.mark.covers("REP-01", "REP-02", "REP-04", "B010")
@pytest.mark.parametrize("mix", MIXES)
def test_replicated_and_sharded_parts_train_like_one_process(lab, mix):
    reference = lab.make(lab.Deep)
    model = copy.deepcopy(reference)
    MIXES[mix](model)
    covered = {id(p) for m in (model.u1, model.u2) for p in m.parameters()}
    rest = [(n, p) for n, p in model.named_parameters() if id(p) not in covered]
    optim = torch.optim.Adam(model.parameters(), lr=0.05)
    reference_optim = torch.optim.Adam(reference.parameters(), lr=0.05)
    for step in range(3):
        lab.loss(model, lab.batch(step)).backward()
        for _, p in rest:  # what nobody manages, as DistributedDataParallel around it would do
            torch.distributed.all_reduce(p.grad)
            p.grad.div_(lab.world.size)
        optim.step()
        optim.zero_grad()
        lab.reference_step(reference, lab.batches(step), optim=reference_optim)
        # What lies in a replicated subtree is not reached from above it.
        with ExitStack() as stack:
            for module in model.modules():
                if unit_of(module) is not None:
                    stack.enter_context(lab.full(module, recurse=False, writeback=False))
            for name, p in model.named_parameters():
                torch.testing.assert_close(p.detach(), reference.get_parameter(name).detach(), **lab.CLOSE, msg=name)


@pytest.mark.world(2)
@pytest.mark.covers("REP-01", "IGN-01")
@pytest.mark.parametrize("outside_first", [False, True])
def test_a_module_that_also_hangs_in_a_sharded_unit_is_no_part_of_a_replica(outside_first):
    shared = nn.Linear(3, 3)
    inside, outside = nn.Sequential(shared), nn.Sequential(shared, nn.Linear(3, 1))
    model = nn.Sequential(*([outside, inside] if outside_first else [inside, outside]))
    fully_shard(inside)
    replica = replicate(model)
    assert [name.partition(".")[2] for name in replicate.state(replica).replica.param_names] == ["1.weight", "1.bias"]


@pytest.mark.world(2)
@pytest.mark.covers("REP-01", "TRAV-03", "B010", "IGN-01")
def test_a_replicated_subtree_inside_a_sharded_module(lab):
    reference = lab.make(lab.Deep)
    model = copy.deepcopy(reference)
    fully_shard(model.u2.seq[1])
    replicate(model.u2)
    fully_shard(model, policy=ModuleWrapPolicy({lab.Unit}))
    assert len(lab.units(model)) == 2  # the root and u1; the unit inside the replicated subtree is not reached
    held = {fqn for unit in lab.units(model) for fqn in unit.handle.fqns}
    assert not any("u2" in fqn for fqn in held)
    with lab.collectives() as seen:
        lab.loss(model, lab.batch()).backward()
    lab.reference_step(reference, lab.batches())
    for name, p in model.u2.named_parameters():
        if "seq.1" not in name:
            torch.testing.assert_close(p.grad, reference.u2.get_parameter(name).grad, **lab.CLOSE, msg=name)
    assert sum(call.op == "all_reduce" and call.unit != "order of units" for call in seen) == 1
    with lab.full(model):
        names = {name for name, _ in model.named_parameters()}
    assert names == {name for name, _ in reference.named_parameters()}


@pytest.mark.world(2)
@pytest.mark.covers("REP-02")
def test_names_of_what_is_replicated(lab):
    model = lab.make(lab.Deep)
    fully_shard(model.u1)
    replicate(model, ignored_modules=[model.l2])
    replica = replicate.state(model).replica
    model(lab.batch())
    want = [name for name, _ in lab.make(lab.Deep).named_parameters() if name.split(".")[0] not in ("u1", "l2")]
    assert replica.param_names == want


@pytest.mark.world(2)
@pytest.mark.covers("REP-03", "CON-02")
def test_both_on_one_module(lab):
    for first, second in ((replicate, fully_shard), (fully_shard, replicate)):
        module = lab.make(lab.Deep)
        first(module)
        with pytest.raises((AssertionError, RuntimeError), match="Cannot apply .*replicate"):
            second(module)
        lab.loss(module, lab.batch()).backward()
    module = lab.make(lab.Deep)
    replicate(module)
    with pytest.raises(AssertionError, match="replicate has already been applied"):
        replicate(module)


@pytest.mark.world(2)
def test_two_forwards_before_a_backward_that_reads_a_buffer(lab):
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.full((3,), 2.0, dtype=torch.float64))
            self.register_buffer("scale", torch.arange(3, dtype=torch.float64))

        def forward(self, x):
            return (x * self.weight) * self.scale

    plain, model = Scaled(), replicate(Scaled())
    x = torch.ones(3, dtype=torch.float64)
    for module in (plain, model):
        (module(x) + module(2 * x)).sum().backward()
    torch.testing.assert_close(model.weight.grad, plain.weight.grad, rtol=0, atol=0)


@pytest.mark.world(2)
@pytest.mark.covers("REP-02", "B022")
def test_what_comes_after_the_first_forward_is_refused_while_it_is_trained(lab):
    model = replicate(lab.make(lab.Deep))
    lab.loss(model, lab.batch()).backward()
    before, model.u1.seq = model.u1.seq, copy.deepcopy(model.u1.seq)
    late = r"Deep: .* added later: u1\.seq\.1\.weight, u1\.seq\.1\.bias\."
    with pytest.raises(FsdpRuntimeError, match=late):
        model(lab.batch())
    with torch.no_grad():
        model(lab.batch())
    model.u1.seq.requires_grad_(False)
    for _ in range(2):
        lab.loss(model, lab.batch()).backward()
    model.u1.seq.requires_grad_(True)
    with pytest.raises(FsdpRuntimeError, match=late):
        model(lab.batch())
    model.u1.seq = before
    lab.loss(model, lab.batch()).backward()
    model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()}, assign=True)
    with pytest.raises(FsdpRuntimeError, match="into the parameters that are there"):
        model(lab.batch())


@pytest.mark.world(2)
@pytest.mark.covers("REP-05")
def test_devices_and_options_of_replicate(lab):
    module = lab.make(lab.Deep)
    replicate(module, device_id=torch.device("cpu"), find_unused_parameters=True, bucket_cap_mb=1)
    assert replicate.state(module).replica.device_ids is None
    with pytest.raises(RuntimeError, match="Expected device_id to be int or torch.device"):
        replicate(lab.make(lab.Deep), device_id=[torch.device("cpu")])
    with pytest.raises(TypeError, match="no_such_option"):
        replicate(lab.make(lab.Deep), no_such_option=1)
    with pytest.raises(NotImplementedError, match="mixed_precision"):
        replicate(lab.make(lab.Deep), mixed_precision=object())
    empty = replicate(nn.ReLU())
    with pytest.raises(ValueError, match="its own parameters"):
        empty(lab.batch())


@pytest.mark.world([2, 3])
@pytest.mark.covers("REP-04", "B159", "B160", "B161", "B163", "B164", "B167")
@pytest.mark.parametrize("schedule", ["s", "ns", "nns", "ss", "FFbb", "inside-outside", "retain"])
def test_replicate_under_every_schedule(lab, schedule):
    reference = lab.make(lab.Deep)
    model = replicate(copy.deepcopy(reference), static_graph=True, gradient_as_bucket_view=True)
    replica = replicate.state(model).replica
    if schedule == "FFbb":
        losses = [lab.loss(model, lab.batch(step)) for step in range(2)]
        for loss in losses:
            loss.backward()
        steps = [0, 1]
    elif schedule == "inside-outside":
        with replica.no_sync():
            loss = lab.loss(model, lab.batch(0))
        loss.backward()
        steps = [0]
    elif schedule == "retain":
        loss = lab.loss(model, lab.batch(0))
        loss.backward(retain_graph=True)
        loss.backward()
        steps = [0, 0]
    else:
        for step, kind in enumerate(schedule):
            if kind == "n":
                with replica.no_sync(), lab.collectives() as seen:
                    lab.loss(model, lab.batch(step)).backward()
                assert not any(call.op == "all_reduce" for call in seen)
            else:
                lab.loss(model, lab.batch(step)).backward()
        steps = list(range(len(schedule)))
    for step in steps:
        lab.reference_step(reference, lab.batches(step))
    for (name, p), q in zip(model.named_parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, **lab.CLOSE, msg=name)


@pytest.mark.world(2)
@pytest.mark.covers("B162", "B164", "B037", "REP-04")
def test_replicate_with_changing_use_and_thawing(lab):
    class Routed(nn.Module):
        def __init__(self):
            super().__init__()
            self.paths = nn.ModuleList(nn.Linear(3, 3) for _ in range(3))
            self.paths[2].requires_grad_(False)

        def forward(self, x, which):
            return sum(self.paths[i](x) for i in which)

    reference = lab.make(Routed)
    model = replicate(copy.deepcopy(reference))
    uses = {0: [(0,), (1,), (0, 1), (0, 2)], 1: [(1,), (1,), (0,), (2, 1)]}
    for step in range(4):
        if step == 3:
            model.paths[2].requires_grad_(True)
            reference.paths[2].requires_grad_(True)
        model(lab.batch(step), uses[lab.world.rank][step]).square().mean().backward()
        for rank, batch in enumerate(lab.batches(step)):
            (reference(batch, uses[rank][step]).square().mean() / lab.world.size).backward()
        for (name, p), q in zip(model.named_parameters(), reference.parameters(), strict=True):
            assert (p.grad is None) == (q.grad is None), name
            if q.grad is not None:
                torch.testing.assert_close(p.grad, q.grad, **lab.CLOSE, msg=name)


@pytest.mark.world(2)
def test_a_parameter_that_is_frozen_while_its_gradient_awaits_reduction(lab):
    reference = lab.make(lab.Deep)
    model = replicate(copy.deepcopy(reference))
    replica = replicate.state(model).replica
    with replica.no_sync():
        lab.loss(model, lab.batch(0)).backward()
    model.u1.requires_grad_(False)
    lab.loss(model, lab.batch(1)).backward()
    for step in (0, 1):
        for batch in lab.batches(step):
            (lab.loss(reference, batch) / lab.world.size).backward()
        reference.u1.requires_grad_(False)
    for (name, p), q in zip(model.named_parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, **lab.CLOSE, msg=name)


@pytest.mark.world(2)
@pytest.mark.covers("REP-04")
def test_a_thawed_parameter_is_averaged_where_no_output_tells_of_backward(lab):
    """A loss that the module keeps: only the parameters' own hooks see its backward."""

    class Keeps(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)

        def forward(self, x):
            self.loss = self.second(self.first(x)).square().mean()

    reference = lab.make(Keeps)
    model = replicate(copy.deepcopy(reference))
    for step, trained in enumerate(("first", "second")):
        for each in (model, reference):
            each.requires_grad_(False)
            getattr(each, trained).requires_grad_(True)
        model(lab.batch(step))
        model.loss.backward()
        for batch in lab.batches(step):
            reference(batch)
            (reference.loss / lab.world.size).backward()
        for p, q in zip(getattr(model, trained).parameters(), getattr(reference, trained).parameters(), strict=True):
            torch.testing.assert_close(p.grad, q.grad, **lab.CLOSE)


@pytest.mark.world(2)
@pytest.mark.covers("REP-04")
def test_replicas_start_equal_and_buffers_follow_rank_zero(lab):
    model = lab.make(lambda: lab.Block(3), seed=lab.world.rank)
    model.scale.fill_(float(lab.world.rank + 1))
    replicate(model)
    model(lab.batch())
    for p in model.parameters():
        lab.world.assert_equal_across_ranks(p)
    assert float(model.scale) == 1.0
    model.scale.fill_(float(lab.world.rank + 5))
    model(lab.batch())
    assert float(model.scale) == 5.0


@pytest.mark.world(2)
@pytest.mark.covers("REP-04")
@pytest.mark.parametrize("bucket_cap_mb", [1e-5, 25])
def test_buckets_of_any_size_and_mixed_dtypes(lab, bucket_cap_mb):
    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)
            self.none = nn.Parameter(torch.empty(0))

        def forward(self, x):
            return self.b(self.a(x).float()).double() + self.none.sum()

    reference = lab.make(Mixed)
    reference.b.float()
    model = replicate(copy.deepcopy(reference), bucket_cap_mb=bucket_cap_mb)
    lab.loss(model, lab.batch()).backward()
    lab.reference_step(reference, lab.batches())
    # Whatever passes through `b` is rounded to float32: inner products of 3 and a bias, forward and backward, sums over
    # the rows and over 2 ranks, two casts; on both sides, of numbers no larger than the largest gradient.
    roundings = 2 * (2 * (3 + 1) + len(lab.batch()) + 2 + 2)
    largest = max(float(q.grad.abs().max()) for q in reference.parameters() if q.numel())
    bound = roundings * torch.finfo(torch.float32).eps / 2 * largest
    for (name, p), q in zip(model.named_parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=0.0, atol=bound, msg=name)


@pytest.mark.world(2)
@pytest.mark.covers("B165", "REP-04", "B037")
def test_an_output_that_no_loss_uses_under_a_static_graph(lab):
    """The graph is the same in every iteration and has a branch that ends in nothing: the third must still be right."""

    class TwoHeads(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.used, self.idle = nn.Linear(3, 4), nn.Linear(4, 1), nn.Linear(4, 2)

        def forward(self, x):
            y = self.body(x).tanh()
            return self.used(y), self.idle(y)

    reference = lab.make(TwoHeads)
    model = replicate(copy.deepcopy(reference), static_graph=True)
    optim = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    reference_optim = torch.optim.SGD(reference.parameters(), lr=0.1, momentum=0.9)

    def loss(m, x):
        return m(x)[0].square().mean()

    for step in range(5):
        loss(model, lab.batch(step)).backward()
        assert all(p.grad is None for p in model.idle.parameters())
        optim.step()
        optim.zero_grad()
        lab.reference_step(reference, lab.batches(step), loss, reference_optim)
        for (name, p), q in zip(model.named_parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(p.detach(), q.detach(), **lab.CLOSE, msg=name)


@pytest.mark.world([2, 3])
def test_sparse_gradients_of_other_rows_on_each_rank(lab):
    class Rows(nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.head = nn.Embedding(5, 3, sparse=True), nn.Linear(3, 2)

        def forward(self, rows):
            return self.head(self.table(rows))

    reference = lab.make(Rows)
    model = replicate(copy.deepcopy(reference))
    for step in range(2):
        batches = [torch.tensor([rank, step, rank]) for rank in range(lab.world.size)]
        lab.loss(model, batches[lab.world.rank]).backward()
        lab.reference_step(reference, batches)
        for (name, p), q in zip(model.named_parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(p.grad, q.grad.to_dense(), **lab.CLOSE, msg=name)
