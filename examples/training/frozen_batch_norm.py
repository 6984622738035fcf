"""DDP, fine-tuning on images: batch norms keep their pretrained statistics, and the first layer is frozen."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Images(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.conv = nn.Conv2d(4, 6, 3, padding=1)
        self.norm2 = nn.BatchNorm2d(6)
        self.head = nn.Linear(6, 5)

    def forward(self, images):
        hidden = F.relu(self.norm(self.stem(images)))
        hidden = F.relu(self.norm2(self.conv(hidden)))
        return self.head(hidden.mean((2, 3)))

    def train(self, mode=True):
        super().train(mode)
        for module in self.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.eval()
        return self


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(4)
    data = TensorDataset(torch.randn(40, 3, 6, 6), torch.randint(0, 5, (40,)))
    model = Images()
    model.stem.requires_grad_(False)
    model = DistributedDataParallel(model).train()
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.RMSprop(trained, lr=1e-3)
    rate = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-2, total_steps=12)
    sampler = DistributedSampler(data, seed=3)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for images, labels in DataLoader(data, batch_size=5, sampler=sampler):
            loss = F.cross_entropy(model(images), labels, label_smoothing=0.1)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if rate.last_epoch < 11:
                rate.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
