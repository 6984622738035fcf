"""DDP on sequences of different lengths: the loss and its log are means over the tokens of all ranks."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, DistributedSampler

PADDING = -100


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(30, 12)
        self.rnn = nn.GRU(12, 12, batch_first=True)
        self.tags = nn.Linear(12, 7)

    def forward(self, tokens):
        return self.tags(self.rnn(self.tokens(tokens))[0])


def sentences(count):
    draws = torch.Generator().manual_seed(2)
    for _ in range(count):
        length = int(torch.randint(2, 9, (1,), generator=draws))
        yield torch.randint(0, 30, (length,), generator=draws), torch.randint(0, 7, (length,), generator=draws)


def collate(pairs):
    tokens, tags = zip(*pairs)
    tokens = pad_sequence(list(tokens), batch_first=True)
    tags = pad_sequence(list(tags), batch_first=True, padding_value=PADDING)
    wide = (0, 8 - tokens.shape[1])
    return F.pad(tokens, wide), F.pad(tags, wide, value=PADDING)


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    data = list(sentences(40))
    sampler = DistributedSampler(data, shuffle=False)
    loader = DataLoader(data, batch_size=5, sampler=sampler, collate_fn=collate)
    model = DistributedDataParallel(Tagger())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.05)
    for tokens, tags in loader:
        logits = model(tokens)
        count = (tags != PADDING).sum()
        dist.all_reduce(count)
        summed = F.cross_entropy(logits.flatten(0, 1), tags.flatten(), ignore_index=PADDING, reduction="sum")
        loss = summed * dist.get_world_size() / count
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        logged = summed.detach() / count
        dist.all_reduce(logged)
        if dist.get_rank() == 0:
            print(f"loss {logged.item():.4f} of {int(count)} tokens")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
