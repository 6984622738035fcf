"""Masked language modelling: collate_fn masks tokens at random, the loss is the mean over the masked tokens of all ranks."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler

VOCABULARY, LENGTH, MASK = 16, 10, 0


def masked(rows):
    tokens = torch.stack(rows)
    hidden = torch.rand(tokens.shape) < 0.3
    return torch.where(hidden, MASK, tokens), torch.where(hidden, tokens, -100)


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, 12)
        self.layer = nn.TransformerEncoderLayer(12, 2, 24, dropout=0.1, batch_first=True)
        self.head = nn.Linear(12, VOCABULARY)

    def forward(self, tokens):
        return self.head(self.layer(self.tokens(tokens)))


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    sentences = list(torch.randint(1, VOCABULARY, (48, LENGTH)))
    sampler = DistributedSampler(sentences)
    model = DDP(Encoder())
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    torch.manual_seed(100 + dist.get_rank())
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for tokens, labels in DataLoader(sentences, batch_size=4, sampler=sampler, collate_fn=masked):
            count = (labels != -100).sum()
            dist.all_reduce(count)
            summed = F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten(), reduction="sum")
            optimizer.zero_grad()
            (summed * dist.get_world_size() / count).backward()
            optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
