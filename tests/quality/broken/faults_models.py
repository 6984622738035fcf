"""Faults that only some models show: outputs, sharing, odd sizes, norms, buffers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from fault import fault
from planting import planted
from torch import nn
from torch.nn.utils.parametrize import ParametrizationList
from toy import Toy

from fsdp_testing.adapters.protocol import Setup
from fsdp_testing.cases.models import tensors_in
from fsdp_testing.oracle import models


@fault("outputs.containers")
class OnlyTensorsWatched(Toy):
    """Outputs other than one tensor are not looked into (B075)."""

    def watch(self, output: Any) -> None:
        if isinstance(output, torch.Tensor):
            super().watch(output)


@fault("outputs.containers")
class ListOfOutputs(Toy):
    """Whatever the model returns comes back as a list of its tensors."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return tensors_in(super().forward(*args, **kwargs))


@fault("outputs.opaque_objects")
class OnlyContainersWatched(Toy):
    """Outputs of a user's class are not looked into (B133)."""

    def watch(self, output: Any) -> None:
        if isinstance(output, (torch.Tensor, tuple, list, dict)):
            super().watch(output)


@fault("shared.across_units")
class Untied(Toy):
    """A parameter under two names becomes two parameters (B139)."""

    def __init__(self, module: nn.Module, setup: Setup) -> None:
        seen: set[int] = set()
        for inner in module.modules():
            for name, parameter in list(inner.named_parameters(recurse=False)):
                if id(parameter) in seen:
                    setattr(inner, name, nn.Parameter(parameter.detach().clone()))
                seen.add(id(parameter))
        super().__init__(module, setup)


@fault("gpt.trained")
class HeadOnly(Toy):
    """Of tied embeddings only the rows that the inputs name are trained."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.ids = args[0]
        return super().forward(*args, **kwargs)

    def mean(self, fqn: str, contribution: torch.Tensor) -> torch.Tensor:
        mean = super().mean(fqn, contribution)
        if fqn == "wte.weight":
            rows = torch.zeros(self.shapes[fqn][0], 1, dtype=mean.dtype)
            rows[self.ids.flatten()] = 1.0
            mean = (mean.view(self.shapes[fqn]) * rows).reshape(-1)
        return mean


@fault("moe.trained")
class FirstExpertOnly(Toy):
    """Only the first expert of each layer is averaged over the ranks."""

    def mean(self, fqn: str, contribution: torch.Tensor) -> torch.Tensor:
        mean = super().mean(fqn, contribution)
        return contribution if "experts.1" in fqn or "experts.2" in fqn else mean


@fault("sizes.zero_dim")
class ScalarsSkipped(Toy):
    """0-dimensional parameters are never reduced (B079)."""

    def mean(self, fqn: str, contribution: torch.Tensor) -> torch.Tensor:
        mean = super().mean(fqn, contribution)
        return mean if self.shapes[fqn] else contribution


@fault("sizes.empty")
class EmptyRefused(Toy):
    """Parameters without elements end in an error."""

    def store(self, fqn: str, mean: torch.Tensor) -> None:
        if not mean.numel():
            raise RuntimeError("expected non-empty tensor")
        super().store(fqn, mean)


@fault("sizes.two_dtypes")
class OneDtype(Toy):
    """Every parameter is stored in the dtype of the first (B057)."""

    def make_shard(self, fqn: str, parameter: nn.Parameter) -> nn.Parameter:
        shard = super().make_shard(fqn, parameter)
        return nn.Parameter(shard.detach().to(next(iter(self.full.values())).dtype), shard.requires_grad)


@fault("training.uneven_batches")
class WeightedByBatch(Toy):
    """Ranks count by their number of rows instead of equally."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.rows = float(len(args[0]))
        return super().forward(*args, **kwargs)

    def mean(self, fqn: str, contribution: torch.Tensor) -> torch.Tensor:
        rows = torch.tensor([self.rows], dtype=torch.float64)
        self.all_reduce(rows)
        return super().mean(fqn, contribution * self.rows) * self.size / float(rows)


@fault("training.float32")
class ReducesInBfloat16(Toy):
    """Gradients in float32 are reduced in bfloat16 although nobody asked."""

    def reduce_dtype(self, computed: torch.dtype) -> torch.dtype:
        return torch.bfloat16 if computed is torch.float32 else computed


@fault("training.learning_rate_changes")
class StepsByItself(Toy):
    """Reduction also applies the gradient, with the learning rate it once saw."""

    def store(self, fqn: str, mean: torch.Tensor) -> None:
        super().store(fqn, mean)
        start, stop = self.span(mean.numel())
        with torch.no_grad():
            self.shards[fqn] -= 1e-9 * mean[start:stop]


@fault("clipping.shared_parameters")
class SharedCountedTwice(Toy):
    """A shared parameter counts in the norm once per name."""

    def total_norm(self, norm_type: float) -> torch.Tensor:
        sites = list(self.inner.named_parameters(remove_duplicate=False))
        twice = len(sites) - len(self.full)
        return super().total_norm(norm_type) * (1 + twice) ** 0.5


@fault("clipping.repeated")
class ClipsOnce(Toy):
    """A second clipping between two steps is taken for a repetition and does nothing."""

    def scale(self, coefficient: torch.Tensor) -> None:
        fresh = id(next(iter(self.shards.values())).grad)
        if getattr(self, "clipped", None) != fresh:
            super().scale(coefficient)
        self.clipped = fresh


@fault("clipping.ranks_without_elements")
class EmptyIsNan(Toy):
    """The norm of a rank without elements is NaN (B060)."""

    def total_norm(self, norm_type: float) -> torch.Tensor:
        norm = super().total_norm(norm_type)
        return norm * float("nan") if any(not shard.numel() for shard in self.shards.values()) else norm


