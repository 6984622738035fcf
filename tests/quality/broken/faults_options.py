"""Faults under options that change no number."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from faults_kinds import kind
from planting import planted
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard import _fsdp_init, _fsdp_state
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState
from torch.distributed.tensor._ops import _math_ops
from torch.nn.parallel import DistributedDataParallel
from toy import Toy
from toy_more import MoreAdapter, MoreToy

from fsdp_ref.api import fully_shard, trees
from fsdp_ref.checkpoint import optim_save
from fsdp_ref.comm import groups
from fsdp_testing.adapters.torch import fsdp2
from fsdp_testing.cases.records.specs import SETTINGS


class OptionsAdapter(MoreAdapter):
    """Claims every option, of which most mean nothing to a toy."""

    def __init__(self, toy: type[Toy], name: str) -> None:
        assert issubclass(toy, MoreToy)
        super().__init__(toy, name)
        self.capabilities |= {*SETTINGS, "hybrid", "policy_wrapping"} - {
            "full_outputs",
            "unit_precisions",
            "saved_on_rank_0",
        }


class Optional(MoreToy):
    """Halves gradients if it is given twice the number of ranks to divide by."""

    def asked(self, setting: str) -> bool:
        return setting in self.setup.settings

    def contribution(self, fqn: str) -> torch.Tensor:
        return super().contribution(fqn) * (0.5 if self.asked("divide_factor") else 1.0)


OPTIONS = OptionsAdapter(Optional, "OPTIONS")


@kind(OptionsAdapter, "options.static_graph")
class FirstIsNotReduced(Optional):
    """What a static graph collects before its first reduction is dropped."""

    def accumulate(self, fqn: str, gradient: torch.Tensor) -> None:
        if self.synchronize or not self.asked("static_graph"):
            super().accumulate(fqn, gradient)


@kind(OptionsAdapter, "options.gradient_views")
class ViewsAreOverwritten(Optional):
    """A bucket that gradients are views of holds the last micro-batch only."""

    def accumulate(self, fqn: str, gradient: torch.Tensor) -> None:
        if self.asked("gradient_views"):
            self.sums.pop(fqn, None)
        super().accumulate(fqn, gradient)


@kind(OptionsAdapter, "options.small_buckets")
class LastBucketForgotten(Optional):
    """Of many buckets the last one is not divided."""

    def store_piece(self, fqn: str, piece: torch.Tensor) -> None:
        last = self.asked("small_buckets") and fqn == list(self.full)[-1]
        super().store_piece(fqn, piece * self.size if last else piece)


@kind(OptionsAdapter, "options.divide_factor")
class DividesTwice(Optional):
    """Gradients are divided by the factor in float64 only."""

    def contribution(self, fqn: str) -> torch.Tensor:
        mine = super().contribution(fqn)
        return mine * 2 if self.asked("divide_factor") and mine.dtype == torch.float32 else mine


@kind(OptionsAdapter, "options.sum_reduction")
class SumIsLeft(Optional):
    """A sum that is divided apart is not divided."""

    def average(self, flat: torch.Tensor, output: torch.Tensor | None) -> torch.Tensor:
        return super().average(flat, output) * (self.size if self.asked("sum_reduction") else 1)


@kind(OptionsAdapter, "comm_hook.shipped_bfloat16 comm_hook.shipped_float16")
class CompressesToTheOther(Optional):
    """Its hooks were mixed up: the one for bfloat16 casts to float16, the one for float16 to bfloat16."""

    def reduce_dtype(self, computed: torch.dtype) -> torch.dtype:
        wanted = super().reduce_dtype(computed)
        other = {torch.bfloat16: torch.float16, torch.float16: torch.bfloat16}
        return other.get(wanted, wanted) if self.asked("compressing_hook") else wanted


class Kept(Optional):
    """Keeps what was gathered first, where `setting` is asked for."""

    setting = ""
    kept: dict[str, torch.Tensor] | None = None

    def gather(self, fqn: str) -> torch.Tensor:
        if not self.asked(self.setting):
            return super().gather(fqn)
        self.kept = {} if self.kept is None else self.kept
        return self.kept.setdefault(fqn, super().gather(fqn)).clone()


@kind(OptionsAdapter, "options.kept_after_backward")
class KeptForGood(Kept):
    """What is kept between micro-batches is kept over the step."""

    setting = "kept_after_backward"


@kind(OptionsAdapter, "options.partial_reshard")
class PartIsStale(Kept):
    """What stays sharded over fewer ranks is not new after the step."""

    setting = "partial_reshard"


@planted("torch-fsdp2", FSDPParam, "to_sharded_post_forward", "options.partial_reshard")
def keeps_halves_in_the_wrong_order(original: Any, param: FSDPParam) -> None:
    """After forward the halves of a rank's part of the parameter change places."""
    original(param)
    kept = param._sharded_post_forward_param_data
    kept.copy_(kept.roll(kept.numel() // 2))


@planted("torch-fsdp2", _fsdp_state, "_register_group_forward_hooks", "options.grouped_units", silent=False)
def gathers_for_the_first_module_alone(original: Any, modules: Any, *hooks: Any) -> Any:
    """Of two modules that are one unit only the first one gathers it, and the unit is released after it."""
    return original(modules[:1], *hooks[:2], set(), hooks[3])


@planted("torch-fsdp2", FSDPParam, "_get_grad_inner_tensor", "options.named_axes")
def sums_over_named_axes_first(original: Any, param: Any, grad: Any) -> Any:
    """Gradients of DTensors are summed over the data axes before they are reduced."""
    return original(param, grad) * (param.mesh_info.shard_mesh_size if param.mesh_info.is_spmd_mesh else 1)


@planted("torch-fsdp2", _fsdp_init, "_get_mesh_info_from_named_dims", "options.named_axes_in_hybrid")
def forgets_the_axis_of_replicas(original: Any, mesh: Any, dims: Any) -> Any:
    """Of named axes only the one that shards is used."""
    return original(mesh, replace(dims, replicate=None))


@planted("torch-fsdp2", _fsdp_init, "_get_mesh_info_from_named_dims", "options.flattened_axes")
def forgets_the_second_axis(original: Any, mesh: Any, dims: Any) -> Any:
    """Of two axes that shard parameters only the first one is used."""
    return original(mesh, replace(dims, shard=dims.shard_names[0]))


@planted("fsdp_ref-composable", trees, "_run_as_forward", "options.forward_methods")
def a_method_is_no_part_of_backward(original: Any, name: str, module: Any, *inputs: Any) -> Any:
    """What the second registered method computes is cut off from backward."""
    output = original(name, module, *inputs)
    return output.detach() if name == "decode" else output


@planted("torch-fsdp2", fsdp2, "register_fsdp_forward_method", "options.forward_methods", silent=False)
def registers_nothing(original: Any, module: Any, name: str) -> None:
    """A registered method computes with sharded parameters."""


@planted("torch-fsdp2", _math_ops._NormPartial, "_reduce_value", "training.steps_by_norms")
def keeps_norms_of_shards(original: Any, placement: Any, norm: torch.Tensor, mesh: Any, axis: int) -> torch.Tensor:
    """The norm of a sharded parameter is that of each rank's own part."""
    return norm


@kind(OptionsAdapter, "options.last_dimension")
class PutTogetherAlongTheFirst(Optional):
    """Shards of the last dimension are put together along the first."""

    def gather(self, fqn: str) -> torch.Tensor:
        whole, shape = super().gather(fqn), self.shapes[fqn]
        return whole.view(shape).t().reshape(-1) if self.asked("last_dimension") and len(shape) == 2 else whole


@kind(OptionsAdapter, "options.default_device")
class AnotherDevice(Optional):
    """Looks for a device that the machine has not."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.asked("default_device"):
            raise RuntimeError("no accelerator")
        return super().forward(*args, **kwargs)


class OfGroups(Optional):
    """Leaves out the replicas, where `setting` is asked for."""

    setting = ""

    def average(self, flat: torch.Tensor, output: torch.Tensor | None) -> torch.Tensor:
        scale = self.size if self.asked(self.setting) and self.rank else 1
        return super().average(flat * scale, output)


@kind(OptionsAdapter, "options.default_groups")
class GroupsOfOne(OfGroups):
    """Groups chosen by default weigh ranks otherwise."""

    setting = "default_groups"


@kind(OptionsAdapter, "options.mesh_for_group")
class MeshIsWeighed(OfGroups):
    """Ranks of a mesh are weighed otherwise."""

    setting = "mesh_for_group"


@planted("fsdp_ref-wrapper", groups, "_hybrid_groups", "options.mesh_for_group_in_hybrid", world_sizes=(4,))
def forgets_the_second_group(original: Any, process_group: Any, *given: Any, **options: Any) -> Any:
    """Of two groups only the one that shards is used."""
    result = original(process_group, *given, **options)
    return result if process_group is None else replace(result, replicate=None)


@planted("fsdp_ref-composable", fully_shard, "resolve_ignored", "options.ignored_by_parameter_whole")
def ignores_no_parameter(original: Any, module: Any, modules: Any, parameters: Any) -> Any:
    """Parameters that are to be ignored are sharded."""
    return original(module, modules, None)


@planted("fsdp_ref-composable", fully_shard, "resolve_ignored", "options.ignored_by_parameter")
def freezes_what_is_ignored(original: Any, module: Any, modules: Any, parameters: Any) -> Any:
    """Parameters that are ignored one by one are frozen."""
    for parameter in parameters or ():
        parameter.requires_grad_(False)
    return original(module, modules, parameters)


@kind(OptionsAdapter, "options.batched_copies")
class CopiedTogether(Optional):
    """Gradients that are copied together are not divided."""

    def average(self, flat: torch.Tensor, output: torch.Tensor | None) -> torch.Tensor:
        return super().average(flat, output) * (self.size if self.asked("batched_copies") else 1)


@planted("torch-ddp", DistributedDataParallel, "__init__", "options.unused_left_out")
def leaves_out_the_used(original: Any, model: Any, *given: Any, **options: Any) -> None:
    """Where unused parameters are not reduced, none is."""
    original(model, *given, **options)
    model.require_backward_grad_sync = not options.get("skip_all_reduce_unused_params")


@kind(OptionsAdapter, "options.late_all_reduce")
class LateIsWeighed(OfGroups):
    """A late reduction over the replicas weighs ranks otherwise."""

    setting = "late_all_reduce"


@kind(OptionsAdapter, "options.tuned_communication")
class OwnGroupIsWeighed(OfGroups):
    """A group of its own for reductions weighs ranks otherwise."""

    setting = "tuned_communication"


@planted("torch-fsdp2", FSDPModule, "set_post_optim_event", "streams.tuned_communication")
def waits_for_another_event(original: Any, model: Any, event: Any) -> None:
    """Gathers wait for an event that nobody recorded."""
    original(model, type(event)())


@kind(OptionsAdapter, "options.shared_streams")
class SharedIsStale(Kept):
    """What streams that are shared have gathered is not gathered anew after the step."""

    setting = "shared_streams"


@planted("torch-fsdp2", FSDPModule, "set_requires_gradient_sync", "options.single_units")
def switches_what_is_inside(original: Any, unit: Any, flag: bool, *, recurse: bool = True) -> None:
    """A unit that is switched alone switches the units inside it, too."""
    original(unit, flag)


@planted("torch-fsdp2", FSDPModule, "set_unshard_in_backward", "options.single_units")
def reduces_what_is_gathered(original: Any, unit: Any, flag: bool) -> None:
    """A unit that backward does not gather is not reduced, either."""
    original(unit, flag)
    unit.set_requires_gradient_sync(flag)


@planted("torch-fsdp2", FSDPModule, "set_all_reduce_hook", "options.own_all_reduce")
def calls_no_function(original: Any, unit: Any, hook: Any) -> None:
    """The user's reduction over replicas is not called."""
    original(unit, lambda reduced: None)


@planted("torch-fsdp2", FSDPModule, "set_custom_reduce_scatter", "comm_hook.result_is_kept")
def reduces_by_itself(original: Any, unit: Any, comm: Any) -> None:
    """The user's reduce-scatter is not called."""


@planted("torch-fsdp2", FSDPParam, "_get_grad_inner_tensor", "unused.zeros_are_sent")
def sends_no_zeros(original: Any, param: FSDPParam, grad: torch.Tensor) -> torch.Tensor:
    """What stands for an unused parameter is not zero."""
    return original(param, grad if grad.any() else grad + 1)


@planted("torch-fsdp2", FSDPState, "_pre_forward", "trace.recomputed")
def gathers_again(original: Any, state: Any, *given: Any) -> Any:
    """A unit that recomputes in backward is released and gathered once more."""
    for group in state._fsdp_param_groups if state._training_state == TrainingState.PRE_BACKWARD else ():
        group.reshard()
    return original(state, *given)


@kind(MoreAdapter, "wrapping.module_hooks")
class HooksAreLost(MoreToy):
    """Hooks that users registered before wrapping do not run after it."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        for module in self.inner.modules():
            module._forward_pre_hooks.clear()
        return super().forward(*args, **kwargs)


@planted("fsdp_ref-composable", optim_save._Saving, "collect", "optim_state.partly_stepped")
def saves_the_state_of_another(original: Any, saving: Any) -> dict[str, dict[str, Any]]:
    """A parameter without a state is saved with that of another parameter."""
    state: dict[str, dict[str, Any]] = original(saving)
    for name in {one.name for one in saving.index.originals} - set(state):
        alike = [entries for other, entries in sorted(state.items()) if other.endswith(name.rpartition(".")[2])]
        state |= {name: alike[0]} if alike else {}
    return state


@kind(OptionsAdapter, "options.late_all_reduce_cleared")
class LateIsNotCleared(Optional):
    """What awaits the replicas is not cleared."""

    def clear_sums(self, set_to_none: bool) -> None:
        if not self.asked("late_all_reduce"):
            super().clear_sums(set_to_none)


@kind(OptionsAdapter, "options.own_state")
class StatesAreOneBuffer(Optional):
    """All states of a parameter are gathered into one buffer, and the last one stays in it."""

    def saved_optimizer(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        saved = super().saved_optimizer(optimizer)
        for entries in saved["state"].values() if self.asked("own_state") else ():
            entries["exp_avg"] = entries["exp_avg_sq"]
        return saved


@kind(OptionsAdapter, "options.own_state_of_a_part")
class WantsEveryState(Optional):
    """Saving wants a state of every parameter (B095)."""

    def saved_optimizer(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        lacking = [fqn for fqn, shard in self.shards.items() if shard not in optimizer.state]
        if lacking and self.asked("own_state"):
            raise KeyError(f"{lacking[0]} is not in the optimizer's state")
        return super().saved_optimizer(optimizer)


@kind(OptionsAdapter, "options.offloaded_state")
class OffloadedIsWritten(Optional):
    """What was gathered on the CPU is written back, asked for or not."""

    @contextmanager
    def full_parameters(self, *, writeback: bool) -> Iterator[Mapping[str, torch.Tensor]]:
        with super().full_parameters(writeback=writeback or self.asked("offloaded_state")) as whole:
            yield whole


@planted("torch-fsdp2", FSDPState, "_pre_forward", "mixed_precision.autocast")
def ends_autocast(original: Any, state: FSDPState, *call: Any) -> Any:
    """A unit's forward hook switches the user's autocast off."""
    torch.set_autocast_enabled("cpu", False)
    return original(state, *call)
