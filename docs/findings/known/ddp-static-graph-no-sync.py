"""DDP with `static_graph`: a first backward in `no_sync` makes the next one raise."""

from ranks import data, error_of, mlp, show
from torch.nn.parallel import DistributedDataParallel


def defect(rank):
    model = DistributedDataParallel(mlp(), static_graph=True)

    def accumulate():
        with model.no_sync():
            model(data(rank)).sum().backward()
        model(data(rank, 1)).sum().backward()

    return error_of(accumulate)


show(defect)
