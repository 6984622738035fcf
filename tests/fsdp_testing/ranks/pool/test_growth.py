"""A world that is lent again and again does not grow: neither its ranks nor what controls them keep anything of a call."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import sys

import pytest
import torch
import torch.distributed as dist

from fsdp_testing.ranks.pool import Pool
from fsdp_testing.ranks.pool.worker import COLLECTIVES_KEPT

WARM_UP = 150
CALLS = 500


def sums() -> float:
    total = torch.ones(4)
    dist.all_reduce(total)
    return float(total.sum())


def recorded() -> int:
    """Collectives that torch's flight recorder keeps, after more than it may."""
    for _ in range(COLLECTIVES_KEPT + 50):
        sums()
    return len(json.loads(torch._C._distributed_c10d._dump_fr_trace_json(True))["entries"])


KEPT = []


def keeps_groups(number: int) -> int:
    """Keep groups after they were destroyed, with their threads."""
    for _ in range(number):
        KEPT.append(dist.new_group([0, 1]))
        dist.destroy_process_group(KEPT[-1])
    return os.getpid()


def counts() -> tuple[int, int]:
    """Objects that the collector knows, and blocks of memory that Python has given out."""
    gc.collect()
    return len(gc.get_objects()), sys.getallocatedblocks()


def test_hundreds_of_calls_leave_nothing_in_ranks_or_controller(pool: Pool) -> None:
    world = pool.world(2, isolation="fresh")
    try:
        for _ in range(WARM_UP):
            world.execute(sums)
        before, here = world.execute(counts).values, counts()
        for _ in range(CALLS):
            assert world.execute(sums).ok
        after, now = world.execute(counts).values, counts()
    finally:
        world.release()
    grown = [
        (objects - old_objects, blocks - old_blocks)
        for (old_objects, old_blocks), (objects, blocks) in zip([*before, here], [*after, now], strict=True)
    ]
    # What each call left would be there five hundred times. Caches of Python and of torch still settle by some blocks.
    assert all(o < CALLS // 10 and b < CALLS for o, b in grown), f"by rank, then the controller: {grown}"


@pytest.mark.parametrize(("groups", "same"), [(0, True), (30, False)])
def test_ranks_with_many_threads_that_nobody_ends_are_not_lent_again(groups: int, same: bool) -> None:
    processes = []
    # A pool of its own: one that other tests used may have two worlds of this size, and lends them in turn.
    with contextlib.closing(Pool(preload_modules=("pytest",))) as pool:
        for _ in range(2):
            with pool.lend(2) as world:
                processes.append(world.execute(keeps_groups, (groups,)).values)
    assert (processes[0] == processes[1]) == same


@pytest.mark.parametrize(("given", "kept"), [(None, COLLECTIVES_KEPT), ("70", 70)])
def test_torchs_record_of_collectives_is_short_unless_you_ask_for_more(
    pool: Pool, monkeypatch: pytest.MonkeyPatch, given: str | None, kept: int
) -> None:
    monkeypatch.delenv("TORCH_FR_BUFFER_SIZE", raising=False)
    if given is not None:
        monkeypatch.setenv("TORCH_FR_BUFFER_SIZE", given)
    world = pool.world(2, isolation="fresh")
    try:
        assert world.execute(recorded).values == [kept, kept]
    finally:
        world.release()
