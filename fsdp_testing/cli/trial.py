"""What does `doctor` run on two ranks to see whether ranks start, find each other and sum?"""

from __future__ import annotations


def rank_sum() -> float:
    """The sum of all ranks' numbers plus one. Collectives: one all-reduce on the world's group; every rank."""
    import torch
    import torch.distributed as dist

    value = torch.tensor([float(dist.get_rank() + 1)])
    dist.all_reduce(value)
    return value.item()
