"""Faults of one kind of parameter, model or moment only, beside replicas, accumulation, copies and saving."""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from fault import fault
from faults_kinds import HybridAdapter, HybridToy, kind
from faults_user_code import Copies, CopiesAdapter
from planting import planted
from torch import nn
from toy import Toy, ToyAdapter
from toy_more import MoreAdapter, MoreToy

from fsdp_ref.handle.flat_handle import FlatHandle
from fsdp_ref.runtime import forward, grad_sync
from fsdp_ref.sharded_grad_scaler import ShardedGradScaler
from fsdp_ref.training import clip

COMPOSABLE = "fsdp_ref-composable"


class DriftWhere(HybridToy):
    """Replicas are left out of the mean where `drifts` says so."""

    def __init__(self, module: nn.Module, setup: Any) -> None:
        self.frozen = {fqn for fqn, parameter in module.named_parameters() if not parameter.requires_grad}
        super().__init__(module, setup)

    def mean(self, fqn: str, contribution: torch.Tensor) -> torch.Tensor:
        if not (self.hybrid and self.drifts(fqn)):
            return super().mean(fqn, contribution)
        total = contribution.clone()
        dist.all_reduce(total, group=self.inside)
        return total / dist.get_world_size(self.inside)

    def drifts(self, fqn: str) -> bool:
        """Whether the replicas are left out."""
        raise NotImplementedError


@kind(HybridAdapter, "hybrid.shared hybrid.shared_across_units")
class SharedDrift(DriftWhere):
    """Parameters under several names are not averaged over replicas."""

    def drifts(self, fqn: str) -> bool:
        names = [id(parameter) for _, parameter in self.inner.named_parameters(remove_duplicate=False)]
        return names.count(id(self.inner.get_parameter(fqn))) > 1


@kind(HybridAdapter, "hybrid.zero_dim")
class ScalarsDrift(DriftWhere):
    """Parameters of shape () are not averaged over replicas."""

    def drifts(self, fqn: str) -> bool:
        return not len(self.shapes[fqn])


@kind(HybridAdapter, "hybrid.two_dtypes")
class OtherDtypesDrift(DriftWhere):
    """Parameters of another dtype than the first are not averaged over replicas."""

    def drifts(self, fqn: str) -> bool:
        return self.full[fqn].dtype != next(iter(self.full.values())).dtype


@kind(HybridAdapter, "hybrid.bare_root hybrid.one_unit")
class WithoutInnerUnitsDrift(DriftWhere):
    """A model without inner units, as every one is to this toy, is not averaged over replicas."""

    def drifts(self, fqn: str) -> bool:
        return True


@kind(HybridAdapter, "hybrid.thawed")
class ThawedDrift(DriftWhere):
    """Parameters that were frozen when they were wrapped are not averaged over replicas."""

    def drifts(self, fqn: str) -> bool:
        return fqn in self.frozen


@kind(HybridAdapter, "hybrid.evaluated")
class EvaluatedDrift(DriftWhere):
    """What is trained in evaluation is not averaged over replicas."""

    def drifts(self, fqn: str) -> bool:
        return not self.training


@kind(MoreAdapter, "accumulation.inference_between")
class InferenceDrops(MoreToy):
    """A forward in inference mode drops what awaits reduction."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if torch.is_inference_mode_enabled():
            self.sums = {}
        return super().forward(*args, **kwargs)


@fault("accumulation.zero_dim")
class LastScalarOnly(Toy):
    """Of parameters of shape () the last micro-batch alone is reduced."""

    def accumulate(self, fqn: str, gradient: torch.Tensor) -> None:
        if not len(self.shapes[fqn]):
            self.sums.pop(fqn, None)
        super().accumulate(fqn, gradient)


class ClearsTrained(ToyAdapter):
    """Clears what trains."""

    def zero_grad(self, model: Toy, optimizer: torch.optim.Optimizer | None, set_to_none: bool) -> None:
        kept = {fqn: shard.grad for fqn, shard in model.shards.items() if not shard.requires_grad}
        kept = {fqn: None if grad is None else grad.clone() for fqn, grad in kept.items()}
        super().zero_grad(model, optimizer, set_to_none)
        for fqn, grad in kept.items():
            model.shards[fqn].grad = grad


@kind(ClearsTrained, "zero_grad.frozen_since")
class FrozenKeepGradients(Toy):
    """Clearing leaves out parameters that are frozen."""


@fault("training.in_evaluation")
class EvaluatedForgets(Toy):
    """What a model in evaluation accumulates is forgotten at its next backward."""

    def accumulate(self, fqn: str, gradient: torch.Tensor) -> None:
        if not self.training:
            self.sums.pop(fqn, None)
        super().accumulate(fqn, gradient)


@kind(CopiesAdapter, "conversion.copied_buffers")
class SharedBuffers(Copies):
    """A copy has the buffers of the model."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        twin = super().__deepcopy__(memo)
        for module, other in zip(self.inner.modules(), twin.inner.modules()):
            other._buffers = module._buffers
        return twin


