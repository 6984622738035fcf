"""Micro-batches with different numbers of tokens: each loss is divided by the tokens of the whole step."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler

VOCABULARY, LENGTH, ACCUMULATION, IGNORED = 18, 9, 2, -100


class LanguageModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, 12)
        self.rnn = nn.GRU(12, 12, batch_first=True)
        self.head = nn.Linear(12, VOCABULARY)

    def forward(self, tokens):
        return self.head(self.rnn(self.tokens(tokens))[0])


def answers(count):
    draws = torch.Generator().manual_seed(4)
    for _ in range(count):
        tokens = torch.randint(0, VOCABULARY, (LENGTH + 1,), generator=draws)
        labels = tokens[1:].clone()
        labels[: int(torch.randint(1, LENGTH, (1,), generator=draws))] = IGNORED  # the question is not learned
        yield tokens[:-1], labels


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    data = list(answers(64))
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=4, sampler=sampler)
    model = DDP(LanguageModel())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        batches = iter(loader)
        for micro_batches in zip(*[batches] * ACCUMULATION):
            tokens = sum((labels != IGNORED).sum() for _, labels in micro_batches)
            dist.all_reduce(tokens)
            for number, (inputs, labels) in enumerate(micro_batches):
                model.require_backward_grad_sync = number == ACCUMULATION - 1
                logits = model(inputs).flatten(0, 1)
                summed = F.cross_entropy(logits, labels.flatten(), ignore_index=IGNORED, reduction="sum")
                # DDP takes the mean over ranks, and the sum is due.
                (summed * dist.get_world_size() / tokens).backward()
            optimizer.step()
            optimizer.zero_grad()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
