"""A recommender: sparse gradients of embeddings are reduced by DDP and stepped by SparseAdam, dense ones by Adam."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Recommender(nn.Module):
    def __init__(self):
        super().__init__()
        self.items = nn.Embedding(30, 6, sparse=True)
        self.score = nn.Sequential(nn.Linear(12, 8), nn.ReLU(), nn.Linear(8, 1))

    def forward(self, pairs):
        return self.score(self.items(pairs).flatten(1))


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    data = TensorDataset(torch.randint(0, 30, (64, 2)), torch.randn(64, 1))
    sampler = DistributedSampler(data)
    model = DDP(Recommender())
    sparse = torch.optim.SparseAdam(model.module.items.parameters(), lr=1e-2)
    dense = torch.optim.Adam(model.module.score.parameters(), lr=1e-2)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for pairs, targets in DataLoader(data, batch_size=8, sampler=sampler):
            sparse.zero_grad()
            dense.zero_grad()
            F.mse_loss(model(pairs), targets).backward()
            sparse.step()
            dense.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
