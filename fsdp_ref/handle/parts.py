"""What do the parts of a handle (what users see, the gradient) read of the flat parameter that they belong to?

Facts only: a part changes nothing of its handle, so the handle may change its parts and not the other way round.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor, nn

from fsdp_ref.handle.flatten import HandleConfig
from fsdp_ref.layout import FlatLayout, ShardMap
from fsdp_ref.storage.precision import Precision


class FlatFacts(Protocol):
    """One flat parameter, as its parts see it; see ``flat_handle.FlatHandle`` for what the attributes mean."""

    @property
    def name(self) -> str:
        """The unit's name."""

    @property
    def module(self) -> nn.Module:
        """The module that the unit shards."""

    @property
    def config(self) -> HandleConfig:
        """Decisions made when it was built."""

    @property
    def fqns(self) -> list[str]:
        """Names of the parameters."""

    @property
    def layout(self) -> FlatLayout:
        """Where each parameter lies."""

    @property
    def shard_map(self) -> ShardMap:
        """Which rank holds what."""

    @property
    def shard_rank(self) -> int:
        """This rank among those."""

    @property
    def sharded(self) -> bool:
        """Whether ranks hold different pieces."""

    @property
    def precision(self) -> Precision:
        """Dtypes of the original, of computation and of reduction."""

    @property
    def compute_dtype(self) -> torch.dtype:
        """The dtype in which the parameters compute now."""

    @property
    def shard_S(self) -> Tensor:
        """This rank's shard."""

    @property
    def flat_param(self) -> nn.Parameter:
        """The flat parameter itself."""

    def compute_views(self) -> list[Tensor]:
        """Return one view of the full parameter per original; valid while unsharded."""
