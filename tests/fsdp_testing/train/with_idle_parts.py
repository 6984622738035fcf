"""DDP in which some things do nothing: --idle names them; the training itself is right."""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

arguments = argparse.ArgumentParser()
arguments.add_argument("--idle", default="none")
idle = arguments.parse_args().idle

dist.init_process_group("gloo")
torch.manual_seed(0)
dtype = torch.bfloat16 if idle == "bfloat16" else torch.float32
data = TensorDataset(torch.randn(24, 4).to(dtype), torch.randn(24, 1).to(dtype))
plain = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1)).to(dtype)
if idle == "layer":
    plain.register_module("unused", nn.Linear(2, 2))
    plain.forward = lambda inputs: plain[1](plain[0](inputs))
model = DistributedDataParallel(plain, find_unused_parameters=True)
groups = [{"params": plain[0].parameters(), "lr": 0.1}, {"params": plain[1:].parameters(), "lr": 0.01}]
optimizer = torch.optim.SGD(groups, momentum=0.9)
if idle == "rates":
    for group in optimizer.param_groups:
        group["lr"] = 0.1
schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1) if idle == "schedule" else None
loader = DataLoader(data, batch_size=4, sampler=DistributedSampler(data, shuffle=False))
for inputs, targets in loader:
    outputs = model(inputs)
    loss = nn.functional.mse_loss(outputs, targets)
    if idle == "loss":
        loss = loss - loss.detach()
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(plain.parameters(), 1e4 if idle == "clip" else 1e-2)
    optimizer.step()
dist.destroy_process_group()
