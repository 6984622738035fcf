"""Programs of a few collectives that are legal, whatever order and place they come in, and how one is run."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import nn

from fsdp_testing.ranks.pool import Pool, WorldOutcome
from fsdp_testing.ranks.pool.world import current_world


def run(pool: Pool, function: Callable[..., Any], *args: Any, size: int = 2, timeout: float = 30.0) -> WorldOutcome:
    world = pool.world(size)
    try:
        return world.execute(function, args, timeout=timeout)
    finally:
        world.release()


def rank() -> int:
    return current_world().rank


def me() -> bool:
    return current_world().rank == 1


def single(out: torch.Tensor, value: torch.Tensor) -> Any:
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return gather(out, value)


def scatter_single(out: torch.Tensor, value: torch.Tensor) -> Any:
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    return scatter(out, value)


def subgroups_on_part_of_the_ranks() -> None:
    low, high = dist.new_group([0, 1]), dist.new_group([2, 3])
    group = low if rank() < 2 else high
    for _ in range(rank() // 2 + 1):
        dist.all_reduce(torch.ones(rank() // 2 + 1), group=group)
    dist.barrier()


def local_synchronization() -> None:
    if rank() in {1, 3}:
        group = dist.new_group([1, 3], use_local_synchronization=True)
        dist.all_reduce(torch.ones(3), group=group)
    else:
        group = dist.new_group([0, 2], use_local_synchronization=True)
        for _ in range(3):
            dist.broadcast(torch.ones(2), group=group, group_src=0)
    dist.barrier()


def async_on_two_groups_in_opposite_order() -> None:
    groups = [dist.new_group(), dist.new_group()]
    order = groups if me() else groups[::-1]
    works = [dist.all_reduce(torch.ones(4), group=group, async_op=True) for group in order]
    for work in works:
        work.wait()


def async_then_waiting_in_another_group() -> None:
    first, second = dist.new_group(), dist.new_group()
    mine, other = (first, second) if me() else (second, first)
    for _ in range(20):
        work = dist.all_reduce(torch.ones(4), group=mine, async_op=True)
        dist.all_reduce(torch.ones(4), group=other)
        work.wait()


def other_shape_of_the_same_size() -> None:
    dist.all_reduce(torch.ones(2, 4) if me() else torch.ones(8))
    dist.broadcast(torch.ones(8) if me() else torch.ones(4, 2), 0)


def uneven_all_gather() -> None:
    out = [torch.empty(3), torch.empty(5)]
    try:
        dist.all_gather(out, torch.full((5 if me() else 3,), float(rank())))
    except RuntimeError:
        return  # this gloo wants equal sizes: refused by torch on every rank


def uneven_all_to_all() -> None:
    splits = [1, 3] if not me() else [3, 2]
    received = [1, 3] if not me() else [3, 2]
    value = torch.arange(float(sum(splits)))
    out = torch.empty(sum(received))
    dist.all_to_all_single(out, value, output_split_sizes=received, input_split_sizes=splits)


def splits_named_by_one_rank_only() -> None:
    out = torch.empty(4)
    if me():
        dist.all_to_all_single(out, torch.ones(4), [2, 2], [2, 2])
    else:
        dist.all_to_all_single(out, torch.ones(4))


def reduce_scatter_of_uneven_parts() -> None:
    parts = [torch.ones(3), torch.ones(3)]
    dist.reduce_scatter(torch.empty(3), parts)


def point_to_point() -> None:
    if me():
        dist.send(torch.ones(3), 0)
        dist.recv(torch.empty(7), 0)
    else:
        dist.recv(torch.empty(3), 1)
        dist.send(torch.ones(7), 1)
    ops = [dist.P2POp(dist.isend, torch.ones(2), 1 - rank()), dist.P2POp(dist.irecv, torch.empty(2), 1 - rank())]
    for work in dist.batch_isend_irecv(ops):
        work.wait()


def one_way_sends() -> None:
    for step in range(5):
        if me():
            dist.recv(torch.empty(step + 1), 0)
        else:
            dist.send(torch.ones(step + 1), 1)


def coalescing_manager() -> None:
    with dist._coalescing_manager(async_ops=True) as manager:
        for size in (2, 3, 4):
            dist.all_reduce(torch.ones(size))
    manager.wait()


def object_collectives() -> Any:
    gathered: list[Any] = [None, None]
    dist.all_gather_object(gathered, "x" * (1 + 100 * rank()))
    news = [{"from": rank()}] if not me() else [None]
    dist.broadcast_object_list(news, 0)
    mine: list[Any] = [None]
    dist.scatter_object_list(mine, ["a", "bbbb"] if not me() else None, 0)
    collected: list[Any] | None = None if me() else [None, None]
    dist.gather_object("y" * (1 + 50 * rank()), collected, 0)
    return gathered[1][:1], news[0], mine[0]


def groups_made_again() -> None:
    for step in range(6):
        group = dist.new_group([0, 1])
        for _ in range(step % 3 + 1):
            dist.all_reduce(torch.ones(step + 1), group=group)
        dist.destroy_process_group(group)


def default_group_made_again() -> None:
    store = dist.distributed_c10d._get_default_store()
    dist.all_reduce(torch.ones(4))
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=dist.PrefixStore("again", store), rank=rank(), world_size=2)
    dist.all_reduce(torch.ones(9))


def two_threads_on_two_groups() -> None:
    groups = [dist.new_group(), dist.new_group()]
    problems: list[BaseException] = []

    def loop(group: Any, size: int) -> None:
        try:
            for _ in range(50):
                dist.all_reduce(torch.ones(size), group=group)
        except BaseException as error:
            problems.append(error)

    threads = [threading.Thread(target=loop, args=(group, i + 2)) for i, group in enumerate(groups)]
    for thread in threads if me() else reversed(threads):
        thread.start()
    for thread in threads:
        thread.join()
    assert not problems, problems


def background_thread_that_starts_late() -> None:
    """Rank 0's thread waits in a group of its own while rank 1, which has no thread yet, waits in the default group."""
    own = dist.new_group()
    thread = threading.Thread(target=dist.all_reduce, args=(torch.ones(3),), kwargs={"group": own})
    if not me():
        thread.start()
    dist.all_reduce(torch.ones(4))
    if me():
        thread.start()
    thread.join()


