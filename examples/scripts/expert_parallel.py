"""Expert parallelism: each rank holds its experts, and tokens travel to them and back by all-to-all."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

EXPERTS, WIDTH, CAPACITY = 4, 8, 12


class AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows):
        received = torch.empty_like(rows)
        dist.all_to_all_single(received, rows.contiguous())
        return received

    @staticmethod
    def backward(ctx, gradient):
        return AllToAll.apply(gradient)


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        rank, self.size = dist.get_rank(), dist.get_world_size()
        every = [nn.Sequential(nn.Linear(WIDTH, 12), nn.GELU(), nn.Linear(12, WIDTH)) for _ in range(EXPERTS)]
        self.local = EXPERTS // self.size
        self.experts = nn.ModuleList(every[rank * self.local : (rank + 1) * self.local])

    def forward(self, slots):
        """Slots are (experts, capacity, width): those of this rank's tokens for each of all experts."""
        received = AllToAll.apply(slots).view(self.size, self.local, CAPACITY, WIDTH)
        outputs = [expert(received[:, number]) for number, expert in enumerate(self.experts)]
        return AllToAll.apply(torch.stack(outputs, 1).view(EXPERTS, CAPACITY, WIDTH))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.router, self.experts, self.head = nn.Linear(WIDTH, EXPERTS), Experts(), nn.Linear(WIDTH, 3)

    def forward(self, tokens):
        weight, choice = self.router(tokens).softmax(-1).max(-1)
        slots = tokens.new_zeros(EXPERTS, CAPACITY, WIDTH)
        place = (F.one_hot(choice, EXPERTS).cumsum(0) - 1).gather(1, choice[:, None]).squeeze(1)
        outputs = self.experts(slots.index_put((choice, place), tokens))
        return self.head(tokens + weight[:, None] * outputs[choice, place])


def main():
    dist.init_process_group("gloo")
    size = dist.get_world_size()
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(60, WIDTH), torch.randint(0, 3, (60,)))
    model = Model()
    sampler = DistributedSampler(data)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for tokens, labels in DataLoader(data, batch_size=12 // size, sampler=sampler):
            optimizer.zero_grad()
            F.cross_entropy(model(tokens), labels).backward()
            for name, parameter in model.named_parameters():
                if "experts" not in name:
                    dist.all_reduce(parameter.grad)
                parameter.grad /= size
            optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
