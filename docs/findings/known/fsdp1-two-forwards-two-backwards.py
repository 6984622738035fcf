"""FSDP1: two forwards and then their two backwards raise."""

from ranks import data, error_of, fsdp1, mlp, show


def defect(rank):
    inner = mlp()
    inner[0] = fsdp1(inner[0])
    model = fsdp1(inner)
    first, second = model(data(rank)).sum(), model(data(rank, 1)).sum()
    return error_of(lambda: (first.backward(), second.backward()))


show(defect)
