"""FSDP1: a child replaced between wrapping and the first forward is ignored, and the old one is trained."""

import torch
from ranks import data, fsdp1, mean, mlp, off, show
from torch import nn


def defect(rank):
    plain, model = mlp(), fsdp1(mlp())
    for changed in (plain, model.module):
        torch.manual_seed(2)
        changed[0] = nn.Linear(4, 4)
    for one in (plain, model):
        one(data(rank)).sum().backward()
    return off("the new weight's gradient", model.module[0].weight.grad, mean(plain[0].weight.grad))


show(defect)
