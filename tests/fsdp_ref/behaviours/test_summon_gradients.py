"""Full gradients in a user's hands."""

from __future__ import annotations

import copy

import pytest
import torch


@pytest.mark.world(2)
@pytest.mark.covers("SUM-08")
@pytest.mark.parametrize("writeback", [True, False])
def test_full_gradients(lab, orig_path, writeback):
    reference = lab.make()
    model = lab.shard(copy.deepcopy(reference), orig_path, policy={lab.Block})
    lab.loss(model, lab.batch()).backward()
    lab.reference_step(reference, lab.batches())
    with lab.full(model, with_grads=True, writeback=writeback):
        for p, q in zip(model.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(p.grad, q.grad, **lab.CLOSE)
            p.grad.mul_(3)
    if writeback:
        for q in reference.parameters():
            q.grad.mul_(3)
    lab.assert_grads(model, reference)
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    torch.optim.SGD(reference.parameters(), lr=0.1).step()
    lab.assert_params(model, reference)


@pytest.mark.world(2)
@pytest.mark.covers("SUM-08")
@pytest.mark.parametrize("trained", [True, False])
def test_full_gradients_that_are_replaced_dropped_and_made(lab, orig_path, trained):
    model = lab.shard(lab.make(), orig_path, policy={lab.Block})
    if trained:
        lab.loss(model, lab.batch()).backward()
    before = lab.grads(model)
    with lab.full(model, with_grads=True):
        named = {name.replace("_fsdp_wrapped_module.", ""): param for name, param in model.named_parameters()}
        replaced, dropped = named["blocks.0.lin1.weight"], named["blocks.0.lin2.weight"]
        replaced.grad = torch.full_like(replaced, 7.0)
        dropped.grad = None
    after = lab.grads(model)
    assert after["blocks.0.lin1.weight"].unique().tolist() == [7.0]
    assert after["blocks.0.lin2.weight"] is None or not after["blocks.0.lin2.weight"].any()
    untouched = [name for name in before if not name.startswith("blocks.0.lin1.w") and name != "blocks.0.lin2.weight"]
    for name in untouched:
        if before[name] is None:
            assert after[name] is None or not after[name].any()
        else:
            torch.testing.assert_close(after[name], before[name], **lab.CLOSE)


@pytest.mark.world(2)
@pytest.mark.covers("SUM-09")
def test_missing_gradients(lab, orig_path):
    model = lab.shard(lab.make(), orig_path, policy={lab.Block})
    assert all(grad is None for grad in lab.grads(model).values())
    lab.loss(model, lab.batch()).backward()
    block = lab.units(model)[1].module
    block.lin1.weight.grad = None
    grads = lab.grads(model)
    assert not grads["blocks.0.lin1.weight"].any() if grads["blocks.0.lin1.weight"] is not None else True
    assert grads["blocks.0.lin2.weight"].any()
