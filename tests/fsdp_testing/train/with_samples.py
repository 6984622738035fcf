"""DDP whose batches are lists of samples of several lengths: --kind says which, --wrong sums gradients over ranks."""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

arguments = argparse.ArgumentParser()
arguments.add_argument("--kind", default="texts")
arguments.add_argument("--wrong", action="store_true")
options = arguments.parse_args()


def text(index):
    generator = torch.Generator().manual_seed(index)
    return torch.randint(0, 20, (4 + index % 5,), generator=generator)


class Boxes(Dataset):
    def __len__(self):
        return 24

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        count = 1 + index % 3
        image = torch.randn(3, 4 + index % 2, 4, generator=generator)
        return image, {"boxes": torch.rand(count, 4, generator=generator), "labels": torch.full((count,), index % 3)}


class Reads(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.next = nn.Embedding(20, 6), nn.Linear(6, 20)

    def forward(self, texts):
        losses = [nn.functional.cross_entropy(self.next(self.words(t[:-1]).cumsum(0)), t[1:]) for t in texts]
        return torch.stack(losses).mean()


class Detects(nn.Module):
    def __init__(self):
        super().__init__()
        self.features, self.classes, self.places = nn.Linear(3, 8), nn.Linear(8, 3), nn.Linear(8, 4)

    def forward(self, images, targets):
        losses = []
        for image, target in zip(images, targets):
            hidden = torch.tanh(self.features(image.mean((1, 2))))
            scores = self.classes(hidden).expand(len(target["labels"]), 3)
            losses.append(nn.functional.cross_entropy(scores, target["labels"]))
            losses.append((self.places(hidden) - target["boxes"]).abs().mean())
        return 2 * torch.stack(losses).mean()


dist.init_process_group("gloo")
torch.manual_seed(0)
rank, size = dist.get_rank(), dist.get_world_size()
if options.kind == "texts":
    model = Reads()
    batches = [([text(12 * step + place) for place in range(rank, 12, size)],) for step in range(3)]
else:
    model = Detects()
    sampler = DistributedSampler(Boxes(), shuffle=False)
    batches = DataLoader(Boxes(), 12 // size, sampler=sampler, collate_fn=lambda rows: tuple(zip(*rows)))
model = DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
for batch in batches:
    optimizer.zero_grad()
    loss = model(*batch)
    if options.wrong:
        loss = loss * size
    loss.backward()
    optimizer.step()
dist.destroy_process_group()
