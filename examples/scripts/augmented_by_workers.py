"""DataLoader workers draw augmentations from torch, numpy and random, seeded as torch's notes say."""

import random

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Signals(Dataset):
    def __init__(self):
        self.signals = torch.rand(24, 16, generator=torch.Generator().manual_seed(1))

    def __len__(self):
        return len(self.signals)

    def __getitem__(self, index):
        signal = self.signals[index].roll(random.randrange(16))
        signal = signal * float(np.random.uniform(0.8, 1.2))  # noqa: NPY002 - as most datasets do
        return signal + 0.01 * torch.randn(16), index % 3


def seed_worker(worker):
    seed = torch.initial_seed() % 2**32
    np.random.seed(seed)  # noqa: NPY002 - as above
    random.seed(seed)


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 3)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    signals = Signals()
    sampler = DistributedSampler(signals)
    loader = DataLoader(
        signals,
        batch_size=3,
        sampler=sampler,
        num_workers=2,
        worker_init_fn=seed_worker,
        generator=torch.Generator().manual_seed(7 + dist.get_rank()),
    )
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for inputs, labels in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(inputs), labels).backward()
            optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
