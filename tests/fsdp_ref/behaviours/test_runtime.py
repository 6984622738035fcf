"""Forward and backward in every order a program may run them."""

from __future__ import annotations

import copy
from collections import Counter

import pytest
import torch
from torch import nn

from fsdp_ref import ShardingStrategy
from fsdp_ref.errors import FsdpRuntimeError
from fsdp_ref.states import TrainingState, UnitState

S = ShardingStrategy
strategies = pytest.mark.parametrize("strategy", [S.FULL_SHARD, S.SHARD_GRAD_OP], ids=lambda s: s.name)


def step_both(model, reference):
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    torch.optim.SGD(reference.parameters(), lr=0.1).step()


def idle(lab, model):
    units = lab.units(model)
    assert {unit.training_state for unit in units} == {TrainingState.IDLE}
    assert {unit.state for unit in units} <= {UnitState.SHARDED, UnitState.UNSHARDED}
    assert not any(unit.handle.unsharded for unit in units if unit.handle)


@pytest.mark.world(2)
@pytest.mark.covers("RUN-01", "B026", "B135", "B159")
@pytest.mark.parametrize("schedule", ["FFbb", "FFbB", "FFFbbb", "FbFb", "FFb"])
@strategies
def test_forwards_and_backwards_interleaved(lab, path, strategy, schedule):
    """F: forward; b: backward of the oldest; B: backward of the newest."""
    reference = lab.make()
    model = lab.shard(copy.deepcopy(reference), path, policy={lab.Block}, sharding_strategy=strategy)
    waiting, done, step = [], [], 0
    for kind in schedule:
        if kind == "F":
            waiting.append((step, lab.loss(model, lab.batch(step))))
            step += 1
        else:
            which, loss = waiting.pop(0 if kind == "b" else -1)
            loss.backward()
            done.append(which)
    for which in done:
        lab.reference_step(reference, lab.batches(which))
    step_both(model, reference)
    lab.assert_params(model, reference)


@pytest.mark.world(2)
@pytest.mark.covers("RUN-02", "B026", "B159")
@strategies
def test_a_second_backward_through_one_graph(lab, path, strategy):
    reference = lab.make()
    model = lab.shard(copy.deepcopy(reference), path, policy={lab.Block}, sharding_strategy=strategy)
    loss = lab.loss(model, lab.batch())
    loss.backward(retain_graph=True)
    loss.backward()
    for _ in range(2):
        lab.reference_step(reference, lab.batches())
    step_both(model, reference)
    lab.assert_params(model, reference)


@pytest.mark.world(2)
@pytest.mark.covers("RUN-03", "B042", "RUN-09")
@pytest.mark.parametrize("between", ["forward", "eval", "no_grad", "inference_mode", "nothing"])
@pytest.mark.parametrize("forward_prefetch", [False, True])
@strategies
def test_a_forward_without_backward_does_no_harm(lab, path, strategy, between, forward_prefetch):
    reference = lab.make()
    model = lab.shard(
        copy.deepcopy(reference),
        path,
        policy={lab.Block},
        sharding_strategy=strategy,
        forward_prefetch=forward_prefetch,
    )
    optim = torch.optim.SGD(model.parameters(), lr=0.1)
    reference_optim = torch.optim.SGD(reference.parameters(), lr=0.1)
    for step in range(3):
        if between == "forward":
            model(lab.batch(step + 10))
        elif between == "eval":
            model.eval()
            got = model(lab.batch(step))
            torch.testing.assert_close(got, reference(lab.batch(step)), **lab.CLOSE)
            model.train()
        elif between in ("no_grad", "inference_mode"):
            with getattr(torch, between)():
                for _ in range(2):
                    got = model(lab.batch(step))
                torch.testing.assert_close(got.clone(), reference(lab.batch(step)).clone(), **lab.CLOSE)
        lab.loss(model, lab.batch(step)).backward()
        optim.step()
        optim.zero_grad()
        lab.reference_step(reference, lab.batches(step), optim=reference_optim)
        lab.assert_params(model, reference)


