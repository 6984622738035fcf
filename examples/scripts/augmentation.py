"""DDP on images that are flipped and shifted at random when the dataset is asked for them."""

import random

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Images(Dataset):
    def __init__(self, count):
        draws = torch.Generator().manual_seed(3)
        self.images = torch.rand(count, 1, 8, 8, generator=draws)
        self.labels = torch.randint(0, 3, (count,), generator=draws)

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        image = self.images[index]
        if torch.rand(1) < 0.5:
            image = image.flip(-1)
        image = image.roll(random.randint(-1, 1), dims=-2)
        return image, self.labels[index]


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    random.seed(0)
    data = Images(48)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=6, sampler=sampler)
    model = DDP(nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 3)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for images, labels in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(images), labels).backward()
            optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
