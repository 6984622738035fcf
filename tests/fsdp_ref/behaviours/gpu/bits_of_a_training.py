"""Prints a digest of losses and parameters of each rank after a training; a program, as settings of a device come before it.

python tests/fsdp_ref/behaviours/gpu/bits_of_a_training.py BACKEND
"""

from __future__ import annotations

import hashlib
import sys

import torch
from torch import nn

from fsdp_ref import fully_shard
from fsdp_testing import current_world, run_ranks


def digest() -> str:
    world = current_world()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Sequential(nn.Linear(8, 8), nn.Tanh()), nn.Linear(8, 3)).to(world.device)
    fully_shard(model[1])
    fully_shard(model)
    optimizer = torch.optim.Adam(model.parameters(), 0.1)
    bits = hashlib.sha256()
    for seed in range(3):
        rows = torch.randn(world.size, 4, 6, generator=torch.Generator().manual_seed(seed))[world.rank]
        loss = model(rows.to(world.device)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        bits.update(loss.detach().cpu().numpy().tobytes())
    for value in model.state_dict().values():
        bits.update(value.cpu().numpy().tobytes())
    return bits.hexdigest()


if __name__ == "__main__":
    print(*run_ranks(digest, size=2, backend=sys.argv[1]))
