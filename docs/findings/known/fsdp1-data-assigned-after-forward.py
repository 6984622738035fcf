"""FSDP1: the next forward ignores `p.data = ...` after a forward without backward."""

import torch
from ranks import data, fsdp1, mlp, off, show


def defect(rank):
    plain, model = mlp(), fsdp1(mlp())
    with torch.no_grad():
        model(data(rank))
        for changed in (model, plain):
            for parameter in changed.parameters():
                parameter.data = parameter.data * 2
        return off("the output", model(data(rank)), plain(data(rank)))


show(defect)
