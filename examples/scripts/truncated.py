"""Truncated backpropagation through time: each rank carries its streams' hidden states from batch to batch."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

STREAMS, LENGTH, WINDOW, VOCABULARY = 6, 40, 5, 11


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.rnn = nn.Embedding(VOCABULARY, 8), nn.LSTM(8, 10, batch_first=True)
        self.head = nn.Linear(10, VOCABULARY)

    def forward(self, tokens, state):
        hidden, state = self.rnn(self.tokens(tokens), state)
        return self.head(hidden), state


def main():
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    streams = torch.randint(0, VOCABULARY, (STREAMS, LENGTH + 1)).chunk(size)[rank]
    model = DDP(Recurrent())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    state = None
    for start in range(0, LENGTH, WINDOW):
        tokens, targets = streams[:, start : start + WINDOW], streams[:, start + 1 : start + WINDOW + 1]
        logits, state = model(tokens, state)
        state = tuple(part.detach() for part in state)
        optimizer.zero_grad()
        F.cross_entropy(logits.flatten(0, 1), targets.flatten()).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.25)
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
