"""A training script as torchrun starts it; its argument names what goes wrong on several ranks."""

import os
import signal
import sys
import threading

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

situation = sys.argv[1]
dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(7)
draw = torch.Generator().manual_seed(1)
rows, targets = (torch.randn(16, width, generator=draw, dtype=torch.float64) for width in (5, 1))
data = TensorDataset(rows, targets)
loader = DataLoader(data, batch_size=4, sampler=DistributedSampler(data))
model = DistributedDataParallel(nn.Linear(5, 1).double())
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
for inputs, wanted in loader:
    if situation == "nothing was asked":
        break
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(inputs), wanted)
    loss.backward()
    if situation == "wrong number" and size > 1:
        for parameter in model.parameters():
            parameter.grad.mul_(2)
    if situation == "ranks disagree" and rank == 1:
        for parameter in model.parameters():
            parameter.grad.add_(1)
    if situation == "raised on all" and size > 1:
        raise ValueError("nobody can go on")
    if situation == "raised on one rank" and rank == 1:
        raise ValueError("rank 1 cannot go on")
    if situation == "a rank died early" and rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if situation == "hung always" and rank == 1:
        threading.Event().wait()
    if situation == "undecidable":
        with torch.no_grad():
            model.module.weight.mul_(1 + os.urandom(1)[0])
    optimizer.step()
if situation == "died after its last report" and rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
dist.destroy_process_group()
