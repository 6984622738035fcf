"""Ranks that run different units of equal size are noticed before the optimizer steps."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fsdp_ref.annotations import unit_of
from fsdp_ref.comm.streams import Streams
from fsdp_ref.errors import ExecutionOrderError
from fsdp_ref.fence.wire_order import _KEPT, GATHER, REDUCE, RankComparison, WireOrder
from fsdp_ref.runtime.execution_order import ExecutionOrder
from fsdp_ref.runtime.root import lazy_init
from fsdp_ref.wrap import ModuleWrapPolicy


class Experts(nn.Module):
    """Three units of equal size, run in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.gate = nn.Parameter(torch.ones(6))

    def forward(self, x, order=(0, 1)):
        for index in order:
            x = self.experts[index](x).tanh()
        return x * self.gate


EXPERTS = {"model": Experts, "policy": ModuleWrapPolicy({nn.Linear})}


def comparison(root) -> RankComparison:
    return next(guard for guard in root.guards.members if isinstance(guard, RankComparison))


def run(world, model, orders, x=None):
    x = torch.ones(2, 6, dtype=torch.float64) if x is None else x
    return model(x, orders[min(world.rank, len(orders) - 1)]).square().mean()


@pytest.mark.parametrize("orders", [((0, 1), (0, 2)), ((0, 1), (1, 0)), ((0, 1), (0, 1), (0, 2))], ids=str)
@pytest.mark.world(3)
def test_ranks_that_ran_different_units(world, trial, api, strategy, orders):
    t = trial(api, strategy, **EXPERTS)
    last = len(orders) - 1
    with pytest.raises(ExecutionOrderError) as caught:
        run(world, t.model, orders).backward()
    text = str(caught.value)
    assert "rank 0 " in text
    assert f"rank {last} " in text
    assert text.count("'experts.") == 2
    assert ("gathers the parameters" in text) == (strategy != "NO_SHARD")
    assert all(p.grad is None for p in t.model.parameters())
    # Nothing is left behind: the next pass is judged alone.
    run(world, t.model, ((0, 1),)).backward()
    run(world, t.model, ((2, 0),)).backward()


@pytest.mark.world(4)
@pytest.mark.filterwarnings("ignore:FSDP is switching:UserWarning")
@pytest.mark.parametrize("shape", [(2, 2), (1, 4), (4, 1)], ids=str)
@pytest.mark.parametrize("where", ["shard", "replicate"])
def test_hybrid_meshes(world, trial, shape, where, mesh_of):
    """Ranks differ inside a shard group, or whole replicas differ: every rank hears of it, and none waits."""
    replica, shard = divmod(world.rank, shape[1])
    order = (0, 2) if (shard if where == "shard" else replica) == 1 else (0, 1)
    same = shape[1 if where == "shard" else 0] == 1
    with mesh_of(*shape) as mesh:
        t = trial("composable", "HYBRID_SHARD", **EXPERTS, device_mesh=mesh)
        with contextlib.nullcontext() if same else pytest.raises(ExecutionOrderError, match="experts"):
            run(world, t.model, (order,)).backward()


@pytest.mark.world(4)
@pytest.mark.parametrize("api", ["orig", "composable"])
def test_a_replica_may_evaluate_alone(world, trial, api, mesh_of):
    """Its gathers travel within its shard group, and it may have more batches to evaluate than the others."""
    with mesh_of(2, 2) as mesh:
        t = trial(api, "HYBRID_SHARD", **EXPERTS, device_mesh=mesh)
        for step in range(2):
            if world.rank // 2 == step:
                with torch.no_grad():
                    run(world, t.model, ((step, 2),))
            t.zero_grad()
            run(world, t.model, ((0, 1),)).backward()
            run(world, t.plain, ((0, 1),)).backward()
            t.step()
            t.compare()


