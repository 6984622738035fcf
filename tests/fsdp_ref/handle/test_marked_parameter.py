"""What tools read from a flat parameter: the constants that torch's own flat parameters carry, under the same names."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as TorchFSDP

import fsdp_ref
from fsdp_ref.annotations import unit_of

CONSTANTS = (
    "_fqns",
    "_shapes",
    "_strides",
    "_contiguities",
    "_numels",
    "_numels_with_padding",
    "_is_padding_mask",
    "_num_params",
    "_unpadded_unsharded_size",
    "_sharded_size",
    "_shard_numel_padded",
)


def plain(value):
    """Tuples of named tuples and sizes, as tuples of plain values."""
    return tuple(plain(each) for each in value) if isinstance(value, (tuple, list)) else value


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 7), nn.Linear(7, 5, bias=False), nn.LayerNorm(5))


@pytest.mark.world([2, 3])
@pytest.mark.covers("FLAT-05", "FLAT-06")
@pytest.mark.parametrize("uo", [False, True])
@pytest.mark.parametrize("copied", [False, True])
def test_constants_are_those_of_torchs_flat_parameter(world, uo, copied):
    ours = fsdp_ref.FullyShardedDataParallel(model(), use_orig_params=uo)
    theirs = TorchFSDP(model(), use_orig_params=uo, device_id=torch.device("cpu"))
    handle = unit_of(copy.deepcopy(ours) if copied else ours).handle
    flat, wanted = handle.flat_param, theirs._handle.flat_param
    for name in CONSTANTS:
        assert plain(getattr(flat, name)) == plain(getattr(wanted, name)), name
    assert [tuple(info) for info in flat._shard_param_infos] == [tuple(info) for info in wanted._shard_param_infos]
    assert flat._padded_unsharded_size == torch.Size([world.size * flat.numel()])
    assert flat._full_param_padded.shape == flat._padded_unsharded_size
    assert flat._full_param_padded is handle.full_F()
