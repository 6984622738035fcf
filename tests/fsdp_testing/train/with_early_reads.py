"""A script that averages its gradients in buckets, and may read a result too early."""

import argparse

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--mistake", default="")
mistake = parser.parse_args().mistake

torch.set_default_dtype(torch.float64)
dist.init_process_group()
size = dist.get_world_size()
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Tanh(), torch.nn.Linear(6, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=1e300 if mistake == "diverges" else 0.1)
data = TensorDataset(torch.randn(48, 4), torch.randn(48, 2))
for inputs, targets in DataLoader(data, batch_size=12 // size, sampler=DistributedSampler(data, shuffle=False)):
    optimizer.zero_grad()
    torch.nn.functional.mse_loss(model(inputs), targets).backward()
    for bucket in (model[2].parameters(), model[0].parameters()):
        bucket = list(bucket)
        flat = torch.cat([parameter.grad.flatten() for parameter in bucket]) / size
        work = dist.all_reduce(flat, async_op=True)
        early = mistake == "no wait" or (mistake == "no wait on ranks" and size > 1)
        if not early or bucket[0] is not model[2].weight:
            work.wait()
        parts = flat.split([parameter.numel() for parameter in bucket])
        for parameter, part in zip(bucket, parts):
            parameter.grad.copy_(part.view_as(parameter))
    optimizer.step()
dist.destroy_process_group()
