"""Which form a state dict has: set, asked for, restored."""

from __future__ import annotations

import pytest
import torch.distributed.fsdp as torch_fsdp
from torch import nn

import fsdp_ref
from fsdp_ref import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    FullyShardedDataParallel,
    LocalOptimStateDictConfig,
    LocalStateDictConfig,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    StateDictSettings,
    StateDictType,
    fully_shard,
)
from fsdp_ref.annotations import units_in
from fsdp_ref.errors import ConfigTypeError
from fsdp_ref.wrap import ModuleWrapPolicy

FULL, LOCAL, SHARDED = StateDictType
DEFAULT = StateDictSettings(FULL, FullStateDictConfig(), FullOptimStateDictConfig())
DEFAULTS = {
    FULL: DEFAULT,
    LOCAL: StateDictSettings(LOCAL, LocalStateDictConfig(), LocalOptimStateDictConfig()),
    SHARDED: StateDictSettings(SHARDED, ShardedStateDictConfig(), ShardedOptimStateDictConfig()),
}


def tree(api):
    """A plain root around a part with two units."""
    part = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2)))
    if api == "composable":
        fully_shard(part, policy=ModuleWrapPolicy({nn.Linear}))
    else:
        part = FullyShardedDataParallel(part, auto_wrap_policy=ModuleWrapPolicy({nn.Linear}))
    return nn.Sequential(part, nn.Linear(2, 2))


@pytest.mark.covers("SD-14", "SD-15", "SD-16")
@pytest.mark.parametrize("api", ["wrapper", "composable"])
@pytest.mark.world(2, backend="fake", rank=0)
def test_set_asked_for_and_restored(world, api):
    model = tree(api)
    calls = FullyShardedDataParallel if api == "wrapper" else fsdp_ref
    assert calls.get_state_dict_type(model) == DEFAULT
    assert calls.set_state_dict_type(model, SHARDED) == DEFAULT
    assert {unit.state_dict_settings for unit in units_in(model)} == {DEFAULTS[SHARDED]}
    mine = FullStateDictConfig(offload_to_cpu=True, rank0_only=True)
    with pytest.raises(ValueError, match="planted"), calls.state_dict_type(model, FULL, mine):
        assert calls.get_state_dict_type(model) == StateDictSettings(FULL, mine, FullOptimStateDictConfig())
        with calls.state_dict_type(model, LOCAL):
            assert calls.get_state_dict_type(model) == DEFAULTS[LOCAL]
        assert calls.get_state_dict_type(model).state_dict_config == mine
        raise ValueError("planted")
    assert calls.get_state_dict_type(model) == DEFAULTS[SHARDED]


@pytest.mark.covers("SD-14")
@pytest.mark.world(2, backend="fake", rank=0)
def test_objects_of_torch(world):
    model = tree("wrapper")
    theirs = torch_fsdp.FullStateDictConfig(offload_to_cpu=True), torch_fsdp.FullOptimStateDictConfig(rank0_only=True)
    fsdp_ref.set_state_dict_type(model, torch_fsdp.StateDictType.FULL_STATE_DICT, *theirs)
    assert fsdp_ref.get_state_dict_type(model) == StateDictSettings(
        FULL, FullStateDictConfig(offload_to_cpu=True), FullOptimStateDictConfig(rank0_only=True)
    )
    assert model[0]._state_dict_type is FULL
    assert model[0]._state_dict_config.offload_to_cpu
    assert model[0]._optim_state_dict_config.rank0_only


@pytest.mark.covers("SD-14", "SD-16")
@pytest.mark.world(2, backend="fake", rank=0)
def test_refusals_change_nothing(world):
    model = tree("composable")
    with pytest.raises(RuntimeError, match="Expected state_dict_config of type FullStateDictConfig"):
        fsdp_ref.set_state_dict_type(model, FULL, ShardedStateDictConfig())
    with pytest.raises(RuntimeError, match="Expected optim_state_dict_config of type LocalOptimStateDictConfig"):
        fsdp_ref.set_state_dict_type(model, LOCAL, None, torch_fsdp.FullOptimStateDictConfig())
    with pytest.raises(ConfigTypeError, match="FULL_STATE_DICT, LOCAL_STATE_DICT"):
        fsdp_ref.set_state_dict_type(model, "full")
    for call in (fsdp_ref.get_state_dict_type, lambda m: fsdp_ref.set_state_dict_type(m, FULL)):
        with pytest.raises(ValueError, match="Linear without any"):
            call(model[1])
    assert fsdp_ref.get_state_dict_type(model) == DEFAULT


@pytest.mark.covers("SD-16")
@pytest.mark.world(2, backend="fake", rank=0)
def test_units_with_settings_of_their_own(world):
    model = tree("wrapper")
    inner = model[0].module[1]
    fsdp_ref.set_state_dict_type(inner, SHARDED)
    with pytest.raises(AssertionError, match=r"All FSDP modules must have the same.*0\._fsdp_wrapped_module\.1"):
        fsdp_ref.get_state_dict_type(model)
    with pytest.raises(AssertionError, match="same state dict settings"):
        fsdp_ref.set_state_dict_type(model, LOCAL)
    with fsdp_ref.state_dict_type(model, LOCAL):
        assert fsdp_ref.get_state_dict_type(model) == DEFAULTS[LOCAL]
    assert fsdp_ref.get_state_dict_type(inner) == DEFAULTS[SHARDED]
    assert model[0]._state_dict_type is FULL
