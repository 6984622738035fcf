"""The reference implementation: fully_shard of fsdp_ref, clipped by the norm of all shards."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from fsdp_ref import clip_grad_norm_, fully_shard


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(64, 8), torch.randint(0, 3, (64,)))
    sampler = DistributedSampler(data)
    model = nn.Sequential(nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, 12), nn.ReLU(), nn.Linear(12, 3))
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for inputs, labels in DataLoader(data, batch_size=8, sampler=sampler):
            optimizer.zero_grad()
            F.cross_entropy(model(inputs), labels).backward()
            clip_grad_norm_(model, 0.5)
            optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
