"""DDP: if forward runs inside `no_sync` and backward outside, gradients are not reduced."""

from ranks import data, mean, mlp, off, show
from torch.nn.parallel import DistributedDataParallel


def defect(rank):
    plain, inner = mlp(), mlp()
    plain(data(rank)).sum().backward()
    model = DistributedDataParallel(inner)
    with model.no_sync():
        loss = model(data(rank)).sum()
    loss.backward()
    return off("the first weight's gradient", inner[0].weight.grad, mean(plain[0].weight.grad))


show(defect)
