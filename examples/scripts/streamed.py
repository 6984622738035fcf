"""A stream of rows, split among the workers of all ranks."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset, get_worker_info


class Stream(IterableDataset):
    def __init__(self, rank, size):
        self.rank, self.size = rank, size

    def __iter__(self):
        info = get_worker_info()
        workers, worker = (info.num_workers, info.id) if info else (1, 0)
        for place in range(self.rank * workers + worker, 48, self.size * workers):
            row = torch.randn(5, generator=torch.Generator().manual_seed(place))
            yield row, row.sum()[None]


dist.init_process_group("gloo")
torch.manual_seed(0)
model = DistributedDataParallel(nn.Linear(5, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
loader = DataLoader(Stream(dist.get_rank(), dist.get_world_size()), batch_size=4, num_workers=1)
for _ in range(2):
    for inputs, targets in loader:
        optimizer.zero_grad()
        F.mse_loss(model(inputs), targets).backward()
        optimizer.step()
dist.destroy_process_group()
