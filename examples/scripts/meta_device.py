"""FSDP2 on a model made on the meta device: sharded first, then given memory and its first weights."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
        self.output = nn.Linear(16, 4)

    def init_weights(self):
        for layer in (*self.layers, self.output):
            nn.init.trunc_normal_(layer.weight, std=0.1)
            nn.init.zeros_(layer.bias)

    def forward(self, hidden):
        for layer in self.layers:
            hidden = hidden + F.silu(layer(hidden))
        return self.output(hidden)


def main():
    dist.init_process_group("gloo")
    draws = torch.Generator().manual_seed(1)
    data = TensorDataset(torch.randn(64, 16, generator=draws), torch.randint(0, 4, (64,), generator=draws))
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=8, sampler=sampler)
    with torch.device("meta"):
        model = Net()
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    model.to_empty(device="cpu")
    torch.manual_seed(0)
    model.init_weights()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for inputs, labels in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(inputs), labels).backward()
            optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
