"""FSDP2 that asks for the state of model and optimizer before it trains, to see that they can be saved."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(48, 6), torch.randn(48, 2))
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=6, sampler=sampler)
    model = nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 2))
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    weights, state = get_state_dict(model, optimizer, options=StateDictOptions(cpu_offload=True))
    if dist.get_rank() == 0:
        print(f"{len(weights)} tensors and the state of {len(state['state'])} will be saved")
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for inputs, targets in loader:
            F.mse_loss(model(inputs), targets).backward()
            optimizer.step()
            optimizer.zero_grad()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
