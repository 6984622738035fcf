"""FSDP1: backward raises if the loss uses a tensor that a unit stored instead of its output."""

from ranks import data, error_of, fsdp1, mlp, show
from torch import nn


class Keeps(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = mlp()

    def forward(self, x):
        self.kept = self.inner(x)
        return self.kept.detach()


def defect(rank):
    keeps = Keeps()
    model = fsdp1(nn.Sequential(fsdp1(keeps)))
    model(data(rank))
    return error_of(keeps.kept.sum().backward)


show(defect)
