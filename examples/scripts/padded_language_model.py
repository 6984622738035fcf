"""Sentences of different lengths, padded to the longest of a batch; the loss is the mean over the tokens of all ranks."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset, DistributedSampler

IGNORED = -100


class Sentences(Dataset):
    def __init__(self):
        draw = torch.Generator().manual_seed(1)
        lengths = torch.randint(4, 14, (32,), generator=draw).tolist()
        self.sentences = [torch.randint(1, 30, (length,), generator=draw) for length in lengths]

    def __len__(self):
        return len(self.sentences)

    def __getitem__(self, index):
        return {"tokens": self.sentences[index][:-1], "targets": self.sentences[index][1:], "length": index}


def pad(rows):
    tokens = pad_sequence([row.pop("tokens") for row in rows], batch_first=True)
    targets = pad_sequence([row.pop("targets") for row in rows], batch_first=True, padding_value=IGNORED)
    return tokens, targets


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.mix = nn.Embedding(30, 12), nn.GRU(12, 12, batch_first=True)
        self.head = nn.Linear(12, 30)

    def forward(self, tokens):
        return self.head(self.mix(self.embedding(tokens))[0])


dist.init_process_group("gloo")
torch.manual_seed(0)
model = DistributedDataParallel(Model())
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
sentences = Sentences()
sampler = DistributedSampler(sentences)
loader = DataLoader(sentences, batch_size=4, sampler=sampler, collate_fn=pad)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for tokens, targets in loader:
        count = (targets != IGNORED).sum()
        dist.all_reduce(count)
        logits = model(tokens)
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="sum")
        loss = loss * dist.get_world_size() / count
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
dist.destroy_process_group()
