"""DDP on documents packed into one row per batch, with positions that restart; the loss counts all tokens."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler

VOCABULARY, WIDTH, LONGEST = 24, 12, 10


class PackedModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.places = nn.Embedding(LONGEST, WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, input_ids, position_ids):
        hidden = self.tokens(input_ids) + self.places(position_ids)
        q, k, v = self.qkv(hidden).chunk(3, dim=-1)
        document = (position_ids == 0).cumsum(-1)
        same = document.unsqueeze(-1) == document.unsqueeze(-2)
        mask = same & torch.ones_like(same).tril()
        return self.head(hidden + F.scaled_dot_product_attention(q, k, v, attn_mask=mask))


def documents(count):
    draws = torch.Generator().manual_seed(9)
    for _ in range(count):
        length = int(torch.randint(3, LONGEST, (1,), generator=draws))
        yield torch.randint(0, VOCABULARY, (length,), generator=draws)


def pack(documents):
    input_ids = torch.cat(documents).unsqueeze(0)
    position_ids = torch.cat([torch.arange(len(document)) for document in documents]).unsqueeze(0)
    labels = torch.cat([torch.cat([document[1:], torch.tensor([-100])]) for document in documents]).unsqueeze(0)
    return {"input_ids": input_ids, "position_ids": position_ids, "labels": labels}


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    data = list(documents(48))
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=4, sampler=sampler, collate_fn=pack)
    model = DDP(PackedModel())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for batch in loader:
            logits = model(batch["input_ids"], batch["position_ids"])
            count = (batch["labels"] != -100).sum()
            dist.all_reduce(count)
            summed = F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), reduction="sum")
            loss = summed * dist.get_world_size() / count
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
