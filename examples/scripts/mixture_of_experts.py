"""DDP on a mixture of experts: the balancing loss uses the share of tokens that each expert has on all ranks."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

EXPERTS, WIDTH = 4, 10


class MixtureOfExperts(nn.Module):
    def __init__(self):
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 16), nn.GELU(), nn.Linear(16, WIDTH)) for _ in range(EXPERTS)
        )

    def forward(self, tokens):
        probabilities = self.router(tokens).softmax(-1)
        weight, choice = probabilities.max(-1)
        outputs = torch.stack([expert(tokens) for expert in self.experts], dim=1)
        chosen = outputs[torch.arange(len(tokens)), choice]
        share = F.one_hot(choice, EXPERTS).float().mean(0)
        dist.all_reduce(share)
        share /= dist.get_world_size()
        balance = EXPERTS * (share * probabilities.mean(0)).sum()
        return tokens + weight.unsqueeze(-1) * chosen, balance


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.moe = MixtureOfExperts()
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, tokens):
        hidden, balance = self.moe(tokens)
        return self.head(hidden), balance


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(96, WIDTH), torch.randint(0, 3, (96,)))
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=12, sampler=sampler)
    model = DDP(Model())
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for tokens, labels in loader:
            logits, balance = model(tokens)
            loss = F.cross_entropy(logits, labels) + 0.1 * balance
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
