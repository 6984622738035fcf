"""Tests of a vendor run on the vendor's backend, by name: `pytest test_on_toyccl.py`."""

import pytest
import torch
import torch.distributed as dist
import toyccl
from torch.distributed.fsdp import fully_shard


@pytest.mark.world(2, backend="toyccl")
def test_ranks_have_devices_of_their_own_and_reduce(world):
    assert dist.get_backend() == "toyccl"
    assert world.all_gather_object(toyccl.selected_device()) == [0, 1]
    value = torch.full((3,), float(world.rank + 1))
    dist.all_reduce(value)
    assert value.tolist() == [3.0, 3.0, 3.0]


@pytest.mark.world(2, backend="toyccl")
def test_a_sharded_layer_trains(world):
    layer = fully_shard(torch.nn.Linear(4, 4, bias=False), mesh=world.mesh)
    layer(torch.ones(1, 4)).sum().backward()
    gradient = layer.weight.grad.full_tensor()
    world.assert_equal_across_ranks(gradient)
    assert gradient.eq(1.0).all()
