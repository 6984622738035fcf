"""DDP on sentences that are padded to the longest of their batch; the loss is a mean over sentences."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, DistributedSampler

PADDING = 0


class Sentiment(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(40, 12, padding_idx=PADDING)
        self.classes = nn.Sequential(nn.Linear(12, 12), nn.Tanh(), nn.Linear(12, 2))

    def forward(self, tokens):
        mask = (tokens != PADDING).unsqueeze(-1)
        mean = (self.words(tokens) * mask).sum(1) / mask.sum(1)
        return self.classes(mean)


def sentences(count):
    draws = torch.Generator().manual_seed(5)
    for _ in range(count):
        length = int(torch.randint(3, 15, (1,), generator=draws))
        yield torch.randint(1, 40, (length,), generator=draws), int(torch.randint(0, 2, (1,), generator=draws))


def collate(pairs):
    return pad_sequence([words for words, _ in pairs], batch_first=True), torch.tensor([label for _, label in pairs])


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    data = list(sentences(48))
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=6, sampler=sampler, collate_fn=collate)
    model = DDP(Sentiment())
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for tokens, labels in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(tokens), labels).backward()
            optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
