"""A Trainer that reads the first batch of each epoch before it calls set_epoch, as torch's own tutorial on DDP does."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Trainer:
    def __init__(self, model, train_data, optimizer, rank):
        self.rank = rank
        self.train_data = train_data
        self.optimizer = optimizer
        self.model = DistributedDataParallel(model)

    def _run_batch(self, source, targets):
        self.optimizer.zero_grad()
        loss = F.cross_entropy(self.model(source), targets)
        loss.backward()
        self.optimizer.step()

    def _run_epoch(self, epoch):
        size = len(next(iter(self.train_data))[0])
        print(f"[rank {self.rank}] Epoch {epoch} | Batchsize: {size} | Steps: {len(self.train_data)}")
        self.train_data.sampler.set_epoch(epoch)
        for source, targets in self.train_data:
            self._run_batch(source, targets)

    def train(self, epochs):
        for epoch in range(epochs):
            self._run_epoch(epoch)


dist.init_process_group("gloo")
torch.manual_seed(0)
data = TensorDataset(torch.rand(24, 20), torch.randint(0, 3, (24,)))
loader = DataLoader(data, batch_size=4, shuffle=False, sampler=DistributedSampler(data))
model = torch.nn.Linear(20, 3)
Trainer(model, loader, torch.optim.SGD(model.parameters(), lr=1e-2), dist.get_rank()).train(3)
dist.destroy_process_group()
