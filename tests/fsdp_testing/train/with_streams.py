"""A gradient that is reduced by hand on a stream of its own, or by DDP, which makes none."""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

how = sys.argv[1]
dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1)).double()
if how == "ddp":
    model = nn.parallel.DistributedDataParallel(model)
elif how == "fsdp2":
    fully_shard(model, mesh=dist.init_device_mesh("cpu", (size,)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
rows = torch.randn(3, 6, 4, dtype=torch.float64)
main, side = torch.cpu.current_stream(), torch.cpu.Stream()
if how == "raises when recorded" and type(side).__module__.startswith("fsdp_testing"):
    raise ValueError("an operator that nobody can record")
for step in range(3):
    model(rows[step][rank::size]).square().mean().backward()
    if how not in ("ddp", "fsdp2"):
        if how != "reduces before computed":
            side.wait_stream(main)
        with torch.cpu.stream(side):
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
                parameter.grad.div_(size)
        if how != "steps before reduced":
            main.wait_stream(side)
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)
