"""A script that shards an optimizer over one flat vector, and reduces gradients in its step."""

import argparse

import torch
import torch.distributed as dist
from torch import nn


class FlatAdam:
    """Each rank steps its part of all parameters, joined; `rest` says whether the last part holds what is left over."""

    def __init__(self, parameters, rest):
        self.parameters, size = list(parameters), dist.get_world_size()
        self.numel = sum(parameter.numel() for parameter in self.parameters)
        self.each = -(-self.numel // size) if rest else self.numel // size
        self.total = self.each * size
        flat = self.joined(self.parameters)
        self.mine = nn.Parameter(flat[dist.get_rank() * self.each :][: self.each].clone())
        self.inner = torch.optim.Adam([self.mine], lr=0.01)

    def joined(self, tensors):
        flat = torch.cat([tensor.detach().reshape(-1) for tensor in tensors])
        return torch.cat([flat, flat.new_zeros(max(0, self.total - self.numel))])[: self.total]

    @torch.no_grad()
    def step(self):
        self.mine.grad = torch.empty(self.each)
        dist.reduce_scatter_tensor(self.mine.grad, self.joined([p.grad for p in self.parameters]))
        self.mine.grad /= dist.get_world_size()
        self.inner.step()
        whole = torch.empty(self.total)
        dist.all_gather_into_tensor(whole, self.mine.detach())
        before = torch.cat([parameter.reshape(-1) for parameter in self.parameters])
        whole = torch.cat([whole[: self.numel], before[self.total :]])
        for parameter, part in zip(self.parameters, whole.split([p.numel() for p in self.parameters]), strict=True):
            parameter.copy_(part.view_as(parameter))
            parameter.grad = None


def main():
    asked = argparse.ArgumentParser()
    asked.add_argument("--without-rest", action="store_true")
    options = asked.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 1))
    optimizer = FlatAdam(model.parameters(), not options.without_rest)
    x, rank, size = torch.randn(24, 5), dist.get_rank(), dist.get_world_size()
    for step in range(4):
        model(x[6 * step :][:6][rank::size]).square().mean().backward()
        optimizer.step()
    dist.destroy_process_group()


main()
