"""FullyShardedDataParallel with a wrapping policy, its own clipping, a stepped learning rate and a reduced loss."""

import argparse
import functools
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3)
        self.fc1 = nn.Linear(4 * 3 * 3, 24)
        self.fc2 = nn.Linear(24, 5)

    def forward(self, images):
        hidden = F.max_pool2d(F.relu(self.conv(images)), 2)
        hidden = F.relu(self.fc1(hidden.flatten(1)))
        return F.log_softmax(self.fc2(hidden), dim=1)


def train_epoch(args, model, loader, optimizer, epoch):
    model.train()
    totals = torch.zeros(2)
    loader.sampler.set_epoch(epoch)
    for images, labels in loader:
        optimizer.zero_grad()
        loss = F.nll_loss(model(images), labels)
        loss.backward()
        model.clip_grad_norm_(args.clip)
        optimizer.step()
        totals[0] += loss.item() * len(images)
        totals[1] += len(images)
    dist.all_reduce(totals, op=dist.ReduceOp.SUM)
    if dist.get_rank() == 0:
        print(f"Train epoch {epoch}: loss {totals[0] / totals[1]:.6f}")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--gamma", type=float, default=0.7)
    parser.add_argument("--clip", type=float, default=0.2)
    args = parser.parse_args()
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", rank=rank, world_size=world_size)
    torch.manual_seed(3)
    images = TensorDataset(torch.randn(48, 1, 8, 8), torch.randint(0, 5, (48,)))
    sampler = DistributedSampler(images, rank=rank, num_replicas=world_size, shuffle=True)
    loader = DataLoader(images, batch_size=8, sampler=sampler)
    policy = functools.partial(size_based_auto_wrap_policy, min_num_params=100)
    model = FSDP(Net(), auto_wrap_policy=policy, device_id=torch.device("cpu"))
    optimizer = torch.optim.Adadelta(model.parameters(), lr=args.lr)
    scheduler = StepLR(optimizer, step_size=1, gamma=args.gamma)
    for epoch in range(args.epochs):
        train_epoch(args, model, loader, optimizer, epoch)
        scheduler.step()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