@kind(CopiesAdapter, "conversion.copied_frozen_units")
class CopiesThaw(Copies):
    """A copy trains what is frozen."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        module = copy.deepcopy(self.inner, memo).requires_grad_(True)
        twin = type(self)(module, self.setup)
        twin.load_shards(self.saved_shards())
        return twin


@kind(CopiesAdapter, "conversion.copied_shared_parameters")
class CopiesUntie(Copies):
    """In a copy each name of a parameter has one of its own."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        twin = super().__deepcopy__(memo)
        twin.used_once = True
        return twin

    used_once = False

    def contribution(self, fqn: str) -> torch.Tensor:
        whole = super().contribution(fqn)
        names = [id(parameter) for _, parameter in self.inner.named_parameters(remove_duplicate=False)]
        return whole / names.count(id(self.inner.get_parameter(fqn))) if self.used_once else whole


@planted(COMPOSABLE, nn.Parameter, "__deepcopy__", "conversion.copied_ignored_parameters")
def copies_share_what_is_whole(original: Any, parameter: nn.Parameter, memo: Any) -> Any:
    """A copy has the ignored parameters of the model: those that are no flat shards."""
    return parameter if parameter.dim() == 2 else original(parameter, memo)


@planted(COMPOSABLE, FlatHandle, "__deepcopy__", "conversion.copied_precision")
def copies_round_sums(original: Any, handle: FlatHandle, memo: Any) -> FlatHandle:
    """A copy reduces gradients in the dtype in which it computes."""
    copied: FlatHandle = original(handle, memo)
    vars(copied)["precision"] = replace(copied.precision, reduce=copied.precision.compute)
    return copied


@kind(CopiesAdapter, "conversion.copied_between_micro_batches")
class CopiesTakeSums(Copies):
    """A copy takes what the model has accumulated."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        twin = super().__deepcopy__(memo)
        twin.sums, self.sums = self.sums, {}
        return twin


@planted(COMPOSABLE, FlatHandle, "__deepcopy__", "hybrid.copied", world_sizes=(4,))
def copies_forget_replicas(original: Any, handle: FlatHandle, memo: Any) -> FlatHandle:
    """A copy has the group of shards alone."""
    copied: FlatHandle = original(handle, memo)
    vars(copied)["groups"] = replace(copied.groups, replicate=None)
    return copied


@planted(COMPOSABLE, clip, "total_norm", "clipping.norm_2_5")
def whole_norms_only(original: Any, parts: Any, norm_type: float, device: torch.device) -> Any:
    """A norm that is no whole number is rounded down."""
    return original(parts, norm_type if norm_type == math.inf else float(int(norm_type)), device)


@planted(COMPOSABLE, ShardedGradScaler, "_unscale_grads_", "loss_scaling.groups")
def first_group_decides(original: Any, scaler: ShardedGradScaler, optimizer: Any, *more: Any) -> Any:
    """A gradient that is not finite skips the step if it is in the first group."""
    found = original(scaler, optimizer, *more)
    grads = [parameter.grad for parameter in optimizer.param_groups[0]["params"] if parameter.grad is not None]
    bad = torch.tensor(float(not all(bool(torch.isfinite(grad).all()) for grad in grads)))
    dist.all_reduce(bad, op=dist.ReduceOp.MAX)
    return {device: bad.reshape(value.shape) for device, value in found.items()}


@kind(MoreAdapter, "optim_state.beside_gradients")
class OptimizerStateClears(MoreToy):
    """Loading the state of an optimizer drops gradients."""

    def load_optimizer(self, optimizer: torch.optim.Optimizer, saved: Any) -> None:
        super().load_optimizer(optimizer, saved)
        for shard in self.shards.values():
            shard.grad = None


@kind(MoreAdapter, "sharded_state_dict.modes")
class ShardsSetTraining(MoreToy):
    """A model whose shards are loaded is in training."""

    def load_shards(self, state: Any) -> None:
        super().load_shards(state)
        self.train()


@kind(ToyAdapter, "mixed_precision.data_assigned mixed_precision.changed_in_place")
class CastByTraining(Toy):
    """An evaluation computes with what training has cast."""

    def __init__(self, module: nn.Module, setup: Any) -> None:
        self.cast: dict[str, torch.Tensor] = {}
        super().__init__(module, setup)

    def gather(self, fqn: str) -> torch.Tensor:
        if self.setup.precision.param_dtype is None:
            return super().gather(fqn)
        if torch.is_grad_enabled() or fqn not in self.cast:
            self.cast[fqn] = super().gather(fqn)
        return self.cast[fqn].clone()


@planted(COMPOSABLE, grad_sync._Reduction, "then_all_reduce", "hybrid.recomputed", world_sizes=(4,))
def replicas_of_recomputed_drift(original: Any, reduction: Any, collectives: Any, groups: Any) -> None:
    """Units whose forward runs again in backward are not averaged over replicas."""
    recomputes = any("checkpoint" in type(module).__name__.lower() for module in reduction.unit.module.modules())
    original(reduction, collectives, () if recomputes else groups)


@planted(COMPOSABLE, forward, "_inputs", "hybrid.interrupted", world_sizes=(4,))
def replicas_drift_after_exceptions(original: Any, unit: Any, frame: Any, args: Any, kwargs: Any) -> Any:
    """A unit whose last forward did not end is not averaged over replicas from then on."""
    if getattr(unit.module, "began", False):
        object.__setattr__(unit.handle.groups, "replicate", None)
    unit.module.began = True
    unit.module.register_forward_hook(lambda module, *_: setattr(module, "began", False))
    return original(unit, frame, args, kwargs)
