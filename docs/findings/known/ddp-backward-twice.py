"""DDP: a second backward through a kept graph leaves each rank its own gradient."""

from ranks import data, mean, mlp, off, show
from torch.nn.parallel import DistributedDataParallel


def defect(rank):
    plain, inner = mlp(), mlp()
    for model in (plain, DistributedDataParallel(inner)):
        loss = model(data(rank)).sum()
        loss.backward(retain_graph=True)
        loss.backward()
    return off("the first weight's gradient", inner[0].weight.grad, mean(plain[0].weight.grad))


show(defect)
