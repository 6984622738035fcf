"""What ranks on several hosts do in tests: agree, disagree, end badly, end their host."""

from __future__ import annotations

import os
import signal
import threading

import torch
import torch.distributed as dist

from fsdp_testing.ranks.pool.world import current_world


def where(value: float) -> tuple[int, float, int]:
    """Rank, sum of `value` over ranks, parent process."""
    total = torch.full((1,), float(value))
    dist.all_reduce(total)
    rank = current_world().rank
    print(f"rank {rank}", flush=True)
    return rank, float(total), os.getppid()


def reduce_otherwise() -> None:
    last = current_world().rank == current_world().size - 1
    dist.all_reduce(torch.ones(1), op=dist.ReduceOp.MAX if last else dist.ReduceOp.SUM)


def die_on(rank: int) -> None:
    if current_world().rank == rank:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.ones(1))


def hang_on(rank: int) -> None:
    if current_world().rank == rank:
        threading.Event().wait()
    dist.all_reduce(torch.ones(1))


def return_early(rank: int) -> None:
    if current_world().rank != rank:
        dist.all_reduce(torch.ones(1))


def kill_on(rank: int, pid: int, number: int = signal.SIGKILL) -> None:
    """Signal a process, and never end."""
    if current_world().rank == rank:
        os.kill(pid, number)
    threading.Event().wait()
