"""Every rank plays with the learner's weights; rank 0 learns from what all ranks played, and sends its weights."""

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def main() -> None:
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    states, rewards = torch.randn(64, 4), torch.randn(64)
    policy = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 2))
    optimizer = torch.optim.Adam(policy.parameters(), lr=1e-2)
    data = TensorDataset(states, rewards)
    loader = DataLoader(data, batch_size=8, sampler=DistributedSampler(data, size, rank, shuffle=False))
    for seen, reward in loader:
        with torch.no_grad():
            action = policy(seen).argmax(-1)
        played = [None] * size
        dist.gather_object((seen, action, reward), played if rank == 0 else None)
        if rank == 0:
            seen, action, reward = (torch.cat(parts) for parts in zip(*played))
            chosen = policy(seen).log_softmax(-1).gather(1, action[:, None]).squeeze(1)
            loss = -(chosen * (reward - reward.mean())).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        for parameter in policy.parameters():
            dist.broadcast(parameter.data, src=0)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
