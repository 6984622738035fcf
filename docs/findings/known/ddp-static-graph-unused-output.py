"""DDP with `static_graph`: an output that no loss uses makes a later iteration raise."""

from ranks import data, error_of, show
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        return self.first(x), self.second(x)


def defect(rank):
    model = DistributedDataParallel(Two(), static_graph=True)

    def iterations():
        for seed in range(4):
            model(data(rank, seed))[0].sum().backward()
            model.zero_grad()

    return error_of(iterations)


show(defect)
