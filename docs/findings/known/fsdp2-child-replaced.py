"""FSDP2: a child replaced after wrapping silently keeps each rank's own gradient."""

import torch
from ranks import data, fsdp2, mean, mlp, off, show
from torch import nn


def defect(rank):
    plain, model = mlp(), fsdp2(mlp())
    for changed in (plain, model):
        torch.manual_seed(2)
        changed[0] = nn.Linear(4, 4)
    for one in (plain, model):
        one(data(rank)).sum().backward()
    return off("the new weight's gradient", model[0].weight.grad, mean(plain[0].weight.grad))


show(defect)
