"""FSDP2: backward raises for a loss computed from gradients (a gradient penalty)."""

import torch
from ranks import data, error_of, fsdp2, mlp, show


def defect(rank):
    inner = mlp()
    model = fsdp2(inner[0], inner)
    x = data(rank).requires_grad_()
    loss = model(x).square().sum()

    def penalised():
        (slope,) = torch.autograd.grad(loss, x, create_graph=True)
        (loss + slope.square().sum()).backward()

    return error_of(penalised)


show(defect)
