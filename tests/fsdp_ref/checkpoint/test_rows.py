"""Sharded states go from flat shards to rows and back without a parameter that is whole anywhere."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fsdp_ref
from fsdp_ref import FullyShardedDataParallel, StateDictType, fully_shard

SHARDED = StateDictType.SHARDED_STATE_DICT


class WithNorm(nn.Linear):
    """Its state has a number that is made of all of its weight."""

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "norm"] = self.weight.detach().norm()

    def _load_from_state_dict(self, state_dict, prefix, *args):
        want = state_dict.pop(prefix + "norm")
        super()._load_from_state_dict(state_dict, prefix, *args)
        assert torch.equal(self.weight.detach().norm(), want)


class Plain(nn.Module):
    """Rows of several sizes, of which ranks may have none, a weight in another order of storage, a scalar, and no element."""

    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.linear = nn.Linear(3, 7)
        self.conv = nn.Conv2d(5, 2, 3).to(memory_format=torch.channels_last)
        self.scale = nn.Parameter(torch.randn(()))
        self.nothing = nn.Parameter(torch.empty(0, 3))
        self.columns = nn.Parameter(
            torch.empty(5, 0)
        )  # as tensor parallelism leaves to the last of more ranks than columns
        self.single = nn.Parameter(torch.randn(1, 11))


PATHS = {
    "flat": lambda plain: FullyShardedDataParallel(plain),
    "orig": lambda plain: FullyShardedDataParallel(plain, use_orig_params=True),
    "composable": fully_shard,
}


@pytest.mark.world([2, 3, 4])
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("other", [None, "whole", "dtype"])
def test_rows_are_those_of_the_plain_module_and_load_back(path, other):
    want = Plain(1).state_dict()
    saved, fresh = PATHS[path](Plain(1)), PATHS[path](Plain(2))
    with fsdp_ref.state_dict_type(saved, SHARDED):
        state = saved.state_dict()
    assert list(state) == list(want)
    for name, value in state.items():
        assert torch.equal(value.full_tensor(), want[name]), name
        if value.dim():
            first = dist.get_rank() * -(-len(value) // dist.get_world_size())
            expected = want[name][first : first + -(-len(value) // dist.get_world_size())]
            assert value.to_local().shape == expected.shape, name
    given = dict(state)
    if other == "whole":
        given["linear.weight"] = want["linear.weight"]
    if other == "dtype":  # the model keeps its own
        given["linear.weight"] = state["linear.weight"].double()
    with fsdp_ref.state_dict_type(fresh, SHARDED):
        fresh.load_state_dict(given)
        del given["single"]
        with pytest.raises(RuntimeError, match=r'Missing key\(s\) in state_dict: "single"'):
            fresh.load_state_dict(given)
    loaded = fresh.state_dict()
    for name, value in want.items():
        assert torch.equal(loaded[name], value), name


@pytest.mark.world(2)
@pytest.mark.parametrize("path", PATHS)
def test_code_of_users_sees_whole_parameters(path):
    """Where other code than that of ``nn.Module`` runs while a sharded state is saved or loaded, parameters have their values."""
    torch.manual_seed(0)
    want = WithNorm(3, 5).state_dict()
    torch.manual_seed(0)
    saved, fresh = PATHS[path](WithNorm(3, 5)), PATHS[path](WithNorm(3, 5))
    with fsdp_ref.state_dict_type(saved, SHARDED):
        state = saved.state_dict()
    assert torch.equal(state["norm"], want["norm"])
    with fsdp_ref.state_dict_type(fresh, SHARDED):
        fresh.load_state_dict(state)
    assert torch.equal(fresh.state_dict()["weight"], want["weight"])
