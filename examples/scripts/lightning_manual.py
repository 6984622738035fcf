"""Lightning with manual optimization: two optimizers of one module, stepped alternately."""

import os

import lightning
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Gan(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.generator = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 6))
        self.discriminator = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 1))

    def training_step(self, batch):
        optimizer_g, optimizer_d = self.optimizers()
        real, noise = batch
        ones, zeros = torch.ones(len(real), 1), torch.zeros(len(real), 1)

        self.toggle_optimizer(optimizer_d)
        logits = self.discriminator(torch.cat([real, self.generator(noise).detach()]))
        loss = F.binary_cross_entropy_with_logits(logits, torch.cat([ones, zeros]))
        optimizer_d.zero_grad()
        self.manual_backward(loss)
        optimizer_d.step()
        self.untoggle_optimizer(optimizer_d)

        self.toggle_optimizer(optimizer_g)
        loss = F.binary_cross_entropy_with_logits(self.discriminator(self.generator(noise)), ones)
        optimizer_g.zero_grad()
        self.manual_backward(loss)
        optimizer_g.step()
        self.untoggle_optimizer(optimizer_g)

    def configure_optimizers(self):
        parts = self.generator, self.discriminator
        return [torch.optim.Adam(part.parameters(), lr=1e-2) for part in parts]


def main():
    lightning.seed_everything(0)
    data = TensorDataset(torch.randn(64, 6), torch.randn(64, 4))
    trainer = lightning.Trainer(
        accelerator="cpu",
        strategy="ddp_find_unused_parameters_true",
        devices=int(os.environ.get("WORLD_SIZE", "1")),
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
    )
    trainer.fit(Gan(), DataLoader(data, batch_size=8, shuffle=True))


if __name__ == "__main__":
    main()
