"""DDP with gradients that are clipped by their norm after backward, where DDP has reduced them."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(48, 9, 6), torch.randn(48, 4))
    sampler = DistributedSampler(data, shuffle=True, seed=3)
    loader = DataLoader(data, batch_size=6, sampler=sampler)
    rnn = nn.LSTM(6, 12, batch_first=True)
    head = nn.Linear(12, 4)

    class Regressor(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn, self.head = rnn, head

        def forward(self, sequences):
            return self.head(self.rnn(sequences)[0][:, -1])

    model = DDP(Regressor())
    optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-2)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for sequences, targets in loader:
            optimizer.zero_grad()
            F.mse_loss(model(sequences), targets).backward()
            norm = nn.utils.clip_grad_norm_(model.parameters(), max_norm=0.2)
            optimizer.step()
            if dist.get_rank() == 0:
                print(f"norm {norm:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
