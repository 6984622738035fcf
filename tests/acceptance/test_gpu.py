"""Ranks on devices: run by `tox -e gpu` on CUDA devices, which fails on a machine that has none, and by `tox -e sim`.

Over nccl each rank has a device of its own; over gloo-cuda and nccl-shared the ranks share what there is, so that one device
suffices for several ranks. `--device NAME` puts the backend NAME, and its devices, in the place of both.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

pytestmark = pytest.mark.gpu


def _sum_over_devices(world) -> None:
    assert world.device.type != "cpu"
    value = torch.full((4,), float(world.rank + 1), device=world.device)
    dist.all_reduce(value, group=world.group)
    assert value.tolist() == [world.size * (world.size + 1) / 2] * 4


@pytest.mark.world([1, 2], backend="nccl")
def test_a_sum_over_devices(world) -> None:
    _sum_over_devices(world)


@pytest.mark.world([1, 2, 3], backend="gloo-cuda")
def test_a_sum_over_shared_devices(world) -> None:
    _sum_over_devices(world)
    assert world.device.index < torch.get_device_module(world.device).device_count()


@pytest.mark.world(2, backend="nccl-shared")
def test_a_sum_over_one_device_that_ranks_share(world) -> None:
    _sum_over_devices(world)


@pytest.mark.world(2, backend="nccl")
def test_ranks_have_devices_of_their_own(world) -> None:
    devices = world.all_gather_object(torch.get_device_module(world.device).current_device())
    assert len(set(devices)) == world.size


@pytest.mark.world([1, 2], backend="nccl")
def test_a_sharded_step_is_the_step_of_one_process(world) -> None:
    torch.manual_seed(3)
    plain = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)).to(world.device, torch.float64)
    sharded = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)).to(world.device, torch.float64)
    sharded.load_state_dict(plain.state_dict())
    inputs = torch.randn(world.size, 4, 6, dtype=torch.float64).to(world.device)
    fully_shard(sharded, mesh=world.mesh)
    sharded(inputs[world.rank]).square().mean().backward()
    torch.stack([plain(part).square().mean() for part in inputs]).mean().backward()
    for mine, theirs in zip(sharded.parameters(), plain.parameters(), strict=True):
        # A mean over at most two ranks commutes; the two matrix products may round differently: 32 terms, u = 2**-53.
        torch.testing.assert_close(mine.grad.full_tensor(), theirs.grad, rtol=0.0, atol=32 * 2.0**-53)
