"""FSDP2: SGD with momentum and `foreach` raises if trained parameters are ignored."""

import torch
from ranks import data, error_of, fsdp2, mlp, show


def defect(rank):
    model = mlp()
    fsdp2(model, ignored_params=set(model[0].parameters()))
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, foreach=True)

    def iteration():
        model(data(rank)).sum().backward()
        optimizer.step()

    return error_of(lambda: (iteration(), iteration()))


show(defect)
