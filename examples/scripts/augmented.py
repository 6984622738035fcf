"""Images that the dataset flips at random, with a DistributedSampler and DistributedDataParallel."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Images(Dataset):
    def __init__(self):
        drawn = torch.Generator().manual_seed(1)
        self.images = torch.rand(32, 3, 6, 6, generator=drawn)
        self.labels = torch.randint(0, 4, (32,), generator=drawn)

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        image = self.images[index]
        if torch.rand(1) < 0.5:
            image = image.flip(-1)
        return image + 0.05 * torch.randn_like(image), self.labels[index]


dist.init_process_group("gloo")
torch.manual_seed(0)
net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(64, 4))
model = DistributedDataParallel(net)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
torch.manual_seed(100 + dist.get_rank())  # each rank draws augmentations of its own

images = Images()
sampler = DistributedSampler(images, shuffle=True)
loader = DataLoader(images, batch_size=4, sampler=sampler)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for inputs, labels in loader:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs), labels)
        loss.backward()
        optimizer.step()
    if dist.get_rank() == 0:
        print(f"epoch {epoch}: {loss.item():.4f}")
dist.destroy_process_group()
