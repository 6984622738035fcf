"""FSDP2: a unit that is run by itself before the model makes the model's forward raise."""

import torch
from ranks import data, error_of, fsdp2, mlp, show


def defect(rank):
    inner = mlp()
    model = fsdp2(inner[0], inner)
    with torch.no_grad():
        model[0](data(rank))
    return error_of(lambda: model(data(rank)).sum().backward())


show(defect)
