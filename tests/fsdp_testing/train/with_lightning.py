"""Lightning's Trainer under torchrun's variables, DDP on the CPU; one mistake on demand."""

import os
import sys

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Regression(LightningModule):
    def __init__(self):
        super().__init__()
        self.model = nn.Linear(4, 1)

    def training_step(self, batch, _):
        inputs, targets = batch
        return nn.functional.mse_loss(self.model(inputs), targets)

    def configure_optimizers(self):
        size = int(os.environ["WORLD_SIZE"])
        return torch.optim.SGD(self.parameters(), lr=0.1 * (size if "--scale-rate" in sys.argv else 1))


torch.manual_seed(0)
data = TensorDataset(torch.randn(24, 4), torch.randn(24, 1))
trainer = Trainer(
    accelerator="cpu",
    devices=int(os.environ["WORLD_SIZE"]),
    strategy="ddp",
    max_steps=6,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(Regression(), DataLoader(data, batch_size=2))
