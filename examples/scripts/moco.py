"""Momentum contrast: a key encoder that follows by a moving average, and a queue of the keys of all ranks."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


@torch.no_grad()
def concat_all_gather(tensor):
    parts = [torch.ones_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, tensor)
    return torch.cat(parts)


class MoCo(nn.Module):
    def __init__(self, dim=6, queue=24):
        super().__init__()
        self.encoder_q, self.encoder_k = (
            nn.Sequential(nn.Linear(10, 12), nn.ReLU(), nn.Linear(12, dim)) for _ in range(2)
        )
        self.encoder_k.load_state_dict(self.encoder_q.state_dict())
        self.encoder_k.requires_grad_(False)
        self.register_buffer("queue", F.normalize(torch.randn(dim, queue), dim=0))
        self.register_buffer("queue_ptr", torch.zeros(1, dtype=torch.long))

    @torch.no_grad()
    def dequeue_and_enqueue(self, keys):
        keys = concat_all_gather(keys)
        start = int(self.queue_ptr)
        self.queue[:, start : start + len(keys)] = keys.T
        self.queue_ptr[0] = (start + len(keys)) % self.queue.shape[1]

    def forward(self, queries, keys):
        q = F.normalize(self.encoder_q(queries), dim=1)
        with torch.no_grad():
            for follower, leader in zip(self.encoder_k.parameters(), self.encoder_q.parameters()):
                follower.mul_(0.9).add_(leader, alpha=0.1)
            k = F.normalize(self.encoder_k(keys), dim=1)
        logits = torch.cat([(q * k).sum(1, keepdim=True), q @ self.queue.clone()], dim=1) / 0.2
        self.dequeue_and_enqueue(k)
        return logits, torch.zeros(len(logits), dtype=torch.long)


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(48, 10), torch.randn(48, 10))
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=4, sampler=sampler, drop_last=True)
    model = DDP(MoCo())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for first, second in loader:
            loss = F.cross_entropy(*model(first, second))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
