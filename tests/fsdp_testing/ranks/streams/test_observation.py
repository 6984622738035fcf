"""What a rank does on which stream is recorded, and its races are found: in small programs, on ranks."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from fsdp_testing.errors import HarnessError
from fsdp_testing.ranks.pool.world import World
from fsdp_testing.ranks.streams.history import Freed, History, Work
from fsdp_testing.ranks.streams.observation import observe
from fsdp_testing.ranks.streams.races import races

# Renamed in torch 2.13.
gather_into = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def work_of(history: History) -> list[tuple[str, int, int, int]]:
    """Name, stream, number of reads and of writes of all work."""
    return [
        (entry.name, entry.stream, sum(not a.writes for a in entry.accesses), sum(a.writes for a in entry.accesses))
        for entry in history.entries
        if isinstance(entry, Work)
    ]


def side_stream() -> tuple[torch.cpu.Stream, torch.cpu.Stream]:
    return torch.cpu.current_stream(), torch.cpu.Stream()


@pytest.mark.world(2)
def test_operators_are_seen_with_what_they_read_and_write(world: World) -> None:
    with observe() as history:
        a = torch.ones(4)
        b = torch.empty(4)
        a.view(2, 2).t()
        b.copy_(a)
        c = a + b
        c.mul_(2)
        torch._foreach_add_([a, b], 1)
        del c
    assert work_of(history) == [
        ("ones", 0, 0, 1), ("copy_", 0, 1, 1), ("add", 0, 2, 1), ("mul_", 0, 0, 1), ("_foreach_add_", 0, 0, 2),
    ]  # fmt: skip
    assert sum(isinstance(entry, Freed) for entry in history.entries) == 1


@pytest.mark.world(2)
def test_numbers_and_torchs_own_streams_come_back(world: World) -> None:
    before = (
        torch.cpu.Stream,
        torch.cpu.current_stream,
        torch.UntypedStorage.resize_,
        dist.Work.wait,
        Tensor.record_stream,
    )
    model = torch.nn.Linear(3, 3, dtype=torch.float64)
    inputs = torch.arange(6, dtype=torch.float64).reshape(2, 3)
    plain = torch.autograd.grad(model(inputs).sum(), model.parameters())
    with observe():
        watched = torch.autograd.grad(model(inputs).sum(), model.parameters())
    assert all(map(torch.equal, plain, watched))
    after = (
        torch.cpu.Stream,
        torch.cpu.current_stream,
        torch.UntypedStorage.resize_,
        dist.Work.wait,
        Tensor.record_stream,
    )
    assert before == after


@pytest.mark.world(2)
@pytest.mark.parametrize("waits", [True, False])
def test_a_side_stream_has_to_wait_and_to_be_waited_for(world: World, waits: bool) -> None:
    with observe() as history:
        main, side = side_stream()
        value = torch.ones(4)
        if waits:
            side.wait_stream(main)
        with torch.cpu.stream(side):
            value.mul_(2)
        if waits:
            main.wait_event(side.record_event())
        value.add(1)
    assert len(races(history)) == (0 if waits else 2)


@pytest.mark.world(2)
@pytest.mark.parametrize("waits", [True, False])
def test_the_result_of_a_collective_is_there_when_it_was_waited_for(world: World, waits: bool) -> None:
    with observe() as history:
        out, part = torch.empty(2 * 3), torch.ones(3)
        work = gather_into(out, part, async_op=True)
        if waits:
            work.wait()
        out.sum()
        work.wait()
    found = races(history)
    assert len(found) == (0 if waits else 1)
    if not waits:
        assert "process group" in found[0].earlier.stream
        assert found[0].later.name == "sum"
        assert "test_observation.py" in found[0].later.site[0]
        assert "test_observation.py" in found[0].earlier.site[0]


@pytest.mark.world(2)
def test_a_blocking_collective_needs_no_wait(world: World) -> None:
    with observe() as history:
        value = torch.ones(3)
        dist.all_reduce(value)
        value.add_(1)
    assert not races(history)


@pytest.mark.world(2)
@pytest.mark.parametrize("waits", [True, False])
def test_functional_collectives_are_waited_for_by_their_result(world: World, waits: bool) -> None:
    import torch.distributed._functional_collectives as functional  # the public way to them is DTensor

    with observe() as history:
        value = torch.ones(3)
        reduced = functional.all_reduce(value, "sum", world.group)
        if waits:
            reduced.add(1)  # the result waits by itself
        value.mul_(2)  # its input is read until then
        reduced.add(1)
    assert len(races(history)) == (0 if waits else 1)


@pytest.mark.world(2)
def test_a_functional_collective_holds_what_it_reads_until_its_result_is_waited_for(world: World) -> None:
    import torch.distributed._functional_collectives as functional

    with observe() as history:
        reduced = functional.all_reduce(torch.ones(3), "sum", world.group)
        torch.zeros(3).add_(1)  # would be given the memory of the input, had it been freed
        reduced.add(1)
    assert not races(history)


@functools.cache
def waiting_for_several() -> tuple[Any, Any]:
    """Return torch's operator that waits for several results, made here where torch is older than 2.15, and what keeps it."""
    library = torch.library.Library("_c10d_functional", "FRAGMENT")
    operators = torch.ops._c10d_functional
    if not hasattr(operators, "wait_tensors"):
        library.define("wait_tensors(Tensor[] tensors) -> Tensor[]")
        library.impl("wait_tensors", lambda tensors: [operators.wait_tensor(each) for each in tensors], "CPU")
    return operators.wait_tensors, library


