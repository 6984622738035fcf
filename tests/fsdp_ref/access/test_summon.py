"""A summon decides which unit is the root, and drops copies that an edit makes old; behaviours have the rest."""

from __future__ import annotations

import pytest
import torch

from fsdp_ref import FullyShardedDataParallel, MixedPrecision


@pytest.mark.covers("SUM-01", "SUM-15", "STRAT-05")
@pytest.mark.world(2)
def test_recurse_false_and_roots(trial):
    case = trial("orig", "FULL_SHARD")
    with FullyShardedDataParallel.summon_full_params(case.model, recurse=False):
        shapes = {name: param.dim() for name, param in case.model.named_parameters()}
    assert shapes["inp.weight"] == 2
    assert shapes["blocks.0.up.weight"] == 1
    other = trial("orig", "FULL_SHARD")
    with FullyShardedDataParallel.summon_full_params(other.inner().blocks[0]):
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
    with FullyShardedDataParallel.summon_full_params(case.model):
        assert all(param.dtype == torch.float64 for param in case.model.parameters())
        with torch.no_grad():
            for param in case.model.parameters():
                param.mul_(2)
    with torch.no_grad():
        for param in case.plain.parameters():
            param.mul_(2)
    after = case.model(x)
    assert not torch.equal(before, after)
    torch.testing.assert_close(after.double(), case.plain(x), rtol=1e-5, atol=1e-5)
