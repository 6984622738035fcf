"""Column- and row-parallel layers written by hand with plain tensors, as in Megatron; all ranks see all rows."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn


class CopyToRanks(torch.autograd.Function):
    """Nothing in forward; the gradients of all ranks are added up in backward."""

    @staticmethod
    def forward(ctx, inputs):
        return inputs.clone()

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.contiguous().clone()
        dist.all_reduce(gradient)
        return gradient


class AddUpRanks(torch.autograd.Function):
    """The outputs of all ranks are added up in forward; nothing in backward."""

    @staticmethod
    def forward(ctx, inputs):
        total = inputs.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx, gradient):
        return gradient


class ColumnParallelLinear(nn.Module):
    def __init__(self, inputs, outputs):
        super().__init__()
        whole = torch.randn(outputs, inputs) / inputs**0.5
        self.weight = nn.Parameter(whole.chunk(dist.get_world_size())[dist.get_rank()].clone())
        self.bias = nn.Parameter(torch.zeros(outputs // dist.get_world_size()))

    def forward(self, inputs):
        return F.linear(CopyToRanks.apply(inputs), self.weight, self.bias)


class RowParallelLinear(nn.Module):
    def __init__(self, inputs, outputs):
        super().__init__()
        whole = torch.randn(outputs, inputs) / inputs**0.5
        self.weight = nn.Parameter(whole.chunk(dist.get_world_size(), dim=1)[dist.get_rank()].clone())
        self.bias = nn.Parameter(torch.zeros(outputs))

    def forward(self, inputs):
        return AddUpRanks.apply(F.linear(inputs, self.weight)) + self.bias


class Mlp(nn.Module):
    def __init__(self, width=12):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = ColumnParallelLinear(width, 4 * width)
        self.down = RowParallelLinear(4 * width, width)

    def forward(self, hidden):
        return hidden + self.down(F.gelu(self.up(self.norm(hidden))))


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.Sequential(Mlp(), Mlp(), nn.Linear(12, 3))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    data = torch.Generator().manual_seed(1)
    for _ in range(5):
        inputs, labels = torch.randn(8, 12, generator=data), torch.randint(0, 3, (8,), generator=data)
        loss = F.cross_entropy(model(inputs), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
