"""DDP under bfloat16 autocast, with clipping and a rate that warms up; the smoothed loss of all ranks is logged."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def build():
    return nn.Sequential(nn.Linear(20, 64), nn.LayerNorm(64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 6))


def batches(loader, sampler):
    epoch = 0
    while True:
        sampler.set_epoch(epoch)
        yield from loader
        epoch += 1


def main(steps=8, warm_up=3):
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(96, 20), torch.randint(0, 6, (96,)))
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=8, sampler=sampler)
    model = DistributedDataParallel(build())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / warm_up))
    stream, smoothed = batches(loader, sampler), None
    for step in range(steps):
        inputs, labels = next(stream)
        with torch.autocast(device_type="cpu", dtype=torch.bfloat16):
            logits = model(inputs)
            loss = nn.functional.cross_entropy(logits, labels)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        scheduler.step()
        shown = loss.detach().float()
        dist.all_reduce(shown)
        shown /= dist.get_world_size()
        smoothed = shown if smoothed is None else 0.9 * smoothed + 0.1 * shown
        if dist.get_rank() == 0:
            print(f"step {step}: smoothed loss {smoothed:.4f}, rate {scheduler.get_last_lr()[0]:.3g}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