@pytest.mark.world(4)
def test_what_a_shard_group_did_differently_its_replicas_hear(world, trial, mesh_of):
    """Two ranks of one replica gathered each other's parameters; their gradients are averaged with the others'."""
    with mesh_of(2, 2) as mesh:
        t = trial("composable", "HYBRID_SHARD", **EXPERTS, device_mesh=mesh)
        if world.rank < 2:
            with torch.no_grad():
                run(world, t.model, ((0, 1), (0, 2)))
            unit_of(t.model).root.order = ExecutionOrder()  # what ranks gather ahead by it is another matter
        with pytest.raises(ExecutionOrderError, match="rank 0 gathers .* rank 1 gathers"):
            run(world, t.model, ((0, 1),)).backward()


@pytest.mark.world(2)
def test_after_a_mismatch_no_rank_keeps_a_gradient(world, trial, strategy):
    """Not even one of an earlier pass: of one parameter, some ranks would step their pieces and others not."""
    t = trial("orig", strategy, **EXPERTS)
    run(world, t.model, ((0, 1, 2),)).backward()
    with pytest.raises(ExecutionOrderError):
        run(world, t.model, ((0, 1), (0, 2))).backward()
    assert all(p.grad is None for p in t.model.parameters())


@pytest.mark.world(2)
@pytest.mark.parametrize("look", ["forward", "summon"])
def test_where_the_host_reads_later_no_step_goes_unnoticed(world, trial, strategy, look):
    """As on an accelerator: gradients of such a pass are NaN at once, the error comes with the next forward or summon."""
    t = trial("orig", strategy, **EXPERTS)
    comparison(lazy_init(unit_of(t.model))).reads_late = True
    run(world, t.model, ((0, 1), (0, 2))).backward()
    grads = [p.grad for p in t.model.parameters() if p.grad is not None and p.grad.numel()]
    assert grads
    assert all(grad.isnan().all() for grad in grads)
    with pytest.raises(ExecutionOrderError, match="experts"):
        if look == "summon":
            with t.model.summon_full_params(t.model):
                pass
        else:
            run(world, t.model, ((0, 1),))
    assert all(p.grad is None for p in t.model.parameters())
    run(world, t.model, ((0, 1),)).backward()
    run(world, t.model, ((0, 1),)).backward()


@pytest.mark.world(2)
def test_what_it_costs(world, trial, strategy, watch_collectives):
    """One maximum of 16 bytes for each group and synchronising backward, nothing in forward or under no_sync."""
    t = trial("orig", strategy)
    for sync in (False, True, False, True):
        with watch_collectives() as seen, t.no_sync(not sync):
            t.loss(t.inputs(0)).backward()
        orders = [call for call in seen if call.unit == "order of units"]
        assert [call.tensor.nbytes for call in orders] == ([16] if sync else [])


@pytest.mark.world(2)
def test_evaluations_take_no_memory(world, trial):
    t = trial("orig", "FULL_SHARD")
    for _ in range(3):
        with torch.no_grad():
            t.loss(t.inputs(0))
    notes = comparison(t.model._unit.root).wire_order.notes
    assert len(notes) == 12
    assert notes.maxlen == _KEPT


@pytest.mark.world([2, 3])
def test_the_first_difference_is_named(world):
    """Whatever the lengths; and units outside of the group do not count."""

    class Unit:
        config = SimpleNamespace(groups=SimpleNamespace(shard=dist.group.WORLD, replicate=None))
        handle = SimpleNamespace(empty=False)

        def __init__(self, name):
            self.name = name

    units = [Unit(""), Unit("a"), Unit("b")]
    order = WireOrder(units)
    stranger = Unit("stranger")
    order.notes.extend([(units[0], GATHER), (stranger, REDUCE), (units[1], REDUCE)])
    if world.rank == world.size - 1:
        order.notes.append((units[2], REDUCE))
    order.start(torch.device("cpu"))
    text = f"rank 0 does nothing more where rank {world.size - 1} reduces the gradients of 'b' \\(collective 2 "
    order.settle(Streams())
    with pytest.raises(ExecutionOrderError, match=text):
        raise order.finish().error
    order.notes.append((units[world.rank % 3], GATHER))
    order.start(torch.device("cpu"))  # nothing was reduced
    assert order.settle(Streams()) is None
    assert order.finish() is None
