"""FSDP2: the next forward still uses a parameter that was replaced after the first forward."""

import torch
from ranks import data, fsdp2, mlp, off, show
from torch import nn


def defect(rank):
    plain, model = mlp(), fsdp2(mlp())
    with torch.no_grad():
        model(data(rank))
        model.reshard()
        for changed in (model, plain):
            changed[0].weight = nn.Parameter(changed[0].weight * 2)
        return off("the output", model(data(rank)), plain(data(rank)))


show(defect)
