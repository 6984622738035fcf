"""Lightning's Trainer: a LightningModule with a scheduler, a LightningDataModule, accumulation and clipping."""

import os

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningDataModule, LightningModule, Trainer, seed_everything
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Data(LightningDataModule):
    def setup(self, stage):
        draws = torch.Generator().manual_seed(2)
        self.rows = TensorDataset(torch.randn(64, 6, generator=draws), torch.randint(0, 3, (64,), generator=draws))

    def train_dataloader(self):
        return DataLoader(self.rows, batch_size=4, shuffle=True)


class Classifier(LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 3))

    def forward(self, inputs):
        return self.layers(inputs)

    def training_step(self, batch, _):
        inputs, labels = batch
        loss = F.cross_entropy(self(inputs), labels)
        self.log("train_loss", loss, sync_dist=True)
        return loss

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def main():
    seed_everything(0, verbose=False)
    trainer = Trainer(
        accelerator="cpu",
        devices=int(os.environ.get("WORLD_SIZE", "1")),
        strategy="ddp",
        max_steps=4,
        accumulate_grad_batches=2,
        gradient_clip_val=0.5,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Classifier(), datamodule=Data())


if __name__ == "__main__":
    main()
