"""Faults in loading: into a model and an optimizer that were used since, and of shards that do not belong here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from fault import fault
from planting import planted
from toy_more import MoreToy

from fsdp_ref.checkpoint import shards


class UsedToy(MoreToy):
    """Knows whether a backward was over, and whether the last forward was an evaluation."""

    trained = evaluated = False

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.evaluated = not torch.is_grad_enabled() or not self.training
        return super().forward(*args, **kwargs)

    def finish_backward(self) -> None:
        self.trained = True
        super().finish_backward()


@fault("full_state_dict.rolled_back")
class LoadsFreshModelsOnly(UsedToy):
    """A model that trained keeps its values when a full state is loaded."""

    def load(self, state: Mapping[str, torch.Tensor]) -> None:
        if not self.trained:
            super().load(state)


@fault("full_state_dict.rolled_back_after_evaluation")
class EvaluationKeepsValues(UsedToy):
    """What an evaluation gathered is not loaded."""

    def load(self, state: Mapping[str, torch.Tensor]) -> None:
        if not self.evaluated:
            super().load(state)


@fault("sharded_state_dict.rolled_back")
class LoadsFreshShardsOnly(UsedToy):
    """A model that trained keeps its values when its shards are loaded."""

    def load_shards(self, state: Mapping[str, torch.Tensor]) -> None:
        if not self.trained:
            super().load_shards(state)


@fault("local_state_dict.rolled_back")
class LoadsFreshRawShardsOnly(UsedToy):
    """A model that trained keeps its values when its raw shards are loaded."""

    def load_locally(self, state: Mapping[str, torch.Tensor]) -> None:
        if not self.trained:
            super().load_locally(state)


@fault("optim_state.rolled_back")
class LoadsFreshOptimizersOnly(MoreToy):
    """An optimizer that has state keeps it."""

    def load_optimizer(self, optimizer: torch.optim.Optimizer, saved: Mapping[str, Any]) -> None:
        if not optimizer.state:
            super().load_optimizer(optimizer, saved)


@fault("optim_state.rolled_back_to_the_start")
class NothingIsNotLoaded(MoreToy):
    """Where none was saved, the optimizer keeps the state that it has (our adapter of DDP did)."""

    def load_optimizer(self, optimizer: torch.optim.Optimizer, saved: Mapping[str, Any]) -> None:
        kept = {shard: entries for shard, entries in optimizer.state.items() if entries}
        super().load_optimizer(optimizer, saved)
        for shard, entries in kept.items():
            optimizer.state.setdefault(shard, entries)


@fault("optim_state.rolled_back")
class SavesOwnMoments(MoreToy):
    """A rank saves NaN as optimizer state of the other ranks; it never loads that itself."""

    def saved_optimizer(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        saved = super().saved_optimizer(optimizer)
        for fqn, entries in saved["state"].items():
            start, stop = self.span(self.full[fqn].numel())
            for name, value in entries.items():
                if isinstance(value, torch.Tensor) and value.numel() == self.full[fqn].numel() and value.dim():
                    entries[name] = torch.full_like(value, float("nan"))
                    entries[name].reshape(-1)[start:stop] = value.reshape(-1)[start:stop]
        return saved


@fault("optim_state.groups")
class OnlyRatesOfGroups(MoreToy):
    """Of the settings of groups only the rate is restored."""

    def load_groups(self, optimizer: torch.optim.Optimizer, groups: list[dict[str, Any]]) -> None:
        super().load_groups(optimizer, [{"lr": group["lr"]} for group in groups])


@fault("optim_state.groups")
class FirstGroupForAll(MoreToy):
    """Every group is given the settings of the first."""

    def load_groups(self, optimizer: torch.optim.Optimizer, groups: list[dict[str, Any]]) -> None:
        super().load_groups(optimizer, [groups[0]] * len(groups))


@planted(
    "fsdp_ref-wrapper",
    shards.Spread,
    "entry",
    "options.mesh_for_group_in_shards options.mesh_for_group_in_hybrid_shards sharded_state_dict.through_directory",
)
def saves_rows_backwards(original: Any, spread: Any, rows: torch.Tensor, *given: Any) -> Any:
    """Rows of a sharded parameter are saved in the reverse order."""
    return original(spread, rows.flip(0) if rows.dim() else rows, *given)


@planted("fsdp_ref-composable", shards.RawForm, "entry", "local_state_dict.through_directory")
def saves_elements_backwards(original: Any, form: Any) -> Any:
    """Elements of a raw shard are saved in the reverse order."""
    saved = original(form)
    saved.to_local().copy_(saved.to_local().flip(0))
    return saved


@planted("fsdp_ref-composable", shards.RawForm, "problem", "local_state_dict.of_another_rank")
def takes_any_raw_shard(original: Any, form: Any, value: Any) -> None:
    """A raw shard is loaded whatever its size and its rank."""


@planted(
    "fsdp_ref-wrapper",
    shards,
    "_of_another_rank",
    "sharded_state_dict.of_another_rank options.mesh_for_group_of_another_rank",
)
def trusts_every_shard(original: Any, value: Any) -> str:
    """A shard that another rank saved is loaded."""
    return ""
