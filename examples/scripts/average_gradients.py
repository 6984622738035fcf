"""No wrapper at all: data are partitioned by hand, and gradients averaged by all-reduce before they are clipped."""

import random

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Subset, TensorDataset


class DataPartitioner:
    """Gives each rank a part of the rows, in an order that all ranks draw alike."""

    def __init__(self, data, size, seed=1234):
        self.data = data
        indices = list(range(len(data)))
        random.Random(seed).shuffle(indices)
        length = len(data) // size
        self.parts = [indices[start : start + length] for start in range(0, length * size, length)]

    def use(self, part):
        return Subset(self.data, self.parts[part])


def average_gradients(model):
    size = float(dist.get_world_size())
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad, op=dist.ReduceOp.SUM)
        parameter.grad /= size


def run(rank, size):
    torch.manual_seed(1234)
    data = TensorDataset(torch.randn(48, 10), torch.randint(0, 4, (48,)))
    part = DataPartitioner(data, size).use(rank)
    train_set = DataLoader(part, batch_size=24 // size, shuffle=True)
    model = nn.Sequential(nn.Linear(10, 20), nn.ReLU(), nn.Linear(20, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.5)
    for _ in range(3):
        for inputs, labels in train_set:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(inputs), labels)
            loss.backward()
            average_gradients(model)
            nn.utils.clip_grad_norm_(model.parameters(), 0.3)
            optimizer.step()


if __name__ == "__main__":
    dist.init_process_group("gloo")
    run(dist.get_rank(), dist.get_world_size())
    dist.destroy_process_group()