def empty_tensors() -> None:
    dist.all_reduce(torch.ones(0))
    dist.all_gather([torch.ones(0), torch.ones(0)], torch.ones(0))
    dist.barrier()


def both_ways_of_calling() -> None:
    value = torch.ones(4)
    if me():
        dist.all_reduce(value)
        single(torch.empty(8), value)
    else:
        value = funcol.all_reduce(value, "sum", current_world().group) + 0
        assert funcol.all_gather_tensor(value, 0, current_world().group).numel() == 8


def monitored() -> None:
    dist.monitored_barrier()
    dist.barrier()


def refused_by_torch_on_one_rank() -> None:
    if me():
        with pytest.raises((ValueError, RuntimeError)):
            dist.all_gather([torch.ones(4)], torch.ones(4))  # one output for two ranks
        with pytest.raises((ValueError, RuntimeError, TypeError)):
            current_world().group.allreduce([], dist.AllreduceOptions())
    dist.all_reduce(torch.ones(4))


def refused_by_torch_everywhere() -> None:
    for _ in range(30):
        calls: tuple[Callable[[], Any], ...] = (
            lambda: dist.all_reduce(torch.ones(4), op=dist.ReduceOp.BAND),  # refused when waited for
            lambda: dist.all_gather([torch.ones(4)], torch.ones(4)),
            lambda: single(torch.ones(7), torch.ones(4)),
            lambda: single(torch.ones(8, dtype=torch.float64), torch.ones(4)),
        )
        for call in calls:
            with pytest.raises((ValueError, RuntimeError)) as caught:
                call()
            assert type(caught.value).__name__ != "CollectiveMismatch", caught.value
        dist.all_reduce(torch.ones(4))


def ddp_with_uneven_inputs() -> None:
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(nn.Linear(4, 3))
    with model.join():
        for _ in range(2 + rank()):
            model(torch.ones(2, 4)).sum().backward()


def ddp() -> None:
    model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)))
    for _ in range(3):
        model(torch.randn(2, 4)).sum().backward()


def fsdp1() -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel

    model = FullyShardedDataParallel(nn.Linear(4, 3), device_id=torch.device("cpu"))
    for _ in range(2):
        model(torch.randn(2, 4)).sum().backward()


def fsdp2() -> None:
    from torch.distributed.fsdp import fully_shard

    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 3))
    for layer in (*model, model):
        fully_shard(layer)
    for _ in range(2):
        model(torch.randn(2, 4)).sum().backward()


def dtensor() -> None:
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = current_world().mesh
    value = distribute_tensor(torch.arange(6.0), mesh, [Shard(0)])
    assert value.redistribute(mesh, [Replicate()]).to_local().tolist() == list(range(6))


def two_dimensional_mesh() -> None:
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    for step in range(20):
        for axis in ("shard", "replicate"):
            dist.all_reduce(torch.ones(step + 1), group=mesh.get_group(axis))


def traced_only() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    if me():
        with FakeTensorMode():
            funcol.all_reduce(torch.ones(4), "sum", current_world().group)
    dist.barrier()


def more_than_the_ring() -> None:
    works = [dist.all_reduce(torch.ones(2), async_op=True) for _ in range(500)]
    for work in works:
        work.wait()


def plain_broadcast_rooted_everywhere() -> None:
    for root in (0, 1, 0):
        dist.broadcast(torch.ones(3), root)
        dist.reduce(torch.ones(3), root)
        dist.gather(torch.ones(2), [torch.empty(2), torch.empty(2)] if rank() == root else None, root)
        dist.scatter(torch.empty(2), [torch.ones(2), torch.ones(2)] if rank() == root else None, root)


LEGAL: dict[Callable[[], Any], int] = {
    subgroups_on_part_of_the_ranks: 4,
    local_synchronization: 4,
    two_dimensional_mesh: 4,
    async_on_two_groups_in_opposite_order: 2,
    async_then_waiting_in_another_group: 2,
    other_shape_of_the_same_size: 2,
    uneven_all_gather: 2,
    uneven_all_to_all: 2,
    splits_named_by_one_rank_only: 2,
    reduce_scatter_of_uneven_parts: 2,
    point_to_point: 2,
    one_way_sends: 2,
    coalescing_manager: 2,
    object_collectives: 2,
    groups_made_again: 2,
    default_group_made_again: 2,
    two_threads_on_two_groups: 2,
    background_thread_that_starts_late: 2,
    empty_tensors: 2,
    both_ways_of_calling: 2,
    monitored: 2,
    refused_by_torch_on_one_rank: 2,
    refused_by_torch_everywhere: 2,
    ddp: 2,
    ddp_with_uneven_inputs: 2,
    fsdp1: 2,
    fsdp2: 2,
    dtensor: 2,
    traced_only: 2,
    more_than_the_ring: 2,
    plain_broadcast_rooted_everywhere: 2,
}

# Point-to-point operations are not the ledger's, and what torch refuses is taken back.
NOTHING_STAYS = frozenset({point_to_point, one_way_sends, uneven_all_gather})
