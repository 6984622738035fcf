"""DDP with two optimizers in each step: SGD for the embedding, AdamW for the rest."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(20, 8)
        self.mlp = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 20))

    def forward(self, tokens):
        return self.mlp(self.embedding(tokens))


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    tokens = torch.randint(0, 20, (64, 7))
    data = TensorDataset(tokens[:, :-1], tokens[:, 1:])
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=8, sampler=sampler)
    model = DDP(Model())
    optimizers = [
        torch.optim.SGD(model.module.embedding.parameters(), lr=0.5, momentum=0.9),
        torch.optim.AdamW(model.module.mlp.parameters(), lr=1e-2),
    ]
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for inputs, targets in loader:
            loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
            loss.backward()
            for optimizer in optimizers:
                optimizer.step()
            for optimizer in optimizers:
                optimizer.zero_grad()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
