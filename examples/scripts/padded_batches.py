"""Sequences of different lengths, which the collator pads to the longest of a batch; the model masks what was padded."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, DistributedSampler

PAD = 0


def collate(rows):
    tokens = pad_sequence([tokens for tokens, _ in rows], batch_first=True, padding_value=PAD)
    return {"tokens": tokens, "mask": tokens != PAD, "labels": torch.tensor([label for _, label in rows])}


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.mix, self.head = nn.Embedding(30, 8), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, tokens, mask):
        hidden = self.mix(self.embedding(tokens)).tanh() * mask[..., None]
        return self.head(hidden.sum(1) / mask.sum(1, keepdim=True))


dist.init_process_group("gloo")
draw = torch.Generator().manual_seed(1)
lengths = torch.randint(3, 12, (32,), generator=draw).tolist()
rows = [(torch.randint(1, 30, (length,), generator=draw), length % 3) for length in lengths]
torch.manual_seed(0)
model = DistributedDataParallel(Classifier())
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
sampler = DistributedSampler(rows)
loader = DataLoader(rows, batch_size=4, sampler=sampler, collate_fn=collate)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for batch in loader:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(batch["tokens"], batch["mask"]), batch["labels"])
        loss.backward()
        optimizer.step()
dist.destroy_process_group()
