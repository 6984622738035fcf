"""DDP: a parameter that was frozen while wrapping is never reduced."""

from ranks import data, mean, mlp, off, show
from torch.nn.parallel import DistributedDataParallel


def defect(rank):
    plain, inner = mlp(), mlp()
    inner[0].weight.requires_grad_(False)
    model = DistributedDataParallel(inner)
    inner[0].weight.requires_grad_(True)
    for one in (plain, model):
        one(data(rank)).sum().backward()
    return off("the first weight's gradient", inner[0].weight.grad, mean(plain[0].weight.grad))


show(defect)
