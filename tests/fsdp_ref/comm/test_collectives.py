"""Every way to communicate gives the same results: the backend's own, by exchange between hosts, by way of the host."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import fsdp_ref
from fsdp_ref.comm.collectives import (
    Collectives,
    GlooCollectives,
    HostCollectives,
    as_bytes,
    collectives_for,
)

WAYS = {
    "the backend's": Collectives(),
    "exchange": GlooCollectives(),
    "by the host": HostCollectives(GlooCollectives()),
}
IN_ORDER = ["exchange", "by the host"]  # of ranks; the backend chooses its own order
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
def test_reduce_scatter(world, way):
    full = torch.arange(2.0 * world.size) + 100 * world.rank
    out = torch.full((2,), -1.0)
    pending = way.reduce_scatter(out, full, world.group, "")
    pending.wait()
    first = 2 * world.rank * world.size + sum(100 * rank for rank in range(world.size))
    assert out.tolist() == [first, first + world.size]
    out.zero_()
    pending.wait()
    assert not out.any()


@pytest.mark.world([2, 3, 4])
@pytest.mark.parametrize("way", IN_ORDER, indirect=True)
def test_reduce_scatter_sums_in_the_order_of_ranks(world, way):
    full = torch.tensor([1e16, 1.0, 1.0, -1e16], dtype=torch.float64)[: world.size][world.rank].repeat(2 * world.size)
    out = torch.full((2,), -1.0, dtype=torch.float64)
    way.reduce_scatter(out, full.clone(), world.group, "").wait()
    want = 0.0
    for value in [1e16, 1.0, 1.0, -1e16][: world.size]:
        want += value
    assert out.tolist() == [want, want]


@pytest.mark.world(2)
@pytest.mark.parametrize("way", IN_ORDER, indirect=True)
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


@pytest.mark.world(4)
@pytest.mark.parametrize("numel", [3, LARGE])
def test_among_some_of_the_ranks(world, way, numel):
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    group, members = groups[world.rank % 2], [world.rank % 2, world.rank % 2 + 2]
    out = torch.empty(2 * numel, dtype=torch.float64)
    way.all_gather(out, torch.full((numel,), float(world.rank), dtype=torch.float64), group, "").wait()
    assert out.view(2, numel).unique(dim=1).flatten().tolist() == members
    way.reduce_scatter(out[:numel], torch.full((2 * numel,), float(world.rank), dtype=torch.float64), group, "").wait()
    assert out[:numel].unique().tolist() == [sum(members)]
    value = torch.tensor([float(world.rank)])
    way.broadcast(value, 1, group, "").wait()
    assert value.item() == members[1]
    value.fill_(world.rank)
    way.all_reduce(value, group, "").wait()
    assert value.item() == sum(members)
    for each in groups:
        dist.destroy_process_group(each)


@pytest.mark.world(2)
def test_the_way_follows_the_device(world):
    assert type(collectives_for(world.group, torch.device("cpu"))) is GlooCollectives
    assert type(collectives_for(world.group, torch.device("cuda", 0))) is HostCollectives


def calls_of(way, group):
    """One collective of each kind."""
    return [
        way.all_gather(torch.empty(2 * group.size()), torch.ones(2), group, "a"),
        way.reduce_scatter(torch.empty(2), torch.ones(2 * group.size()), group, "b"),
        way.all_reduce(torch.ones(3), group, "c", op="max"),
        way.broadcast(torch.ones(4), 0, group, "d"),
    ]


def test_nobody_else_communicates():
    root = Path(fsdp_ref.__file__).parent
    calls = re.compile(r"\bdist\.(all_|reduce|broadcast|scatter|gather|send|recv|isend|irecv|barrier)")
    found = {str(path.relative_to(root)) for path in root.rglob("*.py") if calls.search(path.read_text("utf-8"))}
    assert found == {"comm/collectives.py", "compat.py"}  # the latter chooses between a new name and an old one


def test_one_element_of_a_transposed_column_has_its_bytes():
    column = torch.zeros(1, 3, dtype=torch.float64).t()
    piece = column[1:2].view(-1)
    assert piece.stride() == (3,)
    as_bytes(piece).copy_(as_bytes(torch.tensor([2.5], dtype=torch.float64)))
    assert column.tolist() == [[0.0], [2.5], [0.0]]
