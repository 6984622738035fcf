"""Models of the field that `plan` knows by name: shapes alone, on the meta device; 405 billion elements take no memory.

Sizes are those that the models' authors published; names of modules are our own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
from torch import nn


@dataclass(frozen=True, slots=True)
class Decoder:
    """A stack of blocks of attention and a gated feed-forward part, between an embedding and a head that is not tied to it.

    Attributes:
        width: Size of a token's vector.
        layers: Number of blocks.
        heads: Heads of the queries; `shared_heads` of keys and values.
        shared_heads: See above.
        hidden: Inner size of the feed-forward part.
        vocabulary: Number of tokens.
        experts: Feed-forward parts per block that a router chooses among; 0 is one part without a router.
    """

    width: int
    layers: int
    heads: int
    shared_heads: int
    hidden: int
    vocabulary: int
    experts: int = 0

    def build(self, dtype: torch.dtype) -> nn.Module:
        """Return the model on the meta device."""
        with torch.device("meta"):
            parts = {
                "embedding": nn.Embedding(self.vocabulary, self.width),
                "blocks": nn.ModuleList(Block(self) for _ in range(self.layers)),
                "norm": nn.RMSNorm(self.width),
                "head": nn.Linear(self.width, self.vocabulary, bias=False),
            }
            return nn.ModuleDict(parts).to(dtype)


class Block(nn.Module):
    """One block of a decoder; it has shapes and computes nothing."""

    def __init__(self, shape: Decoder) -> None:
        super().__init__()
        shared = shape.width // shape.heads * shape.shared_heads
        self.attention = _linears(shape.width, query=shape.width, key=shared, value=shared, output=shape.width)
        if shape.experts:
            self.router = nn.Linear(shape.width, shape.experts, bias=False)
            self.experts = nn.ModuleList(Expert(shape) for _ in range(shape.experts))
        else:
            self.feed_forward = Expert(shape)
        self.attention_norm, self.feed_forward_norm = nn.RMSNorm(shape.width), nn.RMSNorm(shape.width)


class Expert(nn.Module):
    """One gated feed-forward part."""

    def __init__(self, shape: Decoder) -> None:
        super().__init__()
        self.up = _linears(shape.width, gate=shape.hidden, value=shape.hidden)
        self.down = nn.Linear(shape.hidden, shape.width, bias=False)


def _linears(width: int, **sizes: int) -> nn.ModuleDict:
    return nn.ModuleDict({name: nn.Linear(width, size, bias=False) for name, size in sizes.items()})


DECODERS: Final = {
    "llama-8b": Decoder(4096, 32, 32, 8, 14336, 128256),
    "llama-70b": Decoder(8192, 80, 64, 8, 28672, 128256),
    "llama-405b": Decoder(16384, 126, 128, 8, 53248, 128256),
    "mixture-8x7b": Decoder(4096, 32, 32, 8, 14336, 32000, experts=8),
}
