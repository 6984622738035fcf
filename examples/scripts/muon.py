"""Muon by hand: ranks share the work of orthogonalising updates and gather the results; AdamW for the rest."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def orthogonalized(gradient, steps=5):
    a, b, c = 3.4445, -4.7750, 2.0315
    x = gradient / (gradient.norm() + 1e-7)
    transposed = x.shape[0] > x.shape[1]
    x = x.T if transposed else x
    for _ in range(steps):
        product = x @ x.T
        x = a * x + (b * product + c * product @ product) @ x
    return x.T if transposed else x


class Muon(torch.optim.Optimizer):
    def __init__(self, params, lr=0.02, momentum=0.95):
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self):
        rank, size = dist.get_rank(), dist.get_world_size()
        for group in self.param_groups:
            params = group["params"]
            padded = params + [torch.zeros_like(params[-1])] * (-len(params) % size)
            for base in range(0, len(params), size):
                if base + rank < len(params):
                    param = params[base + rank]
                    state = self.state[param]
                    if not state:
                        state["momentum_buffer"] = torch.zeros_like(param)
                    buffer = state["momentum_buffer"]
                    buffer.lerp_(param.grad, 1 - group["momentum"])
                    update = orthogonalized(param.grad.lerp(buffer, group["momentum"]))
                    param.add_(update, alpha=-group["lr"])
                dist.all_gather([each.data for each in padded[base : base + size]], padded[base + rank].data)


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(64, 12), torch.randint(0, 5, (64,)))
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=8, sampler=sampler)
    model = DDP(
        nn.Sequential(nn.Linear(12, 12), nn.ReLU(), nn.Linear(12, 12), nn.ReLU(), nn.Linear(12, 12), nn.Linear(12, 5))
    )
    matrices = [p for p in model.parameters() if p.shape == (12, 12)]
    rest = [p for p in model.parameters() if p.shape != (12, 12)]
    optimizers = [Muon(matrices), torch.optim.AdamW(rest, lr=1e-2)]
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for inputs, labels in loader:
            F.cross_entropy(model(inputs), labels).backward()
            for optimizer in optimizers:
                optimizer.step()
            model.zero_grad()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
