"""FSDP2: the next forward ignores `p.data = ...`."""

import torch
from ranks import data, fsdp2, mlp, off, show


def defect(rank):
    plain, model = mlp(), fsdp2(mlp())
    with torch.no_grad():
        for changed in (model, plain):
            for parameter in changed.parameters():
                parameter.data = parameter.data * 2
        return off("the output", model(data(rank)), plain(data(rank)))


show(defect)
