"""Faults in what two features do together, each right by itself: of a second author of engines, which no check saw."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from fault import fault
from faults_kinds import HybridAdapter, HybridToy, kind
from planting import planted
from torch import nn
from toy import Toy
from toy_more import MoreAdapter, MoreToy

from fsdp_ref.checkpoint import optim_index, optim_load
from fsdp_ref.runtime import backward

COMPOSABLE = "fsdp_ref-composable"


@kind(MoreAdapter, "sizes.zero_dim_full sizes.zero_dim_sharded")
class ScalarsNotWritten(MoreToy):
    """Writing back leaves parameters of shape () as they were."""

    def write_back(self, whole: Mapping[str, torch.Tensor]) -> None:
        super().write_back({fqn: value for fqn, value in whole.items() if value.dim()})


@kind(MoreAdapter, "frozen.edited_in_low_precision frozen.loaded_in_low_precision")
class FrozenCastOnce(MoreToy):
    """What is cast for computation of a frozen parameter is cast once."""

    def __init__(self, module: nn.Module, setup: Any) -> None:
        self.cast: dict[str, torch.Tensor] = {}
        super().__init__(module, setup)

    def gather(self, fqn: str) -> torch.Tensor:
        gathered = super().gather(fqn)
        if self.setup.precision.param_dtype is None or self.shards[fqn].requires_grad:
            return gathered
        return self.cast.setdefault(fqn, gathered).clone()


@planted(COMPOSABLE, optim_load._Loading, "state", "mixed_precision.loaded_moments")
def moments_in_bfloat16(original: Any, loading: Any) -> dict[Any, dict[str, Any]]:
    """Moments are loaded in the digits of computation."""
    state: dict[Any, dict[str, Any]] = original(loading)
    for entries in state.values():
        entries["exp_avg"] = entries["exp_avg"].bfloat16().to(entries["exp_avg"].dtype)
    return state


class CountsSome(Toy):
    """Leaves gradients out of the norm; by itself none."""

    def counted(self) -> set[str]:
        return {*self.shards}

    def total_norm(self, norm_type: float) -> torch.Tensor:
        with self.others_hidden(self.counted()):
            return super().total_norm(norm_type)

    @contextmanager
    def others_hidden(self, counted: set[str]) -> Iterator[None]:
        hidden = {fqn: shard.grad for fqn, shard in self.shards.items() if fqn not in counted}
        for fqn in hidden:
            self.shards[fqn].grad = None
        yield
        for fqn, gradient in hidden.items():
            self.shards[fqn].grad = gradient


@fault("clipping.frozen_later")
class FrozenNotCounted(CountsSome):
    """A gradient is not in the norm if its parameter is frozen by then."""

    def counted(self) -> set[str]:
        return {fqn for fqn, shard in self.shards.items() if shard.requires_grad}


@fault("clipping.thawed")
class CountedAtFirst(CountsSome):
    """The norm is of those parameters that had a gradient at the first call."""

    first: frozenset[str] = frozenset()

    def counted(self) -> set[str]:
        self.first = self.first or frozenset(fqn for fqn, shard in self.shards.items() if shard.grad is not None)
        return {*self.first}


@planted(COMPOSABLE, optim_index, "_outside", "wrapping.ignored_full wrapping.ignored_sharded")
def ignored_have_no_moments(_original: Any, *_: Any) -> Iterator[Any]:
    """What a root ignores has no state of the optimizer."""
    yield from ()


@kind(MoreAdapter, "full_state_dict.saved_after_forward")
class SavesWhatIsGathered(MoreToy):
    """A state holds what the last forward has gathered."""

    gathered: Mapping[str, torch.Tensor] = MappingProxyType({})

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = super().forward(*args, **kwargs)
        self.gathered = {fqn: self.gather(fqn).reshape(self.shapes[fqn]) for fqn in self.full}
        return output

    def saved(self) -> dict[str, torch.Tensor]:
        return super().saved() | self.gathered


@kind(HybridAdapter, "hybrid.written_back")
class OneReplicaWrites(HybridToy):
    """Replicas other than the first keep what they had before an edit of full parameters."""

    def write_back(self, whole: Mapping[str, torch.Tensor]) -> None:
        if not self.hybrid or dist.get_rank() < 2:
            super().write_back(whole)


@planted(COMPOSABLE, backward, "run_after_accumulation", "hybrid.hooks", world_sizes=(4,))
def hooks_see_the_replica(original: Any, handle: Any) -> None:
    """Hooks that run after accumulation find a gradient that differs between replicas."""
    factor = 2.0 if dist.get_rank() >= 2 else 0.5
    gradients = [param.grad for param in handle.originals.held if param.grad is not None]
    for gradient in gradients:
        gradient.mul_(factor)
    original(handle)
    for gradient in gradients:
        gradient.div_(factor)


@kind(MoreAdapter, "exceptions.beside_gradients")
class ForgetsGradients(MoreToy):
    """A forward that raises takes the gradients with it."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().forward(*args, **kwargs)
        except Exception:
            self.sums = {}
            for shard in self.shards.values():
                shard.grad = None
            raise


@kind(MoreAdapter, "activation_checkpointing.dropout")
class DropsOthers(MoreToy):
    """The second forward of a module draws other random numbers than the first."""

    def __init__(self, module: nn.Module, setup: Any) -> None:
        super().__init__(module, setup)
        for name, part in module.named_modules():
            if setup.checkpointed and name.endswith("linear"):
                part.register_forward_pre_hook(self.draw)

    def draw(self, *_: Any) -> None:
        self.second = not getattr(self, "second", True)
        torch.rand(3 if self.second else 0)


@kind(MoreAdapter, "activation_checkpointing.of_inputs")
class InputsDetached(MoreToy):
    """A model that recomputes passes no gradient to its inputs."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.setup.checkpointed:
            args = tuple(value.detach() if isinstance(value, torch.Tensor) else value for value in args)
        return super().forward(*args, **kwargs)


@kind(MoreAdapter, "optim_state.frozen_later")
class FrozenNotSaved(MoreToy):
    """The state of a parameter that is frozen by then is not saved."""

    def saved_optimizer(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        saved = super().saved_optimizer(optimizer)
        kept = {fqn: entries for fqn, entries in saved["state"].items() if self.shards[fqn].requires_grad}
        return {**saved, "state": kept}


@kind(MoreAdapter, "full_state_dict.random_numbers")
class LoadingDraws(MoreToy):
    """Loading fills what it loads into with random numbers first."""

    def load(self, state: Mapping[str, torch.Tensor]) -> None:
        torch.rand(1)
        super().load(state)
