"""A result that nobody waited for is never there, however quick the backend was."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from fsdp_testing import current_world, run_ranks
from fsdp_testing.ranks.ledger.late_delivery import deliver_late

Started = tuple[Any, Tensor, Tensor]
# Renamed in torch 2.13.
gather_into = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
scatter_sum = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def mine(numel: int = 6) -> Tensor:
    return torch.arange(numel, dtype=torch.float64) + 100 * current_world().rank


def total(numel: int) -> Tensor:
    size = current_world().size
    return torch.arange(numel, dtype=torch.float64) * size + 100 * sum(range(size))


def all_reduce() -> Started:
    out = mine()
    return dist.all_reduce(out, async_op=True), out, total(6)


def broadcast() -> Started:
    out = mine()
    return dist.broadcast(out, src=current_world().size - 1, async_op=True), out, mine(6) * 0 + last(6)


def last(numel: int) -> Tensor:
    return torch.arange(numel, dtype=torch.float64) + 100 * (current_world().size - 1)


def gather_single() -> Started:
    size = current_world().size
    out = torch.zeros(3 * size, dtype=torch.float64)
    work = gather_into(out, mine(3), async_op=True)
    return work, out, torch.cat([torch.arange(3, dtype=torch.float64) + 100 * rank for rank in range(size)])


def gather_list() -> Started:
    size = current_world().size
    whole = torch.zeros(size, 3, dtype=torch.float64)
    work = dist.all_gather(list(whole.unbind()), mine(3), async_op=True)
    return work, whole, torch.stack([torch.arange(3, dtype=torch.float64) + 100 * rank for rank in range(size)])


def reduce_scatter_single() -> Started:
    world = current_world()
    out = torch.zeros(3, dtype=torch.float64)
    work = scatter_sum(out, mine(3 * world.size), async_op=True)
    return work, out, total(3 * world.size).chunk(world.size)[world.rank]


def gather_in_place() -> Started:
    """What this rank gives lies in the memory that takes the result."""
    world = current_world()
    out = torch.zeros(3 * world.size, dtype=torch.float64)
    given = out[3 * world.rank :][:3].copy_(mine(3))
    work = gather_into(out, given, async_op=True)
    return work, out, torch.cat([torch.arange(3, dtype=torch.float64) + 100 * rank for rank in range(world.size)])


def reduce_scatter_in_place() -> Started:
    world = current_world()
    given = mine(3 * world.size)
    out = given.chunk(world.size)[world.rank]
    return scatter_sum(out, given, async_op=True), out, total(3 * world.size).chunk(world.size)[world.rank]


def all_to_all() -> Started:
    world = current_world()
    out = torch.zeros(2 * world.size, dtype=torch.float64)
    work = dist.all_to_all_single(out, mine(2 * world.size), async_op=True)
    sent = torch.arange(2 * world.size, dtype=torch.float64).chunk(world.size)[world.rank]
    return work, out, torch.cat([sent + 100 * rank for rank in range(world.size)])


STARTS: tuple[Callable[[], Started], ...] = (
    all_reduce, broadcast, gather_single, gather_list, reduce_scatter_single, all_to_all, gather_in_place,
    reduce_scatter_in_place,
)  # fmt: skip


def nothing_yet(out: Tensor) -> bool:
    return bool(out.isnan().all())


def late(start: Callable[[], Started]) -> tuple[bool, bool]:
    """Whether the result was hidden once the backend had it, and right after the wait."""
    with deliver_late():
        work, out, expected = start()
        dist.barrier()
        hidden = nothing_yet(out)
        work.wait()
        return hidden, torch.equal(out, expected)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("start", STARTS, ids=lambda start: start.__name__)
def test_a_result_arrives_with_the_wait(start, size):
    found = run_ranks(late, start, size=size)
    # The root of a broadcast goes on reading what it sends.
    root = size - 1 if start is broadcast else None
    assert found == [(rank != root, True) for rank in range(size)]


def never_awaited(start: Callable[[], Started]) -> bool:
    with deliver_late():
        _, out, _ = start()
        dist.barrier()
    dist.barrier()
    return nothing_yet(out)


def test_what_nobody_waits_for_never_arrives():
    assert run_ranks(never_awaited, all_reduce) == [True, True]


def asked(way: str) -> tuple[bool, bool]:
    with deliver_late():
        work, out, expected = all_reduce()
        hidden = nothing_yet(out)
        if way == "poll":
            while not work.is_completed():
                pass
        elif way == "synchronize":
            work.synchronize()  # does not wait on the CPU
            work.wait()
        elif way == "result":
            assert work.result()[0] is out
        elif way == "future":
            assert work.get_future().wait()[0] is out
        elif way == "then":
            work.get_future().then(lambda future: future.value()[0].mul_(2)).wait()
            expected = expected * 2
        work.wait()  # a second time: the result is delivered once
        return hidden or way == "future", torch.equal(out, expected)


@pytest.mark.parametrize("way", ["poll", "synchronize", "result", "future", "then"])
def test_every_way_of_waiting_delivers(way):
    found = run_ranks(asked, way)
    assert [right for _, right in found] == [True, True]


def at_once() -> list[bool]:
    found = []
    work, out, expected = all_reduce()  # outside
    dist.barrier()
    found.append(torch.equal(out, expected) and type(work) is not type(None))
    with deliver_late():
        summed = mine()
        dist.all_reduce(summed)  # not asynchronous
        found.append(torch.equal(summed, total(6)))
        strided = torch.zeros(6, 2, dtype=torch.float64)[:, 0]
        strided += mine()
        work = dist.all_reduce(strided.contiguous(), async_op=True)
        work.wait()
        empty = torch.zeros(0)
        dist.all_reduce(empty, async_op=True).wait()
        found.append(empty.numel() == 0)
    return found


def test_other_collectives_are_as_ever():
    assert run_ranks(at_once) == [[True, True, True]] * 2


def bits_of_integers() -> list[int]:
    with deliver_late():
        out = torch.ones(3, dtype=torch.int64)
        work = dist.all_reduce(out, async_op=True)
        dist.barrier()
        hidden = out.tolist()
        work.wait()
        return hidden + out.tolist()


def test_integers_are_hidden_too():
    assert run_ranks(bits_of_integers) == [[-1, -1, -1, 2, 2, 2]] * 2


def freed() -> str:
    with deliver_late():
        work, out, _ = gather_single()
        out.untyped_storage().resize_(0)
        try:
            work.wait()
        except RuntimeError as error:
            return str(error)
    return ""


def test_memory_given_back_before_the_wait_is_refused():
    assert all("wait for it before its output is freed" in text for text in run_ranks(freed))


def watched() -> tuple[int, bool, bool]:
    with deliver_late(), torch.inference_mode():
        work, out, expected = all_reduce()
        work.wait()
        right = torch.equal(out, expected)
    with deliver_late():
        parameter = torch.nn.Parameter(mine())
        with torch.no_grad():
            work = dist.all_reduce(parameter, async_op=True)
        before = parameter._version
        work.wait()
        return parameter._version - before, right, isinstance(work, dist.Work)


def test_versions_and_modes_do_not_see_the_delivery():
    assert run_ranks(watched) == [(0, True, True)] * 2
