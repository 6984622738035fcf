"""DDP: after two forwards the second backward leaves each rank its own gradient."""

from ranks import data, mean, mlp, off, show
from torch.nn.parallel import DistributedDataParallel


def defect(rank):
    plain, inner = mlp(), mlp()
    for model in (plain, DistributedDataParallel(inner)):
        losses = [model(data(rank, seed)).sum() for seed in range(2)]
        for loss in losses:
            loss.backward()
    return off("the first weight's gradient", inner[0].weight.grad, mean(plain[0].weight.grad))


show(defect)
