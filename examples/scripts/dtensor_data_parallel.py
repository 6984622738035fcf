"""Data parallelism by DTensor alone: weights are replicated, rows are sharded, gradients are Partial until redistributed."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_module
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    data = TensorDataset(torch.randn(64, 8), torch.randn(64, 2))
    sampler = DistributedSampler(data)
    model = distribute_module(nn.Sequential(nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 2)), mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=False)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for inputs, targets in DataLoader(data, batch_size=8, sampler=sampler):
            inputs, targets = (DTensor.from_local(rows, mesh, [Shard(0)]) for rows in (inputs, targets))
            optimizer.zero_grad()
            outputs = model(inputs)
            # The gradient of a mean over a sharded dimension is that of a sum in torch 2.13.
            loss = F.mse_loss(outputs, targets, reduction="sum") / outputs.numel()
            loss.backward()
            for parameter in model.parameters():
                if any(isinstance(placement, Partial) for placement in parameter.grad.placements):
                    parameter.grad = parameter.grad.redistribute(mesh, [Replicate()])
            optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