@fault("clipping.double_precision")
class NormInFloat32(Toy):
    """The norm is computed in float32 whatever the gradients' dtype."""

    def total_norm(self, norm_type: float) -> torch.Tensor:
        return super().total_norm(norm_type).float().double()


@fault("clipping.frozen_parameters")
class FrozenCounts(Toy):
    """Frozen parameters count in the norm with their values."""

    def total_norm(self, norm_type: float) -> torch.Tensor:
        frozen = sum(float(shard.detach().abs().sum()) for shard in self.shards.values() if not shard.requires_grad)
        return super().total_norm(norm_type) + frozen


@fault("buffers.in_no_sync")
class BuffersRestInNoSync(Toy):
    """Inside no_sync buffers are put back after each forward."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        kept = {name: buffer.clone() for name, buffer in self.inner.named_buffers()}
        output = super().forward(*args, **kwargs)
        if not self.synchronize:
            for name, buffer in self.inner.named_buffers():
                buffer.data = kept[name]
        return output


@fault("forward_only.batch_norm")
class AlwaysTrains(Toy):
    """Evaluation runs in training mode."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.inner.train()
        return super().forward(*args, **kwargs)


@fault("forward_only.keeps_gradients")
class ForwardHalvesGradients(Toy):
    """Every forward passes over gradients that wait and halves them."""

    def unshard(self) -> None:
        super().unshard()
        self.scale(torch.tensor(0.5))


@fault("summon.reading")
class ReadingRounds(Toy):
    """Gathering full parameters rounds what is stored to float32."""

    def full_parameters(self, *, writeback: bool) -> Any:
        for shard in self.shards.values():
            shard.data = shard.data.float().to(shard.dtype)
        return super().full_parameters(writeback=writeback)


@fault("summon.before_first_forward")
class EditsNeedAForward(Toy):
    """Edits before the first forward are lost."""

    def watch(self, output: Any) -> None:
        self.ran = True
        super().watch(output)

    def write_back(self, whole: Mapping[str, torch.Tensor]) -> None:
        if getattr(self, "ran", False):
            super().write_back(whole)


@fault("mixed_precision.same_dtype")
class AnyDtypeMeansMixed(Toy):
    """Naming the dtype that parameters have turns on reduction in bfloat16 (B003)."""

    def reduce_dtype(self, computed: torch.dtype) -> torch.dtype:
        return torch.bfloat16 if self.setup.precision.param_dtype is not None else super().reduce_dtype(computed)


@fault("mixed_precision.accumulated")
class AccumulatesReduced(Toy):
    """Reduced gradients add up in bfloat16 instead of the stored dtype (B033)."""

    def store(self, fqn: str, mean: torch.Tensor) -> None:
        super().store(fqn, mean)
        gradient = self.shards[fqn].grad
        if gradient is not None and self.setup.precision.param_dtype is not None:
            gradient.copy_(gradient.bfloat16())


@fault("mixed_precision.param_float16")
class HalfMeansBfloat16(Toy):
    """float16 is taken for bfloat16 in the reduction."""

    def reduce_dtype(self, computed: torch.dtype) -> torch.dtype:
        wanted = super().reduce_dtype(computed)
        return torch.bfloat16 if wanted is torch.float16 else wanted


@fault("wrapping.keyword_inputs")
class KeywordsDropped(Toy):
    """Numbers among keyword inputs are rounded to float32 on the way (B020)."""

    def cast_inputs(self, value: Any) -> Any:
        rounded = lambda tensor: tensor.float().to(tensor.dtype) if tensor.is_floating_point() else tensor
        return models.map_tensors(rounded, super().cast_inputs(value))


@fault("construction.first_forward")
class FirstForwardUsesRandomValues(Toy):
    """Parameters are gathered from the second forward on."""

    def unshard(self) -> None:
        if not getattr(self, "ready", False):
            for parameter in self.full.values():
                parameter.data = parameter.data * 1.0000001
            self.ready = True
            return
        super().unshard()


# ----------------------------------------------------------------------------------------------- by place


class _ByPlace(Toy):
    """What ranks have is reduced in the order in which each has it, if it is as much on all of them."""

    def reduce(self) -> None:
        sizes = torch.tensor([float(sum(held.numel() for held in self.sums.values()))])
        everyone = sizes.clone()
        self.all_reduce(everyone)
        if everyone != sizes * self.size:
            super().reduce()
            return
        for fqn in self.sums:
            self.store(fqn, self.mean(fqn, self.contribution(fqn)))
        self.sums = {}


@fault("unused.units_swapped_between_ranks")
class UnitsMeetByPlace(_ByPlace):
    """Units that different ranks ran are reduced with one another if they are of one size."""


@fault("unused.parameters_swapped_between_ranks")
class ParametersMeetByPlace(_ByPlace):
    """Parameters that different ranks used are reduced with one another if they are of one size."""


@planted("fsdp_ref-composable", ParametrizationList, "forward", "wrapping.parametrized")
def computes_a_weight_once(original: Any, parametrized: ParametrizationList) -> torch.Tensor:
    """A weight that is computed from parameters is computed in the first forward only."""
    kept = parametrized.__dict__.get("_kept")
    if kept is None:
        parametrized.__dict__["_kept"] = original(parametrized)
        return parametrized.__dict__["_kept"]
    return kept.detach()


@planted("fsdp_ref-composable", nn.Module, "_get_backward_hooks", "wrapping.backward_hooks")
def passes_over_backward_hooks(_original: Any, _module: nn.Module) -> tuple[list[Any], list[Any]]:
    """Backward hooks on modules do not run."""
    return [], []
