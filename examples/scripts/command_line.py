"""A typical repository: arguments, progress bars, logs and checkpoints of rank 0, an evaluation, a final sys.exit."""

import argparse
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def parse():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--out", default="runs")
    return parser.parse_args()


def main():
    args = parse()
    dist.init_process_group("gloo")
    rank = int(os.environ["RANK"])
    torch.manual_seed(0)
    rows, labels = torch.randn(80, 8), torch.randint(0, 3, (80,))
    train, test = TensorDataset(rows[:64], labels[:64]), TensorDataset(rows[64:], labels[64:])
    sampler = DistributedSampler(train)
    loader = DataLoader(train, batch_size=args.batch_size, sampler=sampler)
    model = DDP(nn.Sequential(nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, 3)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-2, total_steps=args.epochs * len(loader))
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        model.train()
        for number, (inputs, targets) in enumerate(loader):
            start = time.perf_counter()
            optimizer.zero_grad()
            loss = F.cross_entropy(model(inputs), targets)
            loss.backward()
            optimizer.step()
            scheduler.step()
            if rank == 0:
                print(
                    f"\r{number + 1}/{len(loader)} {loss.item():.3f} {time.perf_counter() - start:.3f} s",
                    end="",
                    flush=True,
                )
        if rank == 0:
            model.eval()
            with torch.no_grad():
                right = sum((model.module(i).argmax(1) == t).sum().item() for i, t in DataLoader(test, batch_size=16))
            Path(args.out).mkdir(exist_ok=True)
            torch.save({"model": model.module.state_dict(), "accuracy": right / 16}, f"{args.out}/last.pt")
        dist.barrier()
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
