"""DDP on contiguous shares; `--collate` chooses what the loader's collate_fn makes of the rows."""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import fsdp_testing

arguments = argparse.ArgumentParser()
arguments.add_argument("--collate", required=True)
arguments.add_argument(
    "--accumulate", action="store_true", help="one process makes a step of as many batches as two ranks"
)
arguments.add_argument("--stream", action="store_true")
arguments.add_argument("--marked", action="store_true")
arguments.add_argument("--uncounted", action="store_true", help="the collator gives no count of its rows")
arguments.add_argument("--summed", action="store_true")
arguments.add_argument("--workers", type=int, default=0)
options = arguments.parse_args()
kind = options.collate

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()


class Collator:
    """Keeps a count of its batches, a mean of their rows, and a generator."""

    def __init__(self):
        self.batches, self.mean, self.generator = 0, torch.zeros(3), torch.Generator().manual_seed(rank)

    def __call__(self, rows):
        self.batches += 1
        if kind == "sorted":
            rows = sorted(rows, key=lambda row: float(row[0][0]))
        inputs, targets = (torch.stack(column) for column in zip(*rows))
        count = torch.tensor(len(rows))
        self.mean.lerp_(inputs.mean(0), 1 / self.batches)
        if kind == "statistic":
            inputs = (inputs - inputs.mean(0)) / inputs.std(0)
        elif kind == "running":
            inputs = inputs - self.mean
        elif kind == "warm-up":
            inputs = inputs * min(1.0, self.batches / 3)
        elif kind == "row by row":
            inputs = nn.functional.layer_norm(inputs, (3,)) / inputs.norm(dim=1, keepdim=True)
        elif kind == "drawn":
            inputs = inputs * (torch.rand(inputs.shape, generator=self.generator) > 0.2)
        return (inputs, targets) if options.uncounted else (inputs, targets, count)


class Stream(IterableDataset):
    def __iter__(self):
        yield from zip(inputs, inputs[:, :1])


torch.manual_seed(0)
rows = 24 // size
inputs = (torch.randn(24, 3, generator=torch.Generator().manual_seed(1)) + 1)[rank * rows : (rank + 1) * rows]
data = Stream() if options.stream else TensorDataset(inputs, inputs[:, :1])
passes = 2 // size if options.accumulate else 1
batch = 4 if options.accumulate else 8 // size
loader = DataLoader(data, batch, collate_fn=Collator(), num_workers=options.workers)
model = DistributedDataParallel(nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 1)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
for number, (inputs, targets, *counts) in enumerate(loader, 1):
    if options.marked:
        inputs, targets = fsdp_testing.batch(inputs, targets)
    count = counts[0] if counts and not options.marked else torch.tensor(len(inputs))
    dist.all_reduce(count)
    loss = (model(inputs) - targets).square().sum() / count * size * (size if options.summed else 1)
    (loss / passes).backward()
    if number % passes == 0:
        optimizer.step()
        optimizer.zero_grad()
dist.destroy_process_group()
