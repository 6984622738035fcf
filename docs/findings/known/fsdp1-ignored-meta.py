"""FSDP1: an ignored parameter on the meta device is sharded once it is materialised."""

import torch
from ranks import CPU, fsdp1, show
from torch import nn


def defect(rank):
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    kept = [model[0].weight]
    wrapped = fsdp1(model, ignored_states=kept, param_init_fn=lambda m: m.to_empty(device=CPU, recurse=False))
    shape = tuple(wrapped.module[0].weight.shape)
    return "" if shape == (4, 4) else f"the ignored weight has the shape {shape} of a shard"


show(defect)
