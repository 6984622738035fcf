"""FSDP1: `model.double()` after the first iteration makes the next forward raise."""

from ranks import data, error_of, fsdp1, mlp, show


def defect(rank):
    model = fsdp1(mlp())
    model(data(rank)).sum().backward()
    model.zero_grad()
    model.double()
    return error_of(lambda: model(data(rank).double()).sum().backward())


show(defect)
