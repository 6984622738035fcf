"""L-BFGS, which calls a closure several times in each step."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def main():
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    inputs, targets = torch.randn(24, 5), torch.randn(24, 1)
    inputs, targets = inputs[rank::size], targets[rank::size]
    model = DDP(nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 1)))
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=4)

    def closure():
        optimizer.zero_grad()
        loss = F.mse_loss(model(inputs), targets)
        loss.backward()
        loss = loss.detach()
        dist.all_reduce(loss)
        return loss / size

    for _ in range(5):
        optimizer.step(closure)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
