"""FullyShardedDataParallel with a wrapping policy, clipped by the method of the model."""

import functools

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3)
        self.hidden = nn.Linear(4 * 3 * 3, 24)
        self.output = nn.Linear(24, 10)

    def forward(self, images):
        hidden = F.max_pool2d(F.relu(self.conv(images)), 2)
        hidden = F.relu(self.hidden(hidden.flatten(1)))
        return F.log_softmax(self.output(hidden), dim=1)


def train_one_epoch(model, rank, loader, optimizer, epoch, sampler):
    model.train()
    sums = torch.zeros(2)
    sampler.set_epoch(epoch)
    for images, labels in loader:
        optimizer.zero_grad()
        loss = F.nll_loss(model(images), labels)
        loss.backward()
        model.clip_grad_norm_(0.2)
        optimizer.step()
        sums[0] += loss.item() * len(images)
        sums[1] += len(images)
    dist.all_reduce(sums)
    if rank == 0:
        print(f"epoch {epoch}: loss {sums[0] / sums[1]:.4f}")


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(1)
    data = TensorDataset(torch.randn(48, 1, 8, 8), torch.randint(0, 10, (48,)))
    sampler = DistributedSampler(data, shuffle=True)
    loader = DataLoader(data, batch_size=8, sampler=sampler)
    policy = functools.partial(size_based_auto_wrap_policy, min_num_params=200)
    model = FSDP(Net(), auto_wrap_policy=policy, device_id=torch.device("cpu"))
    optimizer = torch.optim.Adadelta(model.parameters(), lr=0.5)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.7)
    for epoch in range(3):
        train_one_epoch(model, rank, loader, optimizer, epoch, sampler)
        scheduler.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
