"""Ranks that disagree about a collective are told so at once, and programs that are legal are left alone."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import nn

from fsdp_testing.ledger import interception
from fsdp_testing.pool import Fate, Pool, WorldOutcome
from fsdp_testing.pool.world import current_world


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


# ---------------------------------------------------------------- what must be refused


def other_operation() -> None:
    if me():
        dist.broadcast(torch.ones(4), 0)
    else:
        dist.all_reduce(torch.ones(4))


def gather_against_scatter() -> None:
    if me():
        single(torch.ones(8), torch.ones(4))
    else:
        scatter_single(torch.ones(4), torch.ones(8))


def reduce_against_gather() -> None:
    if me():
        dist.all_gather([torch.ones(4), torch.ones(4)], torch.ones(4))
    else:
        dist.all_reduce(torch.ones(4))


def other_size() -> None:
    dist.all_reduce(torch.ones(8 if me() else 4))


def other_gathered_size() -> None:
    n = 8 if me() else 4
    dist.all_gather([torch.ones(n), torch.ones(n)], torch.ones(n))


def other_integer_dtype() -> None:
    dist.all_reduce(torch.ones(4, dtype=torch.int32 if me() else torch.float32))


def other_float_dtype() -> None:
    dist.all_reduce(torch.ones(4, dtype=torch.float64 if me() else torch.float32))


def other_reduce_op() -> None:
    dist.all_reduce(torch.ones(4), op=dist.ReduceOp.MAX if me() else dist.ReduceOp.SUM)


def other_reduce_op_of_scatter() -> None:
    value, out = torch.ones(4), torch.ones(2)
    op = dist.ReduceOp.MAX if me() else dist.ReduceOp.SUM
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    scatter(out, value, op=op)


def other_order() -> None:
    sizes = (3, 5) if me() else (5, 3)
    for size in sizes:
        dist.all_reduce(torch.ones(size))


def other_root() -> None:
    dist.broadcast(torch.ones(4), 1 if me() else 0)


def other_destination() -> None:
    dist.reduce(torch.ones(4), 1 if me() else 0)


def skipped_call() -> None:
    for step in range(4):
        if not (me() and step == 1):
            dist.all_reduce(torch.ones(step + 1))


def functional_op() -> None:
    funcol.all_reduce(torch.ones(4), "max" if me() else "sum", current_world().group).add(1)


def functional_size() -> None:
    funcol.all_gather_tensor(torch.ones(8 if me() else 4), 0, current_world().group).add(1)


def overload_of_the_method() -> None:
    group = current_world().group
    group.allreduce([torch.ones(4)], dist.ReduceOp.MAX if me() else dist.ReduceOp.SUM).wait()


def object_against_tensor() -> None:
    if me():
        dist.all_gather_object([None, None], {"a": 1})
    else:
        dist.all_reduce(torch.ones(4))


REFUSED: dict[Callable[[], None], tuple[str, str]] = {
    other_operation: ("all_reduce(sum) float32[4]", "broadcast(root=0) float32[4]"),
    gather_against_scatter: ("reduce_scatter_single(sum) float32[8]", "all_gather_single float32[8]"),
    reduce_against_gather: ("all_reduce(sum) float32[4]", "all_gather float32[[4], [4]]"),
    other_size: ("all_reduce(sum) float32[4]", "all_reduce(sum) float32[8]"),
    other_gathered_size: ("all_gather float32[[4], [4]]", "all_gather float32[[8], [8]]"),
    other_integer_dtype: ("all_reduce(sum) float32[4]", "all_reduce(sum) int32[4]"),
    other_float_dtype: ("all_reduce(sum) float32[4]", "all_reduce(sum) float64[4]"),
    other_reduce_op: ("all_reduce(sum) float32[4]", "all_reduce(max) float32[4]"),
    other_reduce_op_of_scatter: ("reduce_scatter_single(sum) float32[4]", "reduce_scatter_single(max) float32[4]"),
    other_order: ("all_reduce(sum) float32[5]", "all_reduce(sum) float32[3]"),
    other_root: ("broadcast(root=0) float32[4]", "broadcast(root=1) float32[4]"),
    other_destination: ("reduce(sum, root=0) float32[4]", "reduce(sum, root=1) float32[4]"),
    skipped_call: ("all_reduce(sum) float32[2]", "all_reduce(sum) float32[3]"),
    functional_op: ("all_reduce(sum) float32[4]", "all_reduce(max) float32[4]"),
    functional_size: ("all_gather_single float32[2, 4]", "all_gather_single float32[2, 8]"),
    overload_of_the_method: ("all_reduce(sum) float32[4]", "all_reduce(max) float32[4]"),
    # Torch 2.15 gathers the sizes of objects into one tensor.
    object_against_tensor: ("all_reduce(sum) float32[4]", "all_gather int64[[1], [1]] or all_gather_single int64[2]"),
}


@pytest.mark.parametrize("function", REFUSED, ids=lambda function: function.__name__)
def test_ranks_that_disagree_are_told_at_once(pool: Pool, function: Callable[[], None]) -> None:
    outcome = run(pool, function)
    # Whoever comes second tells it.
    told = ("|".join(map(re.escape, what.split(" or "))) for what in REFUSED[function])
    first, second = (rf"rank {{}} issue[ds] (?:{what}) at \S+:\d+ in \w+" for what in told)
    number = 2 if function is skipped_call else 1
    start = rf"^ranks disagree: collective #{number} of the default group differs: "
    orders = [f"{first.format(0)}; {second.format(1)}", f"{second.format(1)}; {first.format(0)}"]
    assert any(re.search(start + order, outcome.cause) for order in orders), outcome.describe()
    assert outcome.seconds < 5
    assert any(r.error is not None and r.error.type_name == "CollectiveMismatch" for r in outcome.ranks)


def crossed_groups() -> None:
    groups = [dist.new_group(), dist.new_group()]
    for group in groups if me() else reversed(groups):
        dist.all_reduce(torch.ones(4), group=group)


def crossed_with_the_default_group() -> None:
    other = dist.new_group()
    for group in (other, None) if me() else (None, other):
        dist.barrier(group)


def cycle_of_three() -> None:
    pairs = ((0, 1), (1, 2), (0, 2))
    groups = {pair: dist.new_group(list(pair)) for pair in pairs}
    order = {0: ((0, 1), (0, 2)), 1: ((1, 2), (0, 1)), 2: ((0, 2), (1, 2))}[rank()]
    for pair in order:
        dist.all_reduce(torch.ones(4), group=groups[pair])


@pytest.mark.parametrize(
    ("function", "size"), [(crossed_groups, 2), (crossed_with_the_default_group, 2), (cycle_of_three, 3)]
)
def test_groups_used_in_opposite_order_are_told(pool: Pool, function: Callable[[], None], size: int) -> None:
    outcome = run(pool, function, size=size)
    assert outcome.cause.startswith("ranks disagree: groups are used in opposite order: rank "), outcome.describe()
    assert outcome.cause.count(" waits in ") == size - 1
    assert outcome.seconds < 5


def caught() -> str:
    try:
        other_reduce_op()
    except Exception as error:
        return type(error).__name__
    return "issued"


def test_a_mismatch_that_the_test_swallows_still_fails(pool: Pool) -> None:
    outcome = run(pool, caught)
    assert not outcome.ok
    assert "differ" in outcome.cause


# ---------------------------------------------------------------- what is legal


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


@pytest.mark.parametrize("function", LEGAL, ids=lambda function: function.__name__)
def test_a_legal_program_is_left_alone(pool: Pool, function: Callable[[], Any]) -> None:
    outcome = run(pool, function, size=LEGAL[function], timeout=60)
    assert outcome.ok, outcome.describe()
    assert all(r.fate is Fate.RETURNED for r in outcome.ranks)


def many_groups() -> int:
    """More groups than the ledger has room for, in another order on each rank."""
    groups = [dist.new_group([0]) for _ in range(0)]
    names = []
    for index in range(1100):
        group = dist.distributed_c10d._get_default_group()
        recorder = interception._active
        assert recorder is not None
        from fsdp_testing.ledger.records import group_identity

        identity = group_identity(f"made-{index if not me() else 1099 - index}", (0, 1), 2, True)
        names.append(recorder.line(identity))
        del group
    from fsdp_testing.ledger.calls import call_for

    for line in names:
        interception._active.record(line, call_for(("barrier", (), None, None)), False)  # type: ignore[union-attr]
    return len(groups)


def test_a_full_ledger_accuses_nobody(pool: Pool) -> None:
    outcome = run(pool, many_groups)
    assert outcome.ok, outcome.describe()
    assert all(r.uncompared > 0 for r in outcome.ranks)


# ---------------------------------------------------------------- what is seen


def seen(function: Callable[[], Any]) -> int:
    before = sum(interception._active.issued().values())  # type: ignore[union-attr]
    function()
    return sum(interception._active.issued().values()) - before  # type: ignore[union-attr]


def counts_of_everything() -> dict[str, int]:
    value = torch.ones(4)
    return {
        "method": seen(lambda: dist.all_reduce(value)),
        "functional": seen(lambda: funcol.all_reduce(value, "sum", current_world().group) + 0),
        "point to point": seen(one_way_sends),
        "DDP": seen(ddp),
        "FSDP2": seen(fsdp2),
        "FSDP1": seen(fsdp1),
        "after C++ callers": seen(lambda: dist.all_reduce(value)),
        "functional after C++ callers": seen(lambda: funcol.all_reduce(value, "sum", current_world().group) + 0),
        "overload": seen(lambda: current_world().group.allreduce(value).wait()),
        "broadcast of a module": seen(
            lambda: dist._broadcast_coalesced(current_world().group, [value.clone(), value.clone()], 1 << 20, 0)
        ),
    }


def test_collectives_are_counted_once_whichever_way_they_come(pool: Pool) -> None:
    outcome = run(pool, counts_of_everything)
    assert outcome.ok, outcome.describe()
    counted = outcome.values[0]
    ways = ("method", "functional", "after C++ callers", "functional after C++ callers", "overload")
    assert {way: counted[way] for way in ways} == dict.fromkeys(ways, 1)
    assert counted["point to point"] == 0
    assert counted["DDP"] >= 3 + 3  # three backwards, three broadcasts of buffers
    assert counted["FSDP1"] >= 2 * 2
    assert counted["FSDP2"] >= 2 * 4
    assert counted["broadcast of a module"] == 1


def entry_of_the_next_line() -> str:
    dist.all_reduce(torch.ones(2, 3))
    return "done"


def test_a_record_names_what_and_where(pool: Pool) -> None:
    outcome = run(pool, entry_of_the_next_line)
    (record,) = outcome.ranks[1].collectives
    assert str(record) == "all_reduce(sum) #1 float32[2, 3]"
    assert re.search(r"test_interception.py:\d+ in entry_of_the_next_line$", record.call_site)
    assert outcome.ranks[0].digests == outcome.ranks[1].digests
