"""Two losses with a forward and backward pass each; DDP reduces in the second."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class TwoHeads(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.classes, self.values = nn.Linear(8, 12), nn.Linear(12, 3), nn.Linear(12, 1)

    def forward(self, inputs):
        hidden = self.stem(inputs).relu()
        return self.classes(hidden), self.values(hidden)


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(64, 8), torch.randint(0, 3, (64,)), torch.randn(64, 1))
    sampler = DistributedSampler(data)
    model = DDP(TwoHeads(), find_unused_parameters=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for inputs, labels, values in DataLoader(data, batch_size=8, sampler=sampler):
            optimizer.zero_grad()
            with model.no_sync():
                F.cross_entropy(model(inputs)[0], labels).backward()
            (0.5 * F.mse_loss(model(inputs)[1], values)).backward()
            optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
