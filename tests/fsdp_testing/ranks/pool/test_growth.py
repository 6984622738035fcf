"""A world that is lent again and again does not grow: neither its ranks nor what controls them keep anything of a call."""

from __future__ import annotations

import gc
import sys

import torch
import torch.distributed as dist

from fsdp_testing.ranks.pool import Pool

WARM_UP = 150
CALLS = 500


def sums() -> float:
    total = torch.ones(4)
    dist.all_reduce(total)
    return float(total.sum())


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
