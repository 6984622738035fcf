"""DDP: a forward through `model.module` is not reduced."""

from ranks import data, mean, mlp, off, show
from torch.nn.parallel import DistributedDataParallel


def defect(rank):
    plain, inner = mlp(), mlp()
    plain(data(rank)).sum().backward()
    DistributedDataParallel(inner).module(data(rank)).sum().backward()
    return off("the first weight's gradient", inner[0].weight.grad, mean(plain[0].weight.grad))


show(defect)
