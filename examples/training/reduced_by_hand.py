"""No wrapper: gradients are all-reduced in one flat buffer, then clipped; ends once the loss of all ranks is low."""

import os

import torch
import torch.distributed as dist
from torch import nn

RANK, WORLD_SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def average_gradients(parameters):
    flat = torch.cat([p.grad.reshape(-1) for p in parameters])
    dist.all_reduce(flat)
    flat /= WORLD_SIZE
    at = 0
    for p in parameters:
        p.grad.copy_(flat[at : at + p.numel()].view_as(p))
        at += p.numel()


def main():
    dist.init_process_group("gloo", rank=RANK, world_size=WORLD_SIZE)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    parameters = list(model.parameters())
    optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
    everything = torch.randn(120, 8)
    wanted = everything.sum(1, keepdim=True).sin()
    for step in range(10):
        batch = torch.arange(12 * step, 12 * step + 12)[RANK::WORLD_SIZE]
        loss = (model(everything[batch]) - wanted[batch]).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        average_gradients(parameters)
        norm = nn.utils.clip_grad_norm_(parameters, 0.5)
        if not torch.isfinite(norm):
            continue
        optimizer.step()
        whole = loss.detach().clone()
        dist.all_reduce(whole)
        whole /= WORLD_SIZE
        if RANK == 0:
            print(f"step {step}: loss {whole.item():.4f}, norm {norm.item():.4f}")
        if whole < 0.1:
            break
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
