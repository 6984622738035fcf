"""A model whose branch depends on the step: DDP finds parameters that a step does not use."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(8, 8)
        self.even, self.odd = nn.Linear(8, 2), nn.Linear(8, 2)

    def forward(self, inputs, step):
        return (self.odd if step % 2 else self.even)(self.stem(inputs).relu())


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(48, 8), torch.randn(48, 2))
    sampler = DistributedSampler(data)
    model = DDP(Branches(), find_unused_parameters=True)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    step = 0
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for inputs, targets in DataLoader(data, batch_size=6, sampler=sampler):
            optimizer.zero_grad()
            F.mse_loss(model(inputs, step), targets).backward()
            optimizer.step()
            step += 1
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
