"""FSDP2 over a mesh's data axis and tensor parallelism over the other."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, inputs):
        return inputs + self.down(F.gelu(self.up(self.norm(inputs))))


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    size = dist.get_world_size()
    parts = 2 if size % 2 == 0 else 1
    mesh = init_device_mesh("cpu", (size // parts, parts), mesh_dim_names=("dp", "tp"))
    data = TensorDataset(torch.randn(48, 8), torch.randn(48, 2))
    sampler = DistributedSampler(data, mesh["dp"].size(), mesh["dp"].get_local_rank())
    model = nn.Sequential(Block(), Block(), nn.Linear(8, 2))
    for block in model[:2]:
        parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        fully_shard(block, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for inputs, targets in DataLoader(data, batch_size=6, sampler=sampler):
            optimizer.zero_grad()
            F.mse_loss(model(inputs), targets).backward()
            optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
