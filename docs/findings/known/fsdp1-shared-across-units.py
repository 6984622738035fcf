"""FSDP1 with original parameters: a weight shared by two units is accepted, but the first forward raises."""

from ranks import data, error_of, fsdp1, mlp, show


def defect(rank):
    inner = mlp()
    inner[1].weight = inner[0].weight
    model = fsdp1(inner.append(fsdp1(inner.pop(0))))
    return error_of(lambda: model(data(rank)).sum().backward())


show(defect)