@pytest.mark.world(2)
@pytest.mark.covers("RUN-04", "RUN-05", "RUN-06")
def test_hooks_per_output_and_entries_per_backward(lab, path):
    class Many(nn.Module):
        def __init__(self):
            super().__init__()
            self.block = lab.Block(3)

        def forward(self, x):
            y = self.block(x)
            return y, y * 2, [y * 3, "text"]

    model = lab.shard(lab.make(Many), path, policy={lab.Block})
    a, b, (c, _) = model(lab.batch())
    assert all(len(t._backward_hooks) == 1 for t in (b, c))
    assert len(a._backward_hooks) == 2, "the block's output is also the root's"
    with lab.events() as seen:
        (a.sum() + b.sum() + c.sum()).backward()
    counts = Counter((event.unit, event.kind.name) for event in seen)
    assert counts["", "PRE_BACKWARD"] == 1
    assert counts["block", "PRE_BACKWARD"] == 1
    assert counts["block", "POST_BACKWARD"] == counts["block", "REDUCE"] == 1
    idle(lab, model)


@pytest.mark.world(2)
@pytest.mark.covers("RUN-08", "B161")
def test_a_part_of_a_unit_run_by_itself_fails_or_is_right(lab, path):
    model = lab.shard(lab.make(), path)
    inner = model if path == "composable" else model.module
    with pytest.raises(RuntimeError):
        inner.blocks[0](lab.batch(shape=(2, 4)))
    lab.loss(model, lab.batch()).backward()
    if path != "composable":
        with pytest.raises(RuntimeError):
            inner(lab.batch())


@pytest.mark.world(2)
@pytest.mark.covers("RUN-10", "ACC-01")
def test_operations_in_a_wrong_state_name_the_right_ones(lab):
    model = lab.shard(lab.make())
    model._assert_state(TrainingState.IDLE)
    with pytest.raises(ValueError, match="expected to be in states"):
        model._assert_state([TrainingState.FORWARD_BACKWARD])


@pytest.mark.world(2)
@pytest.mark.covers("B022", "B076")
@pytest.mark.parametrize("path", ["wrapper", "flat"])
def test_a_module_swapped_between_construction_and_use(lab, path):
    model = lab.shard(lab.make(), path, policy={lab.Block})
    replacement = lab.make(lambda: lab.Block(4), seed=5)
    model.module.blocks[1] = replacement
    # It would train on each rank alone; without gradients it is what was asked for.
    with pytest.raises(FsdpRuntimeError, match=r"no unit manages: blocks\.1\.lin1\.weight, "):
        model(lab.batch())
    reference = lab.make()
    reference.blocks[1] = copy.deepcopy(replacement)
    with torch.no_grad():
        torch.testing.assert_close(model(lab.batch()), reference(lab.batch()), **lab.CLOSE)


@pytest.mark.world(2)
@pytest.mark.covers("B022")
def test_a_unit_added_after_the_first_forward_is_not_silently_unmanaged(lab):
    model = lab.shard(lab.make(), policy={lab.Block})
    lab.loss(model, lab.batch()).backward()
    model.zero_grad()
    model.module.blocks.append(lab.shard(lab.make(lambda: lab.Block(4), seed=3)))
    # It would be a root of its own inside another one, and missing from the clipped norm.
    with pytest.raises(FsdpRuntimeError, match=r"units made after the first forward: blocks\.3"):
        model(lab.batch())


@pytest.mark.world(2)
@pytest.mark.covers("B016")
def test_a_childs_parameter_used_by_its_parent_after_the_child_returned(lab, path):
    class Parent(nn.Module):
        def __init__(self):
            super().__init__()
            self.block = lab.Block(3)

        def forward(self, x):
            y = self.block(x)
            return y @ self.block.lin1.weight.t()

    model = lab.parity(Parent, path, policy={Parent})
    assert [len(unit.handle.fqns) for unit in lab.units(model)] == [4]


@pytest.mark.world(2)
@pytest.mark.covers("RUN-13")
def test_an_optimizer_that_steps_in_backward(lab, orig_path):
    reference = lab.make()
    model = copy.deepcopy(reference)
    optims = {}

    def attach(m):
        for p in m.parameters():
            optims[p] = torch.optim.SGD([p], lr=0.1)

            def step(q):
                optims[q].step()
                q.grad = None

            p.register_post_accumulate_grad_hook(step)

    attach(model)
    attach(reference)
    model = lab.shard(model, orig_path, policy={lab.Block})
    for step in range(2):
        lab.loss(model, lab.batch(step)).backward()
        assert all(p.grad is None for p in model.parameters())
        (sum(lab.loss(reference, batch) for batch in lab.batches(step)) / lab.world.size).backward()
        lab.assert_params(model, reference)
