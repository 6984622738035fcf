"""DDP whose batches are objects of the script's classes: --batch says which, --data who makes them, --wrong sums over ranks."""

import argparse
import enum
from collections import namedtuple
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import fsdp_testing

arguments = argparse.ArgumentParser()
arguments.add_argument("--batch", default="dataclass")
arguments.add_argument("--data", default="loader")
arguments.add_argument("--tagged", action="store_true")
arguments.add_argument("--wrong", action="store_true")
options = arguments.parse_args()


@dataclass
class Record:
    x: torch.Tensor
    y: torch.Tensor


@dataclass(slots=True, frozen=True)
class Slotted:
    x: torch.Tensor
    y: torch.Tensor


class Plain:
    def __init__(self, x, y):
        self.x, self.y = x, y


class Slots:
    __slots__ = ("x", "y")

    def __init__(self, x, y):
        self.x, self.y = x, y


class Items(dict):
    """A dictionary whose items are attributes too, as libraries of models have them."""

    def __init__(self, x, y):
        super().__init__(x=x, y=y)

    x = property(lambda self: self["x"])
    y = property(lambda self: self["y"])


class Nested:
    """Its inner object names it."""

    def __init__(self, x, y):
        self.inner = Plain(x, y)
        self.inner.outer = self

    x = property(lambda self: self.inner.x)
    y = property(lambda self: self.inner.y)


Named = namedtuple("Named", ("x", "y"))
KINDS = {
    "dataclass": Record,
    "slotted": Slotted,
    "named": Named,
    "plain": Plain,
    "slots": Slots,
    "items": Items,
    "nested": Nested,
}


class Tagged(torch.Tensor):
    """A tensor of the script's own class."""


class Mode(float, enum.Enum):
    TRAINING = 1.0


class Rows(Dataset):
    def __len__(self):
        return 36

    def __getitem__(self, index):
        numbers = torch.randn(5, generator=torch.Generator().manual_seed(index))
        return KINDS[options.batch](numbers[:4], numbers[4:])


def collate(rows):
    x, y = torch.stack([row.x for row in rows]), torch.stack([row.y for row in rows])
    return KINDS[options.batch](x.as_subclass(Tagged) if options.tagged else x, y)


class Trainer:
    def __init__(self, model, optimizer):
        self.model, self.optimizer, self.steps, self.history = model, optimizer, 0, {"losses": [lambda: 0]}


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, batch, mode=Mode.TRAINING, activation=None, trainer=None):
        assert trainer is None or trainer.model.module is self
        batch = Record(**batch) if isinstance(batch, dict) else batch
        output = self.layers(batch.x)
        output = output if activation is None else activation(output)
        return (output - batch.y).square().mean() * mode.value


dist.init_process_group("gloo")
torch.manual_seed(0)
plain = Model()
if options.tagged:
    for layer in (plain.layers[0], plain.layers[2]):
        layer.weight = nn.Parameter(layer.weight.detach().as_subclass(Tagged))
model = DistributedDataParallel(plain)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
trainer = Trainer(model, optimizer)
size, rows = dist.get_world_size(), Rows()
if options.data == "loader":
    sampler = DistributedSampler(rows, shuffle=False)
    batches = DataLoader(rows, batch_size=12 // size, sampler=sampler, collate_fn=collate)
else:
    own = [[rows[place] for place in range(begin + dist.get_rank(), begin + 12, size)] for begin in (0, 12, 24)]
    batches = [collate(each) for each in own]
for batch in batches:
    if options.data == "marked":
        batch = fsdp_testing.batch(batch)
    optimizer.zero_grad()
    loss = model(batch, Mode.TRAINING, activation=lambda output: output * 0.5, trainer=trainer)
    if options.wrong:
        loss = loss * size
    loss.backward()
    optimizer.step()
dist.destroy_process_group()
