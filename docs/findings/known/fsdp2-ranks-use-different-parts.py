"""FSDP2: if one rank leaves a parameter of a unit unused, the reduction fails because sizes differ."""

from ranks import data, fsdp2, show
from torch import nn


class OneOfTwo(nn.Module):
    def __init__(self, rank):
        super().__init__()
        self.rank, self.always, self.sometimes = rank, nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        y = self.always(x)
        return self.sometimes(y) if self.rank == 0 else y


def defect(rank):
    model = fsdp2(OneOfTwo(rank))
    model(data(rank)).sum().backward()
    return ""


show(defect, dies=True)
