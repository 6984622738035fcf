"""FSDP2: backward raises if the loss uses a tensor that a unit stored instead of its output."""

from ranks import data, error_of, fsdp2, mlp, show
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
    fsdp2(keeps, nn.Sequential(keeps))(data(rank))
    return error_of(keeps.kept.sum().backward)


show(defect)
