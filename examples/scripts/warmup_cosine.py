"""DDP with a rate that warms up linearly and falls along a cosine, by torch's own schedulers."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

STEPS, WARM_UP = 8, 3


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(64, 8), torch.randn(64, 1))
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=8, sampler=sampler)
    model = DDP(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)
    scheduler = SequentialLR(
        optimizer,
        [
            LinearLR(optimizer, start_factor=0.1, total_iters=WARM_UP),
            CosineAnnealingLR(optimizer, T_max=STEPS - WARM_UP, eta_min=1e-3),
        ],
        milestones=[WARM_UP],
    )
    step, epoch = 0, 0
    while step < STEPS:
        sampler.set_epoch(epoch)
        for inputs, targets in loader:
            optimizer.zero_grad()
            F.mse_loss(model(inputs), targets).backward()
            optimizer.step()
            scheduler.step()
            step += 1
            if step == STEPS:
                break
        epoch += 1
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
