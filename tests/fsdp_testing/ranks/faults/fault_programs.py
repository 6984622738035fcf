"""What ranks run in the tests of faults; named, not sent."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from fsdp_testing.ranks.pool.world import current_world


def sums(*faults: str, count: int = 3) -> list[float]:
    """Sum rank + 1 a few times, with faults; return what each sum gave."""
    world = current_world()
    world.inject(*faults)
    results = []
    for _ in range(count):
        value = torch.full((2,), float(world.rank + 1))
        dist.all_reduce(value)
        results.append(float(value[0]))
    return results


def counted_sums(*faults: str) -> list[float]:
    """Sum 1, 2, 3 of rank 0 with 100, 200, 300 of rank 1; read the results when all are made."""
    world = current_world()
    values = [torch.full((1,), 100.0**world.rank * number) for number in (1, 2, 3)]
    with world.inject(*faults):
        for value in values:
            dist.all_reduce(value)
    return [float(value) for value in values]


def sums_in_two_injections(outer: str, inner: str) -> list[float]:
    with current_world().inject(outer):
        return sums(inner)


def sum_and_largest(fault: str) -> list[float]:
    """Two collectives of which the kinds differ, so that their order shows."""
    world = current_world()
    with world.inject(fault):
        value, largest = torch.ones(1), torch.full((1,), float(world.rank))
        dist.all_reduce(value)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return [float(value), float(largest)]


def two_sums_alike(fault: str) -> list[float]:
    world = current_world()
    with world.inject(fault):
        first, second = torch.ones(1), torch.full((1,), 10.0)
        dist.all_reduce(first)
        dist.all_reduce(second)
    return [float(first), float(second)]


def broadcasts(fault: str) -> float:
    """Rank 0 alone contributes."""
    world = current_world()
    value = torch.full((1,), float(world.rank))
    with world.inject(fault):
        dist.broadcast(value, 0)
    return float(value)


def steps(fault: str) -> tuple[int, float]:
    """Three steps of SGD with a gradient of 1; return how many were made and where the weight is."""
    world = current_world()
    weight = torch.nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    made = 0
    world.inject(fault)
    for _ in range(3):
        weight.grad = torch.ones(2)
        optimizer.step()
        made += 1
    return made, float(weight.detach()[0])


def saves(path: str, fault: str, *, also_after: bool = False) -> list[str]:
    """Save three times, each time to another file, and go on after an error; return what was raised."""
    world = current_world()
    raised = []
    with world.inject(fault):
        for number in range(1, 4):
            try:
                torch.save({"weight": torch.arange(1000)}, Path(path) / f"{world.rank}-{number}.pt")
            except OSError as error:
                raised.append(f"{number}: {error.strerror}")
    if also_after:
        torch.save(torch.ones(1), Path(path) / "after.pt")
    return raised


def loads(path: str, fault: str) -> float:
    began = time.monotonic()
    with current_world().inject(fault):
        torch.load(path)
    return time.monotonic() - began


def allocates(fault: str) -> str:
    """Ask for much memory while the fault lasts, and again afterwards."""
    with current_world().inject(fault):
        try:
            torch.empty(2**30)
        except RuntimeError as error:
            refused = str(error)
    torch.empty(2**30)
    return refused


def clock() -> tuple[float, float]:
    """How far the clock is off, and how far afterwards."""
    with current_world().inject("clock=+3600"):
        off = time.time() - time.clock_gettime(time.CLOCK_REALTIME)
    return off, time.time() - time.clock_gettime(time.CLOCK_REALTIME)


def in_ddp(fault: str) -> None:
    """One step of DDP, whose reducer calls its collectives from C++."""
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))
    with current_world().inject(fault):
        model(torch.ones(1, 2)).sum().backward()


def pid() -> int:
    return os.getpid()


def saves_little(path: str, state: Any, *, new_format: bool) -> None:
    with current_world().inject("corrupt@save=1"):
        torch.save(state, path, _use_new_zipfile_serialization=new_format)
