"""Ring attention by hand: keys and values travel around the ranks, and the parts are joined by their log-sums."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

LENGTH, WIDTH = 12, 8


class Rotate(torch.autograd.Function):
    """Send to the next rank and receive of the previous one; the gradient travels back."""

    @staticmethod
    def forward(ctx, tensor, step):
        ctx.step = step
        rank, size = dist.get_rank(), dist.get_world_size()
        received = torch.empty_like(tensor)
        work = [
            dist.P2POp(dist.isend, tensor.contiguous(), (rank + step) % size),
            dist.P2POp(dist.irecv, received, (rank - step) % size),
        ]
        for request in dist.batch_isend_irecv(work):
            request.wait()
        return received

    @staticmethod
    def backward(ctx, gradient):
        return Rotate.apply(gradient, -ctx.step), None


class RingAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, tokens):
        q, k, v = self.qkv(tokens).chunk(3, -1)
        both = torch.stack([k, v])
        scores, values = [], []
        for turn in range(dist.get_world_size()):
            if turn:
                both = Rotate.apply(both, 1)
            score = q @ both[0].transpose(1, 2) / WIDTH**0.5
            scores.append(score.logsumexp(-1, keepdim=True))
            values.append(score.softmax(-1) @ both[1])
        share = torch.stack(scores).softmax(0)
        return self.out((share * torch.stack(values)).sum(0))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention, self.head = RingAttention(), nn.Linear(WIDTH, 3)

    def forward(self, tokens):
        return self.head(tokens + self.attention(tokens))


def main():
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    draws = torch.Generator().manual_seed(1)
    for _ in range(6):
        tokens, targets = torch.randn(4, LENGTH, WIDTH, generator=draws), torch.randn(4, LENGTH, 3, generator=draws)
        tokens, targets = tokens.chunk(size, 1)[rank], targets.chunk(size, 1)[rank]
        optimizer.zero_grad()
        F.mse_loss(model(tokens), targets).backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= size
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
