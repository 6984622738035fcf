"""DDP with no_sync around all but the last micro-batch of a step."""

from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

ACCUMULATE = 3


class Squares(Dataset):
    def __init__(self, count=72):
        self.points = torch.linspace(-1, 1, count)

    def __len__(self):
        return len(self.points)

    def __getitem__(self, place):
        x = self.points[place]
        return {"x": torch.stack([x, x.sin()]), "y": (x * x).reshape(1)}


def main():
    dist.init_process_group(backend="gloo")
    torch.manual_seed(42)
    model = DDP(nn.Sequential(nn.Linear(2, 12), nn.SiLU(), nn.Linear(12, 1)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    sampler = DistributedSampler(Squares(), shuffle=True, seed=9)
    loader = DataLoader(Squares(), batch_size=4, sampler=sampler, drop_last=True)
    criterion = nn.MSELoss()
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for number, batch in enumerate(loader, start=1):
            is_last = number % ACCUMULATE == 0
            with nullcontext() if is_last else model.no_sync():
                loss = criterion(model(batch["x"]), batch["y"]) / ACCUMULATE
                loss.backward()
            if is_last:
                optimizer.step()
                optimizer.zero_grad()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
