"""FSDP2 that saves model and optimizer with distributed checkpoint after each step, and resumes from there."""

from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.fsdp import fully_shard

FOLDER = Path("checkpoint")


class AppState(Stateful):
    def __init__(self, model, optimizer):
        self.model, self.optimizer, self.step = model, optimizer, 0

    def state_dict(self):
        weights, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": weights, "optimizer": optimizer, "step": torch.tensor(self.step)}

    def load_state_dict(self, state):
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        self.step = int(state["step"])


def batch_of(step, rank, size, rows=16):
    draws = torch.Generator().manual_seed(100 + step)
    inputs, labels = torch.randn(rows, 8, generator=draws), torch.randint(0, 3, (rows,), generator=draws)
    return inputs[rank::size], labels[rank::size]


def main(steps=6):
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, 3))
    fully_shard(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    app = AppState(model, optimizer)
    if FOLDER.exists():
        dcp.load({"app": app}, checkpoint_id=FOLDER)
    for step in range(app.step, steps):
        inputs, labels = batch_of(step, rank, size)
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
        app.step = step + 1
        dcp.save({"app": app}, checkpoint_id=FOLDER)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
