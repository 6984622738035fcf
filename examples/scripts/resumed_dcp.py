"""FSDP2 with a checkpoint of torch.distributed.checkpoint after each step, from which it goes on."""

from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

FOLDER = "checkpoint"


class AppState(Stateful):
    """Model, optimizer and progress, as the tutorial of torch.distributed.checkpoint keeps them."""

    def __init__(self, model, optimizer):
        self.model, self.optimizer, self.step = model, optimizer, 0

    def state_dict(self):
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer, "step": self.step}

    def load_state_dict(self, state):
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        self.step = state["step"]


dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
mesh = init_device_mesh("cpu", (size,))
for layer in (model[0], model[2]):
    fully_shard(layer, mesh=mesh)
fully_shard(model, mesh=mesh)
state = AppState(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
if Path(FOLDER).is_dir():
    dcp.load({"app": state}, checkpoint_id=FOLDER)
while state.step < 8:
    drawn = torch.Generator().manual_seed(state.step)
    inputs, labels = torch.randn(12, 8, generator=drawn), torch.randint(0, 4, (12,), generator=drawn)
    state.optimizer.zero_grad()
    F.cross_entropy(model(inputs[rank::size]), labels[rank::size]).backward()
    state.optimizer.step()
    state.step += 1
    dcp.save({"app": state}, checkpoint_id=FOLDER)
dist.destroy_process_group()
