"""DDP whose trainer looks at the first batch for its size before each epoch, as torch's tutorial on many GPUs does."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Trainer:
    def __init__(self, model, train_data, optimizer):
        self.rank = dist.get_rank()
        self.train_data = train_data
        self.optimizer = optimizer
        self.model = DDP(model)

    def _run_epoch(self, epoch):
        batch_size = len(next(iter(self.train_data))[0])
        print(f"[rank {self.rank}] epoch {epoch} | batch size {batch_size} | steps {len(self.train_data)}")
        self.train_data.sampler.set_epoch(epoch)
        for source, targets in self.train_data:
            self.optimizer.zero_grad()
            loss = F.mse_loss(self.model(source), targets)
            loss.backward()
            self.optimizer.step()

    def train(self, max_epochs):
        for epoch in range(max_epochs):
            self._run_epoch(epoch)


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    data = TensorDataset(torch.rand(32, 20), torch.rand(32, 1))
    loader = DataLoader(data, batch_size=8, shuffle=False, sampler=DistributedSampler(data))
    model = nn.Linear(20, 1)
    Trainer(model, loader, torch.optim.SGD(model.parameters(), lr=0.01)).train(4)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
