"""fully_shard on each layer and on the root, micro-batches, clipping; each rank draws its own rows."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

MICRO_BATCHES = 2


class Layer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, 2, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, hidden):
        normed = self.norm(hidden)
        attended, _ = self.attention(normed, normed, normed, need_weights=False)
        return hidden + attended + self.mlp(hidden + attended)


class Transformer(nn.Module):
    def __init__(self, vocabulary=23, width=16, layers=2):
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(Layer(width) for _ in range(layers))
        self.output = nn.Linear(width, vocabulary)

    def forward(self, tokens, labels):
        hidden = self.tokens(tokens)
        for layer in self.layers:
            hidden = layer(hidden)
        return F.cross_entropy(self.output(hidden).flatten(0, 1), labels.flatten())


dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
mesh = init_device_mesh("cpu", (size,))
model = Transformer()
for layer in model.layers:
    fully_shard(layer, mesh=mesh)
fully_shard(model, mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
torch.manual_seed(1000 + rank)
for step in range(4):
    for micro_batch in range(MICRO_BATCHES):
        model.set_requires_gradient_sync(micro_batch == MICRO_BATCHES - 1)
        tokens = torch.randint(0, 23, (4, 9))
        loss = model(tokens[:, :-1], tokens[:, 1:]) / MICRO_BATCHES
        loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
    optimizer.step()
    optimizer.zero_grad()
    if rank == 0:
        print(f"step {step}: loss {loss.item() * MICRO_BATCHES:.4f}")
dist.destroy_process_group()
