"""FSDP1 with an optimizer whose groups are chosen by the shape of parameters, before or after these are sharded.

With `--names` DDP, where there are several ranks, and groups by the beginning of names, which DDP changes.
"""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

import fsdp_testing

parser = argparse.ArgumentParser()
parser.add_argument("--late", action="store_true")
parser.add_argument("--names", action="store_true")
options = parser.parse_args()

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
made = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
matrices = {name for name, parameter in made.named_parameters() if parameter.ndim == 2}
model = FullyShardedDataParallel(made, use_orig_params=True, device_id=torch.device("cpu"))
chosen = {
    name: parameter.ndim == 2 if options.late else name in matrices
    for name, parameter in model.module.named_parameters()
}
named = dict(model.module.named_parameters())
decayed, rest = ([named[name] for name, is_chosen in chosen.items() if is_chosen is wanted] for wanted in (True, False))
groups = [{"params": decayed, "weight_decay": 0.3}, {"params": rest, "weight_decay": 0.0}]
if options.names:
    plain = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
    model = nn.parallel.DistributedDataParallel(plain) if size > 1 else plain
    first = [parameter for name, parameter in model.named_parameters() if name.startswith("0.")]
    rest = [parameter for name, parameter in model.named_parameters() if not name.startswith("0.")]
    groups = [{"params": first, "lr": 0.2}, {"params": rest}][not first :]
optimizer = torch.optim.SGD(groups, lr=0.1)
rows, targets = torch.randn(36, 6), torch.randn(36, 1)
for step in range(3):
    now = slice(step * 12, step * 12 + 12)
    inputs, labels = fsdp_testing.batch(rows[now].chunk(size)[rank], targets[now].chunk(size)[rank])
    optimizer.zero_grad()
    nn.functional.mse_loss(model(inputs), labels).backward()
    optimizer.step()
dist.destroy_process_group()
