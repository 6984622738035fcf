"""Cross entropy with class weights: the sum of the weights is taken over the rows of all ranks."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(64, 8), torch.randint(0, 3, (64,)))
    weights = torch.tensor([1.0, 4.0, 0.5])
    sampler = DistributedSampler(data)
    model = DDP(nn.Sequential(nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, 3)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for inputs, labels in DataLoader(data, batch_size=8, sampler=sampler):
            total = weights[labels].sum()
            dist.all_reduce(total)
            summed = F.cross_entropy(model(inputs), labels, weight=weights, reduction="sum")
            loss = summed * dist.get_world_size() / total
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
