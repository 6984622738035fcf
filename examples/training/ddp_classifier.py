"""DistributedDataParallel with a DistributedSampler; the loss of an epoch is reduced and logged."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.hidden = nn.Linear(12, 16)
        self.dropout = nn.Dropout(0.1)
        self.head = nn.Linear(16, 4)

    def forward(self, inputs):
        return self.head(self.dropout(F.relu(self.hidden(inputs))))


def train(model, loader, optimizer):
    model.train()
    total = torch.zeros(2)
    for inputs, labels in loader:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs), labels)
        loss.backward()
        optimizer.step()
        total += torch.tensor([loss.item() * len(inputs), len(inputs)])
    dist.all_reduce(total)
    return (total[0] / total[1]).item()


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(1)
    data = TensorDataset(torch.randn(48, 12), torch.randint(0, 4, (48,)))
    sampler = DistributedSampler(data, shuffle=True)
    loader = DataLoader(data, batch_size=8, sampler=sampler)
    model = DistributedDataParallel(Classifier())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        loss = train(model, loader, optimizer)
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: loss {loss:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
