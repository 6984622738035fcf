"""What happens between two optimizer steps that explains a difference? Reductions, seeds, random numbers, dtypes.

It explains a difference and never decides whether there is one.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fsdp_testing.base import compat
from fsdp_testing.cases.records.tolerance import UNIT_ROUNDOFF
from fsdp_testing.ranks.ledger.recorder import Call, GroupIdentity

_DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
_DIGESTED = 65536
"""Elements of a tensor that are digested: weights that differ do so everywhere, and hashing all of them takes time."""
_REDUCING = ("all_reduce", "reduce_scatter", "reduce")


@dataclass(frozen=True, slots=True)
class StepEvidence:
    """What happened until one optimizer step.

    Attributes:
        reduced: For each backward pass whether as many elements were reduced, from its beginning to the next one's (or
            to the step), as there are gradients.
        local: Forwards of a model that is not to synchronise.
        seed: `torch.initial_seed()` at the first forward.
        drew: Whether the default generator moved between the first forward and the step.
        dropout: Digest of its state at the first active dropout layer; empty without one.
        weights: Digest of the weights before the step.
        gradient_norm: Norm of the gradients that the optimizer is given on this rank.
        gathered: Whether parameters were gathered: then weights and gradients here are shards.
        roundoff: Unit roundoff of the narrowest dtype that gradients or parameters have, or autocast computes in.
        agreed: Whether all ranks are given the same gradients of what they share, so that none of them lacks a reduction.
    """

    reduced: tuple[bool, ...] = ()
    local: int = 0
    seed: int = 0
    drew: bool = False
    dropout: str = ""
    weights: str = ""
    gradient_norm: float = 0.0
    gathered: bool = False
    roundoff: float = 0.0
    agreed: bool = False

    @property
    def backwards(self) -> int:
        """Number of backward passes."""
        return len(self.reduced)


class Clues:
    """Collects the evidence of one step on one rank."""

    def __init__(self) -> None:
        self._seed = torch.initial_seed()
        self._generator = self._dropout = ""
        self._local = 0
        self._roundoff = 0.0
        self._reduced: list[int] = []
        self._gathered = False

    def see_collective(self, _group: GroupIdentity, call: Call, _site: str) -> None:
        """Take note of a collective; a listener of the ledger."""
        name, _, dtype, sizes = (*call.what, None, None)[:4]
        if self._reduced and str(name).startswith(_REDUCING):
            self._reduced[-1] += sum(sizes) if isinstance(sizes, tuple) else int(sizes or 0)
        # Floating numbers: DDP gathers shapes when it is made.
        self._gathered |= "gather" in str(name) and "float" in str(dtype)

    def see_backward(self) -> None:
        """Take note that a backward pass begins."""
        self._reduced.append(0)

    def see_forward(self, module: nn.Module, _args: Any) -> None:
        """Take note of a module's forward."""
        if compat.in_backward():
            return  # activations are computed again
        if not self._generator:
            self._seed, self._generator = torch.initial_seed(), _generator_digest()
        if isinstance(module, _DROPOUTS) and module.training and module.p > 0 and not self._dropout:
            self._dropout = _generator_digest()
        if getattr(module, "require_backward_grad_sync", True) is False:
            self._local += 1
        for device in ("cpu", "cuda"):
            if torch.is_autocast_enabled(device):
                self._roundoff = max(self._roundoff, _roundoff(torch.get_autocast_dtype(device)))

    def at_step(self, optimizer: torch.optim.Optimizer) -> StepEvidence:
        """Return the evidence, when an optimizer is about to step; without what cannot be read of it."""
        try:
            listed = [p for group in optimizer.param_groups for p in group["params"]]
            parameters = [_local(p) for p in listed]
            gradients = [_local(p.grad) for p in listed if p.grad is not None]
        except Exception:  # noqa: BLE001 - a tensor of a kind that nobody thought of must not end what is only watched
            return StepEvidence()
        due = max(sum(gradient.numel() for gradient in gradients), 1)
        return StepEvidence(
            reduced=tuple(count >= due for count in self._reduced),
            local=self._local,
            seed=self._seed,
            drew=bool(self._generator) and self._generator != _generator_digest(),
            dropout=self._dropout,
            weights=_digest(parameters),
            gradient_norm=float(sum(float(g.double().square().sum()) for g in gradients) ** 0.5),
            gathered=self._gathered,
            roundoff=max([self._roundoff, *(_roundoff(tensor.dtype) for tensor in [*parameters, *gradients])]),
        )


def _roundoff(dtype: torch.dtype) -> float:
    return UNIT_ROUNDOFF.get(str(dtype).removeprefix("torch."), 0.0)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a tensor; a DTensor says so itself."""
    shard = getattr(tensor, "to_local", None)
    return (shard() if callable(shard) else tensor).detach()


def _digest(tensors: list[torch.Tensor]) -> str:
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(tensor.reshape(-1)[:_DIGESTED].cpu().double().numpy().tobytes())
    return digest.hexdigest()[:12]


def _generator_digest() -> str:
    return hashlib.sha256(torch.get_rng_state().numpy().tobytes()).hexdigest()[:12]
