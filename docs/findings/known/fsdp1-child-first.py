"""FSDP1: the model's forward raises if a unit was called directly before."""

import torch
from ranks import data, error_of, fsdp1, mlp, show


def defect(rank):
    inner = mlp()
    inner[0] = fsdp1(inner[0])
    model = fsdp1(inner)
    with torch.no_grad():
        model.module[0](data(rank))
    return error_of(lambda: model(data(rank)).sum().backward())


show(defect)
