"""A generator against a discriminator, each in DDP with its own optimizer, stepped alternately."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    real, noise = torch.randn(64, 6), torch.randn(64, 4)
    data = TensorDataset(real, noise)
    sampler = DistributedSampler(data)
    generator = DDP(nn.Sequential(nn.Linear(4, 10), nn.LeakyReLU(0.2), nn.Linear(10, 6)))
    discriminator = DDP(nn.Sequential(nn.Linear(6, 10), nn.LeakyReLU(0.2), nn.Linear(10, 1)), broadcast_buffers=False)
    optimizer_g = torch.optim.Adam(generator.parameters(), lr=2e-3, betas=(0.5, 0.999))
    optimizer_d = torch.optim.Adam(discriminator.parameters(), lr=2e-3, betas=(0.5, 0.999))
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for rows, noise in DataLoader(data, batch_size=8, sampler=sampler):
            ones, zeros = torch.ones(len(rows), 1), torch.zeros(len(rows), 1)
            fake = generator(noise)

            optimizer_d.zero_grad()
            logits = discriminator(torch.cat([rows, fake.detach()]))
            F.binary_cross_entropy_with_logits(logits, torch.cat([ones, zeros])).backward()
            optimizer_d.step()

            optimizer_g.zero_grad()
            F.binary_cross_entropy_with_logits(discriminator(fake), ones).backward()
            optimizer_g.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
