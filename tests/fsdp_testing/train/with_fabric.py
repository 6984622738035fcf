"""Lightning Fabric as it is used; one mistake on demand."""

import os
import sys

import torch
from lightning.fabric import Fabric
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

size = int(os.environ["WORLD_SIZE"])
fabric = Fabric(accelerator="cpu", devices=size, strategy="ddp")
fabric.launch()
fabric.seed_everything(0)
data = TensorDataset(torch.randn(24, 4), torch.randn(24, 1))
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1 * (size if "--scale-rate" in sys.argv else 1), momentum=0.9)
model, optimizer = fabric.setup(model, optimizer)
loader = fabric.setup_dataloaders(DataLoader(data, batch_size=4, shuffle=True))
for _ in range(2):
    for inputs, targets in loader:
        loss = nn.functional.mse_loss(model(inputs), targets)
        fabric.backward(loss)
        fabric.clip_gradients(model, optimizer, max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()
