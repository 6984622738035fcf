"""fsdp_ref's wrapper around each block; each rank takes its slice of one global batch."""

import torch
import torch.distributed as dist
from torch import nn

from fsdp_ref import FullyShardedDataParallel

GLOBAL_BATCH = 12

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
blocks = [FullyShardedDataParallel(nn.Sequential(nn.Linear(10, 10), nn.Tanh())) for _ in range(3)]
model = FullyShardedDataParallel(nn.Sequential(*blocks, nn.Linear(10, 3)))
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=5)
draws = torch.Generator().manual_seed(5)
for _ in range(5):
    inputs = torch.randn(GLOBAL_BATCH, 10, generator=draws)
    targets = torch.randn(GLOBAL_BATCH, 3, generator=draws)
    mine = slice(rank * GLOBAL_BATCH // size, (rank + 1) * GLOBAL_BATCH // size)
    loss = nn.functional.mse_loss(model(inputs[mine]), targets[mine])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    scheduler.step()
dist.destroy_process_group()
