"""DDP with a moving average of the weights and a checkpoint after each step, from which it resumes."""

import copy
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

CHECKPOINT = Path("checkpoints/last.pt")


class Trainer:
    def __init__(self, model, loader, rate=0.02, decay=0.9):
        self.rank = int(os.environ["RANK"])
        self.loader = loader
        self.model = DistributedDataParallel(model)
        self.average = copy.deepcopy(model).requires_grad_(False)
        self.decay = decay
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=rate)
        self.step = 0
        if CHECKPOINT.exists():
            self.load()

    def load(self):
        state = torch.load(CHECKPOINT, map_location="cpu")
        self.model.module.load_state_dict(state["model"])
        self.average.load_state_dict(state["average"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.step = state["step"]

    def save(self):
        CHECKPOINT.parent.mkdir(exist_ok=True)
        state = {
            "model": self.model.module.state_dict(),
            "average": self.average.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "step": self.step,
        }
        torch.save(state, CHECKPOINT.with_suffix(".tmp"))
        CHECKPOINT.with_suffix(".tmp").replace(CHECKPOINT)

    def update_average(self):
        with torch.no_grad():
            for average, parameter in zip(self.average.parameters(), self.model.module.parameters()):
                average.mul_(self.decay).add_(parameter, alpha=1 - self.decay)

    def train(self, epochs):
        per_epoch = len(self.loader)
        for epoch in range(self.step // per_epoch, epochs):
            self.loader.sampler.set_epoch(epoch)
            for number, (inputs, targets) in enumerate(self.loader):
                if epoch * per_epoch + number < self.step:
                    continue  # done before the checkpoint
                loss = nn.functional.huber_loss(self.model(inputs), targets)
                self.optimizer.zero_grad()
                loss.backward()
                self.optimizer.step()
                self.update_average()
                self.step += 1
                if self.rank == 0:
                    self.save()
                dist.barrier()


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(11)
    data = TensorDataset(torch.randn(36, 6), torch.randn(36, 2))
    loader = DataLoader(data, batch_size=6, sampler=DistributedSampler(data, drop_last=True))
    Trainer(nn.Sequential(nn.Linear(6, 10), nn.ReLU(), nn.Linear(10, 2)), loader).train(epochs=3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
