"""FSDP1 with flat parameters: a weight shared by two units silently becomes two weights."""

import torch
from ranks import data, fsdp1, mlp, show
from torch.distributed.fsdp import FullyShardedDataParallel


def defect(rank):
    inner = mlp(3)
    inner[1].weight = inner[0].weight
    inner[0] = fsdp1(inner[0], use_orig_params=False)
    model = fsdp1(inner, use_orig_params=False)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model(data(rank)).square().sum().backward()
    optimizer.step()
    with FullyShardedDataParallel.summon_full_params(model):
        first, second = model.module[0].weight, model.module[1].weight
        apart = (first - second).abs().max().item()
    return f"after a step the two places differ by {apart:.3g}" if apart else ""


show(defect)
