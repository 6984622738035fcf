"""FSDP1: a second backward through a kept graph raises."""

from ranks import data, error_of, fsdp1, mlp, show


def defect(rank):
    inner = mlp()
    inner[0] = fsdp1(inner[0])
    loss = fsdp1(inner)(data(rank)).sum()
    return error_of(lambda: (loss.backward(retain_graph=True), loss.backward()))


show(defect)
