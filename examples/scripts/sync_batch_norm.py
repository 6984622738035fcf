"""A small ResNet under DDP whose batch norms use the rows of all ranks; torch's SyncBatchNorm itself needs GPUs."""

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as collectives
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class SyncBatchNorm2d(nn.BatchNorm2d):
    """What nn.SyncBatchNorm does on GPUs: mean and variance are those of all ranks, in forward and in backward."""

    def forward(self, inputs):
        if not self.training:
            return super().forward(inputs)
        size = dist.get_world_size()
        moments = torch.stack([inputs.mean((0, 2, 3)), inputs.square().mean((0, 2, 3))])
        mean, square = collectives.all_reduce(moments) / size
        variance = square - mean.square()
        count = inputs.numel() // inputs.shape[1] * size
        with torch.no_grad():
            self.num_batches_tracked += 1
            self.running_mean.lerp_(mean, self.momentum)
            self.running_var.lerp_(variance * count / (count - 1), self.momentum)
        normed = (inputs - mean[:, None, None]) * (variance[:, None, None] + self.eps).rsqrt()
        return normed * self.weight[:, None, None] + self.bias[:, None, None]

    @classmethod
    def convert(cls, module):
        """Replace each BatchNorm2d below `module`."""
        for name, child in module.named_children():
            if isinstance(child, nn.BatchNorm2d):
                setattr(module, name, cls(child.num_features, child.eps, child.momentum))
            else:
                cls.convert(child)
        return module


class Residual(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.conv1 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)

    def forward(self, x):
        hidden = F.relu(self.bn1(self.conv1(x)))
        return F.relu(x + self.bn2(self.conv2(hidden)))


class ResNet(nn.Module):
    def __init__(self, classes=4):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU())
        self.blocks = nn.Sequential(Residual(8), Residual(8))
        self.fc = nn.Linear(8, classes)

    def forward(self, images):
        return self.fc(self.blocks(self.stem(images)).mean((2, 3)))


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(32, 3, 6, 6), torch.randint(0, 4, (32,)))
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=4, sampler=sampler)
    model = SyncBatchNorm2d.convert(ResNet())
    model = DDP(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for images, labels in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(images), labels).backward()
            optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
