"""A compiled model in DDP, its forward and backward captured as graphs."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(64, 12), torch.randint(0, 4, (64,)))
    sampler = DistributedSampler(data)
    model = nn.Sequential(nn.Linear(12, 16), nn.LayerNorm(16), nn.SiLU(), nn.Linear(16, 4))
    model = DDP(torch.compile(model, backend="aot_eager"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for inputs, labels in DataLoader(data, batch_size=8, sampler=sampler):
            F.cross_entropy(model(inputs), labels).backward()
            optimizer.step()
            optimizer.zero_grad()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
