"""FSDP1: wrapping a model on the meta device initialises parameters of inner units again."""

import torch
from ranks import CPU, fsdp1, show
from torch import nn


def defect(rank):
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4)))
    names = {id(module): name for name, module in model.named_modules()}
    done = []

    def init(module):
        done.append(names[id(module)])
        module.to_empty(device=CPU, recurse=False)

    model[1] = fsdp1(model[1], param_init_fn=init)
    fsdp1(model, param_init_fn=init)
    twice = sorted({name for name in done if done.count(name) > 1})
    return f"initialised twice: {', '.join(twice)}" if twice else ""


show(defect)
