"""FSDP2: the model's forward raises if a unit was called directly before."""

import torch
from ranks import data, error_of, fsdp2, mlp, show


def defect(rank):
    inner = mlp()
    model = fsdp2(inner[0], inner)
    with torch.no_grad():
        model[0](data(rank))
    return error_of(lambda: model(data(rank)).sum().backward())


show(defect)
