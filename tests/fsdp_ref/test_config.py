"""Settings: torch's names, order and defaults, and torch's own objects taken for ours."""

from __future__ import annotations

import dataclasses
from enum import Enum

import pytest
import torch
import torch.distributed.fsdp as torch_fsdp
from torch.distributed.fsdp import api as torch_api

from fsdp_ref import config
from fsdp_ref.errors import ConfigError, ConfigTypeError, FsdpError

CONFIGS = [
    "MixedPrecision",
    "CPUOffload",
    "StateDictConfig",
    "FullStateDictConfig",
    "LocalStateDictConfig",
    "ShardedStateDictConfig",
    "OptimStateDictConfig",
    "FullOptimStateDictConfig",
    "LocalOptimStateDictConfig",
    "ShardedOptimStateDictConfig",
]


@pytest.mark.parametrize("name", ["ShardingStrategy", "BackwardPrefetch", "StateDictType", "OptimStateKeyType"])
def test_enums_have_torchs_members_in_torchs_order(name):
    ours, theirs = getattr(config, name), getattr(torch_fsdp, name)
    assert [(m.name, m.value) for m in ours] == [(m.name, m.value) for m in theirs]
    for member in theirs:
        assert config.coerce_enum(ours, member, where="x") is ours[member.name]


@pytest.mark.parametrize("name", CONFIGS)
def test_configs_have_torchs_fields_and_defaults(name):
    ours, theirs = getattr(config, name)(), getattr(torch_api, name)()
    fields = [(f.name, getattr(theirs, f.name)) for f in dataclasses.fields(theirs)]
    assert [(f.name, getattr(ours, f.name)) for f in dataclasses.fields(ours)] == fields
    assert config.coerce_config(type(ours), theirs, where="x") == ours


@pytest.mark.covers("MP-01")
def test_torchs_objects_keep_their_values():
    theirs = torch_fsdp.MixedPrecision(param_dtype=torch.bfloat16, buffer_dtype=torch.float16, cast_forward_inputs=True)
    ours = config.coerce_mixed_precision(theirs)
    assert (ours.param_dtype, ours.reduce_dtype, ours.buffer_dtype) == (torch.bfloat16, None, torch.float16)
    assert ours.cast_forward_inputs
    assert config.coerce_cpu_offload(torch_fsdp.CPUOffload(offload_params=True)).offload_params


def test_none_means_the_default():
    assert config.coerce_sharding_strategy(None) is None
    assert config.coerce_backward_prefetch(None) is None
    assert config.coerce_mixed_precision(None) == config.MixedPrecision()
    assert config.coerce_cpu_offload(None) == config.CPUOffload()


class ShardingStrategy(Enum):
    """A namesake whose members we do not know."""

    SOMETHING_NEW = 1


@pytest.mark.parametrize("value", ["FULL_SHARD", 1, torch_fsdp.BackwardPrefetch.BACKWARD_PRE, ShardingStrategy(1)])
def test_anything_else_is_refused_with_the_choices(value):
    with pytest.raises(ConfigTypeError, match="FULL_SHARD, SHARD_GRAD_OP, NO_SHARD") as info:
        config.coerce_sharding_strategy(value)
    assert isinstance(info.value, TypeError)
    assert isinstance(info.value, FsdpError)


@pytest.mark.parametrize("value", [{"param_dtype": torch.float16}, torch.float16, torch_fsdp.MixedPrecision, object()])
def test_something_that_is_no_policy_is_refused(value):
    with pytest.raises(ConfigTypeError, match="mixed_precision: expected a MixedPrecision"):
        config.coerce_mixed_precision(value)


def newer(default):
    return dataclasses.make_dataclass(
        "CPUOffload", [("offload_params", bool, False), ("pin", bool, dataclasses.field(default=default))]
    )


def test_an_unknown_option_counts_only_when_it_is_used():
    cls = newer(False)
    assert config.coerce_cpu_offload(cls(offload_params=True)) == config.CPUOffload(True)
    with pytest.raises(ConfigTypeError, match="also pin"):
        config.coerce_cpu_offload(cls(pin=True))


@pytest.mark.covers("MP-16")
def test_the_second_spelling_of_low_precision_gradients():
    policy = config.MixedPrecision(keep_grads_in_reduce_dtype=True)
    assert policy.keep_low_precision_grads
    assert policy.keep_grads_in_reduce_dtype
    assert policy == config.MixedPrecision(keep_low_precision_grads=True)
    assert not dataclasses.replace(policy, keep_low_precision_grads=False).keep_grads_in_reduce_dtype
    with pytest.raises(ConfigError, match="True and False"):
        config.MixedPrecision(keep_low_precision_grads=True, keep_grads_in_reduce_dtype=False)


def test_policies_are_values():
    assert hash(config.MixedPrecision()) == hash(config.MixedPrecision())
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.MixedPrecision().param_dtype = torch.float16


def test_strategy_groups_name_the_strategies_of_torch():
    hybrid = {s.name for s in config.HYBRID_SHARDING_STRATEGIES}
    assert hybrid == {"HYBRID_SHARD", "_HYBRID_SHARD_ZERO2"}
    assert {s.name for s in config.NO_RESHARD_AFTER_FORWARD_STRATEGIES} == {"SHARD_GRAD_OP", "_HYBRID_SHARD_ZERO2"}
