"""A script that saves its model during the training, makes a new one, and goes on with that."""

import argparse

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--mistake", default="")
mistake = parser.parse_args().mistake

dist.init_process_group()
rank, size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
data = TensorDataset(torch.randn(60, 8), torch.randn(60, 4))


def build():
    torch.manual_seed(1)
    made = torch.nn.Sequential(torch.nn.Linear(8, 24), torch.nn.GELU(), torch.nn.Linear(24, 4))
    model = DistributedDataParallel(made)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


model, optimizer = build()
loader = DataLoader(data, batch_size=12 // size, sampler=DistributedSampler(data, shuffle=False))
for step, (inputs, targets) in enumerate(loader):
    if step == 2:
        if rank == 0:
            torch.save((model.module.state_dict(), optimizer.state_dict()), "last.pt")
        dist.barrier()
        model, optimizer = build()
        weights, state = torch.load("last.pt", weights_only=True)
        model.module.load_state_dict(weights)
        if rank == 0 or mistake != "optimizer of rank 0":
            optimizer.load_state_dict(state)
        if mistake == "summed":
            for parameter in model.parameters():
                dist.all_reduce(parameter.data)
        # No copy of the weights is left, so that one process could be given them.
        del weights, state
    optimizer.zero_grad()
    loss = torch.nn.functional.mse_loss(model(inputs), targets)
    if mistake == "one step earlier" and step == 1:
        loss = loss * size
    loss.backward()
    optimizer.step()
dist.destroy_process_group()