@pytest.mark.world(2)
@pytest.mark.parametrize("waits", [True, False])
def test_one_wait_is_for_several_functional_collectives(world: World, waits: bool) -> None:
    wait_tensors, _ = waiting_for_several()
    with observe() as history:
        values = [torch.ones(3), torch.ones(3)]
        reduced = [torch.ops._c10d_functional.all_reduce(each, "sum", world.group.group_name) for each in values]
        if waits:
            wait_tensors(reduced)
        for each in values:
            each.mul_(2)  # read until then
        wait_tensors(reduced)
    assert len(races(history)) == (0 if waits else 1)


@pytest.mark.world(2)
@pytest.mark.parametrize("recorded", [True, False])
def test_memory_of_a_side_stream_is_not_given_out_while_it_is_read(world: World, recorded: bool) -> None:
    with observe() as history:
        main, side = side_stream()
        with torch.cpu.stream(side):
            value = torch.ones(4)
        main.wait_stream(side)
        value.add(1)
        if recorded:
            value.record_stream(main)
        del value
        with torch.cpu.stream(side):
            torch.zeros(4)
    found = races(history)
    assert len(found) == (0 if recorded else 1)
    if not recorded:
        assert found[0].reused == "a tensor of 4 float32"


@pytest.mark.world(2)
def test_storage_that_is_resized_to_nothing_is_freed(world: World) -> None:
    with observe() as history:
        main, side = side_stream()
        with torch.cpu.stream(side):
            value = torch.ones(4)
        main.wait_stream(side)
        value.add(1)
        value.untyped_storage().resize_(0)
        with torch.cpu.stream(side):
            torch.zeros(4)
    assert [race.reused for race in races(history)] == ["a tensor of 4 float32"]


@pytest.mark.world(2)
def test_the_host_waits_for_what_it_reads(world: World) -> None:
    with observe() as history:
        _, side = side_stream()
        with torch.cpu.stream(side):
            value = torch.ones(4)
            value.sum().item()
        value.add(1)
    assert not races(history)


@pytest.mark.world(2)
def test_a_world_checks_streams(world: World) -> None:
    with world.check_streams():
        torch.ones(3).add_(1)
    expected = rf"rank {world.rank} has 1 races on its streams:\n  1. Nothing orders sum"
    with pytest.raises(AssertionError, match=expected), world.check_streams():
        with torch.cpu.stream(torch.cpu.Stream()):
            value = torch.ones(4)
        value.sum()
    with pytest.raises(ZeroDivisionError), world.check_streams():
        1 / 0  # noqa: B018 - what the test raises is told, not its races


@pytest.mark.world(2)
def test_what_torch_tensor_makes_on_a_side_stream_is_that_streams(world: World) -> None:
    with observe() as history:
        _, side = side_stream()
        with torch.cpu.stream(side):
            torch.cat([torch.tensor([1, 2]), torch.tensor([3])])
        torch.ones(4)
    assert not races(history)


@pytest.mark.world(1)
def test_a_device_without_streams_is_refused_in_a_sentence(world: World) -> None:
    with (
        pytest.raises(HarnessError, match=r"expected torch.meta to have Stream, .* cannot be checked"),
        observe("meta"),
    ):
        pass


@pytest.mark.world(2)
def test_ddp_gives_no_false_alarm(world: World) -> None:
    with world.check_streams():
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 3))
        model(torch.ones(2, 3)).sum().backward()
