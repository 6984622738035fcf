"""Full parameters in users' hands: edits survive, nothing else is disturbed, exceptions leave no trace."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

from fsdp_ref import FullyShardedDataParallel, MixedPrecision, unshard_params
from fsdp_ref.annotations import units_under
from fsdp_ref.states import TrainingState

summon = FullyShardedDataParallel.summon_full_params


def units(model):
    return [unit for _, _, unit in units_under(model)]


def in_place(param):
    with torch.no_grad():
        param.mul_(2)


def by_data(param):
    param.data = param.data * 2


EDITS = ["in place", "by data", "by attribute"]


def edit(model, how):
    for module in model.modules():
        for name, param in list(module.named_parameters(recurse=False)):
            if how == "in place":
                in_place(param)
            elif how == "by data":
                by_data(param)
            else:
                setattr(module, name, nn.Parameter(param.detach() * 2))


@pytest.mark.covers("SUM-01", "SUM-02", "SUM-03", "B087", "SUM-18")
@pytest.mark.parametrize("how", EDITS)
@pytest.mark.world([2, 3])
def test_edits_survive(trial, api, strategy, how):
    case = trial(api, strategy)
    with unshard_params(case.model):
        edit(case.model, how)
    with torch.no_grad():
        for param in case.plain.parameters():
            param.mul_(2)
    case.compare()
    case.train(2)
    assert not any(buffer.allocated for unit in units(case.model) for buffer in unit.handle._buffers.values())


@pytest.mark.covers("SUM-03", "SUM-04", "B088")
@pytest.mark.world(2)
def test_without_writeback_edits_are_dropped_where_sharded(trial, api, strategy):
    case = trial(api, strategy)
    with summon(case.model, writeback=False):
        edit(case.model, "in place")
    if strategy == "NO_SHARD":
        with torch.no_grad():
            for param in case.plain.parameters():
                param.mul_(2)
    case.compare()


@pytest.mark.covers("SUM-05", "B021", "SUM-21")
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP"])
@pytest.mark.world([2, 3])
def test_rank_0_edits_for_everybody(trial, world, api, strategy):
    case = trial(api, strategy)
    with summon(case.model, writeback=True, rank0_only=True):
        if world.rank == 0:
            edit(case.model, "by data")
        else:
            assert all(param.dim() == 1 for param in case.model.parameters())
    with torch.no_grad():
        for param in case.plain.parameters():
            param.mul_(2)
    case.compare()


@pytest.mark.covers("SUM-06", "SUM-07", "B084")
@pytest.mark.world(2)
def test_offload_to_cpu(trial, api, strategy):
    case = trial(api, strategy)
    if strategy == "NO_SHARD":
        with pytest.raises(NotImplementedError, match="offload_to_cpu=True and NO_SHARD"):
            summon(case.model, offload_to_cpu=True, rank0_only=True).__enter__()
        return
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with summon(case.model, offload_to_cpu=True):
            edit(case.model, "in place")
    assert any("redundantly copied to CPU" in str(each.message) for each in caught)
    with torch.no_grad():
        for param in case.plain.parameters():
            param.mul_(2)
    case.compare()


@pytest.mark.covers("SUM-08", "SUM-09")
@pytest.mark.parametrize("api", ["orig", "composable"])
@pytest.mark.world(2)
def test_gradients_are_shown_and_written_back(trial, api, strategy):
    case = trial(api, strategy)
    with summon(case.model, with_grads=True):
        assert all(param.grad is None for param in case.model.parameters())
    case.both_backward(0)
    want = {name: param.grad for name, param in case.plain.named_parameters()}
    with summon(case.model, with_grads=True):
        for name, param in case.model.named_parameters():
            torch.testing.assert_close(param.grad, want[name], rtol=1e-12, atol=1e-12, msg=name)
            param.grad.mul_(3)
    for param in case.plain.parameters():
        param.grad.mul_(3)
    case.step()
    case.compare()
    case.train(1)


@pytest.mark.covers("SUM-08")
@pytest.mark.world(2)
def test_gradients_need_original_parameters(trial):
    case = trial("flat", "FULL_SHARD")
    with pytest.raises(NotImplementedError, match="with_grads=True"):
        summon(case.model, with_grads=True).__enter__()


@pytest.mark.covers("SUM-10", "SUM-19", "ORIG-19", "SUM-11", "SUM-13", "SUM-14", "SUM-12")
@pytest.mark.world(2)
def test_between_and_inside_passes(trial, api, strategy):
    case = trial(api, strategy)
    xs = case.inputs(0)
    case.plain_loss(xs).backward()
    loss = case.loss(xs)
    states = [unit.handle.state for unit in units(case.model)]
    with summon(case.model, writeback=True):
        names = {name for name, _ in case.model.named_parameters()}
        assert names == {name for name, _ in case.plain.named_parameters()}
        with pytest.raises(AssertionError, match="already unsharding parameters"):
            summon(case.model).__enter__()
        with pytest.raises(AssertionError, match="Expects tensor to be unsharded"):
            case.model(xs[case.world.rank])
    assert [unit.handle.state for unit in units(case.model)] == states
    loss.backward()
    case.step()
    case.compare()

    def inside(*_):
        with pytest.raises(AssertionError, match="Cannot manually unshard parameters during forward/backward"):
            summon(case.model).__enter__()

    block = case.blocks()[0]
    hook = block.up.register_forward_hook(lambda m, a, out: (inside(), out.register_hook(inside))[0])
    case.zero_grad()
    case.both_backward(1)
    hook.remove()
    case.step()
    with pytest.raises(ZeroDivisionError), summon(case.model):
        raise ZeroDivisionError
    assert all(unit.training_state is TrainingState.IDLE for unit in units(case.model))
    case.compare()
    case.train(1)


@pytest.mark.covers("SUM-01", "SUM-15", "STRAT-05")
@pytest.mark.world(2)
def test_recurse_false_and_roots(trial):
    case = trial("orig", "FULL_SHARD")
    with summon(case.model, recurse=False):
        shapes = {name: param.dim() for name, param in case.model.named_parameters()}
    assert shapes["inp.weight"] == 2
    assert shapes["blocks.0.up.weight"] == 1
    other = trial("orig", "FULL_SHARD")
    with summon(other.inner().blocks[0]):
        pass
    with pytest.raises(AssertionError, match="Non-root FSDP instance's `_is_root` should not have been set yet"):
        other.model(other.inputs(0)[0])


@pytest.mark.covers("MP-14", "MP-21", "MP-23")
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP"])
@pytest.mark.world(2)
def test_low_precision_copies_are_dropped(trial, strategy):
    case = trial("orig", strategy, mixed_precision=MixedPrecision(torch.float32))
    x = case.inputs(0)[case.world.rank]
    before = case.model(x)
    with summon(case.model):
        assert all(param.dtype == torch.float64 for param in case.model.parameters())
        edit(case.model, "in place")
    with torch.no_grad():
        for param in case.plain.parameters():
            param.mul_(2)
    after = case.model(x)
    assert not torch.equal(before, after)
    torch.testing.assert_close(after.double(), case.plain(x), rtol=1e-5, atol=1e-5)


@pytest.mark.covers("APP-01", "APP-02", "APP-03", "META-06")
@pytest.mark.world(2)
def test_apply(trial, strategy):
    case = trial("orig", strategy)

    def init(module):
        for param in module.parameters(recurse=False):
            with torch.no_grad():
                param.fill_(param.dim())

    case.plain.apply(init)
    assert case.model.apply(init) is case.model
    assert case.inner().blocks[0].apply(init)._is_root is None
    case.compare()
    case.train(1)
    with pytest.raises(ValueError, match="expected to be in states"), summon(case.model):
        case.model.apply(init)
