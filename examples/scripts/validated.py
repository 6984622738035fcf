"""Validation on every rank after each epoch: the accuracy is logged and the loss controls the learning rate."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset, random_split


def evaluate(model, loader):
    model.eval()
    loss, right = 0.0, 0.0
    with torch.no_grad():
        for inputs, labels in loader:
            logits = model(inputs)
            loss += F.cross_entropy(logits, labels, reduction="sum").item()
            right += (logits.argmax(1) == labels).float().sum().item()
    model.train()
    return loss / len(loader.dataset), right


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(44, 6), torch.randint(0, 3, (44,)))
    training, validation = random_split(data, [32, 12], generator=torch.Generator().manual_seed(2))
    model = DistributedDataParallel(nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 3)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.5)
    sampler = DistributedSampler(training)
    loader, held_out = DataLoader(training, batch_size=8, sampler=sampler), DataLoader(validation, batch_size=5)
    for epoch in range(4):
        sampler.set_epoch(epoch)
        for inputs, labels in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(inputs), labels).backward()
            optimizer.step()
        loss, right = evaluate(model, held_out)
        schedule.step(loss)
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: loss {loss:.4f}, {right:.0f} of {len(validation)} right")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
