"""FSDP2: backward raises if the caller changes a unit's output in place and the output is a view."""

from ranks import data, error_of, fsdp2, mlp, show
from torch import nn


class Doubled(nn.Module):
    def __init__(self):
        super().__init__()
        self.unit = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Unflatten(1, (2, 2)))
        self.last = mlp(1)

    def forward(self, x):
        y = self.unit(x)
        y += 1
        return self.last(y.flatten(1))


def defect(rank):
    model = Doubled()
    loss = fsdp2(model.unit, model)(data(rank)).sum()
    return error_of(loss.backward)


show(defect)
