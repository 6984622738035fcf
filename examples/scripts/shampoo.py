"""Shampoo by hand: each rank keeps the statistics of its own parameters, makes their updates and broadcasts them."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def inverse_root(matrix, power):
    values, vectors = torch.linalg.eigh(matrix + 1e-4 * torch.eye(len(matrix)))
    return vectors @ torch.diag(values.clamp_min(1e-6) ** (-1 / power)) @ vectors.T


class Shampoo(torch.optim.Optimizer):
    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self):
        rank, size = dist.get_rank(), dist.get_world_size()
        for group in self.param_groups:
            updates = []
            for number, param in enumerate(group["params"]):
                update = torch.zeros_like(param)
                if number % size == rank:
                    update.copy_(self.preconditioned(param))
                updates.append((update, number % size))
            for param, (update, owner) in zip(group["params"], updates):
                dist.broadcast(update, owner)
                param.sub_(group["lr"] * update)

    def preconditioned(self, param):
        if param.dim() < 2:
            return param.grad
        state = self.state[param]
        if not state:
            state["left"], state["right"] = torch.eye(param.shape[0]), torch.eye(param.shape[1])
        state["left"].add_(param.grad @ param.grad.T)
        state["right"].add_(param.grad.T @ param.grad)
        return inverse_root(state["left"], 4) @ param.grad @ inverse_root(state["right"], 4)


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(64, 8), torch.randn(64, 3))
    loader = DataLoader(data, batch_size=8, sampler=DistributedSampler(data, shuffle=False))
    model = DDP(nn.Sequential(nn.Linear(8, 10), nn.Tanh(), nn.Linear(10, 3)))
    optimizer = Shampoo(model.parameters(), lr=0.05)
    for inputs, targets in loader:
        optimizer.zero_grad()
        F.mse_loss(model(inputs), targets).backward()
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
