"""Plain DistributedDataParallel with a DistributedSampler, as torch's first tutorial on it."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class RandomData(Dataset):
    def __init__(self, size):
        draws = torch.Generator().manual_seed(7)
        self.rows = [(torch.rand(10, generator=draws), torch.rand(1, generator=draws)) for _ in range(size)]

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return self.rows[index]


class Trainer:
    def __init__(self, model, loader, optimizer):
        self.model = DDP(model)
        self.loader = loader
        self.optimizer = optimizer

    def run_batch(self, source, targets):
        self.optimizer.zero_grad()
        loss = F.mse_loss(self.model(source), targets)
        loss.backward()
        self.optimizer.step()

    def run_epoch(self, epoch):
        self.loader.sampler.set_epoch(epoch)
        for source, targets in self.loader:
            self.run_batch(source, targets)

    def train(self, epochs):
        for epoch in range(epochs):
            self.run_epoch(epoch)


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    data = RandomData(32)
    model = nn.Sequential(nn.Linear(10, 8), nn.ReLU(), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    loader = DataLoader(data, batch_size=8, shuffle=False, sampler=DistributedSampler(data))
    Trainer(model, loader, optimizer).train(epochs=3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
