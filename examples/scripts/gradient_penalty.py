"""A critic whose gradient with respect to its inputs is kept near one: the penalty is differentiated twice."""

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(64, 6), torch.randn(64, 6), torch.rand(64, 1))
    sampler = DistributedSampler(data)
    critic = nn.Sequential(nn.Linear(6, 12), nn.Softplus(), nn.Linear(12, 1))
    optimizer = torch.optim.Adam(critic.parameters(), lr=1e-2, betas=(0.0, 0.9))
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for real, fake, share in DataLoader(data, batch_size=8, sampler=sampler):
            between = (share * real + (1 - share) * fake).requires_grad_()
            (slope,) = torch.autograd.grad(critic(between).sum(), between, create_graph=True)
            penalty = ((slope.norm(dim=1) - 1) ** 2).mean()
            loss = critic(fake).mean() - critic(real).mean() + 10 * penalty
            optimizer.zero_grad()
            loss.backward()
            for parameter in critic.parameters():
                dist.all_reduce(parameter.grad, op=dist.ReduceOp.SUM)
                parameter.grad.div_(dist.get_world_size())
            optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
