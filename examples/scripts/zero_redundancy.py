"""DDP with ZeroRedundancyOptimizer, which shards the optimizer's state over the ranks."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel as DDP


def main():
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = DDP(nn.Sequential(*[nn.Linear(12, 12) for _ in range(4)]))
    optimizer = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=torch.optim.Adam, lr=0.01)
    inputs, targets = torch.randn(5, 16, 12), torch.randn(5, 16, 12)
    share = 16 // size
    for x, y in zip(inputs, targets):
        optimizer.zero_grad()
        mine = slice(rank * share, (rank + 1) * share)
        F.mse_loss(model(x[mine]), y[mine]).backward()
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
