"""Two real models, small: a GPT block stack with tied embeddings, and a mixture of experts."""

# mypy: disable-error-code="no-any-return"
# Calling a module gives Any in torch's annotations, and every forward here returns what a module gave.

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from fsdp_testing.cases.models.model import Family, Inputs, MakeInput, tokens

ZOO = Family()
VOCABULARY = 17
CONTEXT = 6


def _id_input(*, targets: bool) -> MakeInput:
    def make_input(seed: int, rank: int, step: int, batch: int, dtype: torch.dtype, **_options: Any) -> Inputs:
        del dtype  # ids have none
        both = tokens(seed, rank, step, (batch, CONTEXT + 1), VOCABULARY)
        return Inputs((both[:, :-1], both[:, 1:]) if targets else (both[:, :-1],), {})

    return make_input


class Attention(nn.Module):
    """Causal self-attention written out, so that every dtype and an empty batch take the same path."""

    mask: torch.Tensor

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.register_buffer("mask", torch.ones(CONTEXT, CONTEXT).tril().bool(), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        shape = (batch, length, 3, self.heads, width // self.heads)
        q, k, v = self.qkv(x).reshape(shape).permute(2, 0, 3, 1, 4).unbind(0)
        scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
        weights = scores.masked_fill(~self.mask[:length, :length], float("-inf")).softmax(-1)
        return self.out((weights @ v).transpose(1, 2).reshape(batch, length, width))


class Block(nn.Module):
    """Attention and an MLP, each behind a layer norm, each on a residual stream."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


@ZOO.model(
    "gpt",
    _id_input(targets=True),
    ("blocks.0", "blocks.1"),
    "real tied integer_input uneven",
    "shared_parameters",
    elementwise_before=("blocks.0.mlp.2", "blocks.1.mlp.2"),
)
class Gpt(nn.Module):
    """A GPT block stack whose head shares the token embedding."""

    def __init__(self, depth: int = 2, width: int = 8, heads: int = 2) -> None:
        super().__init__()
        self.wte = nn.Embedding(VOCABULARY, width)
        self.wpe = nn.Embedding(CONTEXT, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.head.weight = self.wte.weight

    def forward(self, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.wte(ids) + self.wpe(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        losses = nn.functional.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten(), reduction="none")
        return (2 * losses).sqrt()  # the zoo's loss is half the sum of squares: the sum of the cross-entropies


class Expert(nn.Module):
    """One expert; it may get no token at all."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * width + 1)
        self.down = nn.Linear(2 * width + 1, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.up(x)))


class ExpertLayer(nn.Module):
    """Each token goes to two experts that its id decides, weighted by a learned gate over these two.

    Top-k routing would be decided by comparing scores, and the last bit of a score may differ between two correct
    implementations; routing by id cannot, and the gate still gets its gradient. Every expert is called, also with no
    rows.
    """

    def __init__(self, width: int, experts: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, experts, bias=False)
        self.experts = nn.ModuleList(Expert(width) for _ in range(experts))

    def forward(self, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        count = len(self.experts)
        chosen = torch.stack([ids % count, (ids + 1 + ids % (count - 1)) % count], dim=-1)
        weights = self.gate(x).gather(-1, chosen).softmax(-1)
        result = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            rows, place = (chosen == index).nonzero(as_tuple=True)
            result = result.index_add(0, rows, expert(x[rows]) * weights[rows, place].unsqueeze(-1))
        return result


@ZOO.model(
    "moe",
    _id_input(targets=False),
    ("layers.0", "layers.1", *(f"layers.{layer}.experts.{expert}" for layer in range(2) for expert in range(3))),
    "real nested integer_input uneven",
)
class MixtureOfExperts(nn.Module):
    """A mixture of experts, each a unit inside a unit; an expert may get no token."""

    def __init__(self, depth: int = 2, width: int = 6, experts: int = 3) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(depth))
        self.layers = nn.ModuleList(ExpertLayer(width, experts) for _ in range(depth))
        self.head = nn.Linear(width, 5)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        flat = ids.flatten()
        x = self.embed(flat)
        for norm, layer in zip(self.norms, self.layers):
            x = x + layer(norm(x), flat)
        return self.head(x).unflatten(0, ids.shape)
