"""Every way to communicate gives the same results: by exchange between hosts, and for devices by way of the host."""

from __future__ import annotations

import pytest
import torch

from fsdp_ref.comm.collectives import GlooCollectives, HostCollectives, collectives_for

WAYS = {"exchange": GlooCollectives(), "by the host": HostCollectives(GlooCollectives())}
LARGE = GlooCollectives.EXCHANGE_BYTES // 8  # elements of float64 from which an all-gather is an exchange too


@pytest.fixture(params=list(WAYS))
def way(request):
    return WAYS[request.param]


@pytest.mark.world([2, 3, 4])
@pytest.mark.parametrize("numel", [3, LARGE])
def test_all_gather(world, way, numel):
    out = torch.full((world.size * numel,), -1.0, dtype=torch.float64)
    pending = way.all_gather(out, torch.full((numel,), float(world.rank), dtype=torch.float64), world.group, "")
    pending.wait()
    assert out.view(world.size, numel).unique(dim=1).flatten().tolist() == list(range(world.size))
    out.zero_()
    pending.wait()  # waiting twice is legal and changes nothing
    assert not out.any()


@pytest.mark.world([2, 3, 4])
def test_reduce_scatter_sums_in_the_order_of_ranks(world, way):
    full = torch.tensor([1e16, 1.0, 1.0, -1e16], dtype=torch.float64)[: world.size][world.rank].repeat(2 * world.size)
    out = torch.full((2,), -1.0, dtype=torch.float64)
    way.reduce_scatter(out, full.clone(), world.group, "").wait()
    want = 0.0
    for value in [1e16, 1.0, 1.0, -1e16][: world.size]:
        want += value
    assert out.tolist() == [want, want]


@pytest.mark.world(2)
def test_of_nothing(world, way):
    out = torch.empty(0)
    way.reduce_scatter(out, torch.empty(0), world.group, "").wait()
    assert out.numel() == 0


@pytest.mark.world([2, 3])
@pytest.mark.parametrize("op", ["sum", "max"])
def test_all_reduce(world, way, op):
    value = torch.tensor([float(world.rank + 1)])
    way.all_reduce(value, world.group, "", op=op).wait()
    assert value.item() == (sum(range(world.size + 1)) if op == "sum" else world.size)


@pytest.mark.world([2, 3])
def test_broadcast(world, way):
    value = torch.tensor([float(world.rank)])
    way.broadcast(value, 1, world.group, "").wait()
    assert value.item() == 1.0


@pytest.mark.world(2)
def test_the_way_follows_the_device(world):
    assert type(collectives_for(world.group, torch.device("cpu"))) is GlooCollectives
    assert type(collectives_for(world.group, torch.device("cuda", 0))) is HostCollectives
