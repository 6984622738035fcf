"""FSDP2 around blocks that torch's checkpoint_wrapper wraps: activations are recomputed in backward."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, hidden):
        return hidden + self.down(F.gelu(self.up(self.norm(hidden))))


dist.init_process_group("gloo")
torch.manual_seed(0)
data = TensorDataset(torch.randint(0, 20, (24, 6)), torch.randint(0, 20, (24, 6)))
model = nn.Sequential(nn.Embedding(20, 16), Block(), Block(), nn.Linear(16, 20))
apply_activation_checkpointing(
    model,
    checkpoint_wrapper_fn=lambda module: checkpoint_wrapper(module, checkpoint_impl=CheckpointImpl.NO_REENTRANT),
    check_fn=lambda module: isinstance(module, Block),
)
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
for block in model[1:3]:
    fully_shard(block, mesh=mesh)
fully_shard(model, mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
sampler = DistributedSampler(data)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for tokens, targets in DataLoader(data, batch_size=3, sampler=sampler):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
        loss.backward()
        optimizer.step()
dist.destroy_process_group()
