"""Faults of what few ask: models in 16 bits or of one unit, values that are not finite, records as inputs, calls of parts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest import mock

import torch
from fault import fault
from planting import planted
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState
from torch.distributed.tensor import DTensor
from toy_more import MoreToy

from fsdp_ref.access.summon_grads import FullGradients
from fsdp_ref.build import resolve
from fsdp_ref.checkpoint import model_state, optim_load, settings
from fsdp_ref.checkpoint.shards import Spread
from fsdp_ref.comm.division import DivideFactors
from fsdp_ref.fence import outside_calls
from fsdp_ref.handle import accumulated, writeback
from fsdp_ref.handle.accumulated import Accumulated
from fsdp_ref.handle.gradients import Gradients
from fsdp_ref.runtime import calls, forward
from fsdp_ref.runtime.grad_sync import GradSync
from fsdp_ref.storage import precision
from fsdp_ref.storage.precision import BufferCaster, Precision
from fsdp_ref.training import clip

SOUND, COMPOSABLE = "fsdp_ref-wrapper", "fsdp_ref-composable"


def _is_low(dtype: torch.dtype) -> bool:
    return dtype.itemsize == 2


def _rounded(values: Any) -> Any:
    if not isinstance(values, torch.Tensor) or not _is_low(values.dtype):
        return values
    return values.to(torch.float8_e5m2).to(values.dtype)


@planted(SOUND, Precision, "of", "mixed_precision.low_gradients")
def gradients_are_always_cast_back(original: Any, cls: Any, dtype: torch.dtype, policy: Any) -> Precision:
    """Gradients get the dtype of the stored parameters, though the user wants them as they were reduced."""
    return replace(original(cls, dtype, policy), keep_reduced=False)


@planted(SOUND, Precision, "of", "mixed_precision.low_gradients_as_reduced")
def gradients_keep_the_dtype_of_computation(original: Any, cls: Any, dtype: torch.dtype, policy: Any) -> Precision:
    """Gradients that stay in low precision are reduced in the dtype of computation."""
    precision: Precision = original(cls, dtype, policy)
    return replace(precision, reduce=precision.compute) if precision.keep_reduced else precision


@planted(COMPOSABLE, forward, "_inputs", "mixed_precision.uncast_inputs")
def the_root_casts_always(original: Any, unit: Any, frame: Any, args: Any, kwargs: Any) -> Any:
    """A root casts its inputs though the user does not want that."""
    args, kwargs = original(unit, frame, args, kwargs)
    dtype = unit.config.mixed_precision.param_dtype
    return precision.cast_floating((args, kwargs), dtype) if frame.outermost and dtype else (args, kwargs)


@planted(SOUND, Precision, "of", "stored_low.trained")
def computes_in_the_other_16_bits(original: Any, cls: Any, dtype: torch.dtype, policy: Any) -> Precision:
    """A model in bfloat16 computes in float16."""
    precision: Precision = original(cls, dtype, policy)
    return replace(precision, compute=torch.float16) if precision.compute == torch.bfloat16 else precision


@planted(COMPOSABLE, Precision, "of", "stored_low.reduced_in_float32", world_sizes=(3,))
def reduces_as_they_are_stored(original: Any, cls: Any, dtype: torch.dtype, policy: Any) -> Precision:
    """Gradients of a model in 16 bits are reduced in its own dtype, whatever the policy says."""
    precision: Precision = original(cls, dtype, policy)
    return replace(precision, reduce=dtype) if _is_low(dtype) else precision


@planted(COMPOSABLE, Accumulated, "add_reduced", "stored_low.accumulated")
def replaces_low_sums(original: Any, self: Any, grad_S: torch.Tensor, uses: Any) -> None:
    """A reduced gradient in 16 bits takes the place of the one before it."""
    if _is_low(grad_S.dtype):
        self.reduced_S = None
    original(self, grad_S, uses)


@planted(SOUND, Accumulated, "add_local", "stored_low.accumulated_in_float32")
def rounds_local_sums(original: Any, self: Any, grads: Any) -> None:
    """Local gradients of a model in 16 bits add up in its own dtype."""
    original(self, grads)
    if _is_low(self.precision.original):
        self.local_F.copy_(self.local_F.to(self.precision.original))


@planted(COMPOSABLE, Gradients, "_versions", "stored_low.zeroed")
def counts_no_edits(original: Any, self: Any) -> list[int]:
    """Edits in place of a sum go unnoticed, so that its rounding error is added to what comes next."""
    return []


@planted(SOUND, clip, "_local_sums", "stored_low.clipped")
def counts_half_of_the_low_gradients(original: Any, grads: Any, p: float, device: torch.device) -> torch.Tensor:
    """The norm of gradients in 16 bits leaves out every second parameter."""
    return original(grads[::2] if grads and _is_low(grads[0].dtype) else grads, p, device)


@planted(COMPOSABLE, model_state.OpenState, "_converted", "stored_low.reloaded_full")
def rounds_what_it_saves(original: Any, *args: Any, **kwargs: Any) -> Any:
    """A whole parameter in 16 bits is saved in 8."""
    return _rounded(original(*args, **kwargs))


@planted(SOUND, Spread, "entry", "stored_low.reloaded_sharded")
def rounds_saved_rows(original: Any, self: Any, rows: Any, *args: Any, **kwargs: Any) -> Any:
    """Rows in 16 bits are saved in 8."""
    return original(self, _rounded(rows), *args, **kwargs)


@planted(SOUND, accumulated, "send_gradient_home", "stored_low.offloaded")
def rounds_gradients_on_the_way(original: Any, grad_S: torch.Tensor, home: torch.device, dtype: torch.dtype) -> Any:
    """Gradients in 16 bits lose digits on their way to the host."""
    return _rounded(original(grad_S, home, dtype))


# ----------------------------------------------------------------------------------- models that are one unit


@planted(SOUND, model_state.OpenState, "_converted", "full_state_dict.one_unit sharded_state_dict.one_unit")
def saves_zeros_of_a_lone_unit(original: Any, self: Any, value: torch.Tensor, *args: Any) -> Any:
    """The parameters of a model that is one unit are saved as zeros."""
    root = self._unit.root
    return original(self, torch.zeros_like(value) if root is not None and len(root.units) == 1 else value, *args)


@planted(COMPOSABLE, settings, "_agree", "local_state_dict.one_unit")
def needs_a_second_unit(original: Any, units: Any, values: list[Any]) -> None:
    """The form of states can be set only where there are several units."""
    original(units, [values[1], *values[1:]])


# ------------------------------------------------------------------------------------- values, records and parts


@planted(SOUND, model_state.OpenState, "_converted", "full_state_dict.not_finite")
def saves_what_is_finite(original: Any, *args: Any) -> Any:
    """A whole parameter is saved with numbers in place of NaN and infinity."""
    return original(*args).nan_to_num()


@planted(COMPOSABLE, Spread, "entry", "sharded_state_dict.not_finite")
def saves_finite_rows(original: Any, self: Any, rows: torch.Tensor, *args: Any) -> Any:
    """Rows are saved with numbers in place of NaN and infinity."""
    return original(self, rows.nan_to_num(), *args)


@fault("local_state_dict.not_finite")
class SavesFiniteShards(MoreToy):
    """Raw shards are saved with numbers in place of NaN and infinity."""

    def saved_locally(self) -> dict[str, torch.Tensor]:
        return {name: value.nan_to_num() for name, value in super().saved_locally().items()}


@planted(SOUND, optim_load, "_copied", "optim_state.entries_of_users")
def loads_numbers_alone(original: Any, value: Any) -> Any:
    """A tensor in an optimizer's state that is no moment is loaded as zeros."""
    return torch.zeros_like(value) if isinstance(value, torch.Tensor) and value.ndim else original(value)


@planted(SOUND, optim_load._Loading, "param_groups", "optim_state.without_groups")
def takes_no_rate(original: Any, self: Any) -> Any:
    """A state without groups sets learning rates to 0."""
    groups = original(self)
    return groups if "param_groups" in self.saved else [{**group, "lr": 0.0} for group in groups]


@planted(SOUND, model_state, "_take_whole", "full_state_dict.in_dtensors")
def keeps_own_values(original: Any, unit: Any, param: Any, state: dict[str, Any], key: str, errors: list[str]) -> None:
    """A DTensor among whole values is passed over."""
    if isinstance(state.get(key), DTensor):
        state[key] = param


@planted(SOUND, precision, "_map_dataclass", "inputs.dataclasses")
def leaves_records_alone(original: Any, value: Any, fn: Any) -> Any:
    """Tensors in dataclasses are not cast."""
    return value


@planted(COMPOSABLE, outside_calls, "_refuse_sharded", "parts.called_inside")
def lets_parts_compute_with_shards(original: Any, module: Any, args: Any) -> None:
    """A module that is called outside its unit's forward computes with what it has."""


@planted(SOUND, writeback, "_absorb_data", "parts.data_of_another_shape")
def forgets_data_of_another_shape(original: Any, handle: Any) -> bool:
    """What a user gave a parameter is dropped if its shape does not fit."""
    for param, view in zip(handle.originals.params, handle.originals.shard_views()):
        if param.shape != view.shape:
            param.data = view
    return original(handle)


@planted(SOUND, DivideFactors, "for_world", "mixed_precision.largest_numbers mixed_precision.smallest_numbers")
def divides_after_the_sum(original: Any, cls: Any, world_size: int) -> DivideFactors:
    """Gradients are divided once, after their sum."""
    return DivideFactors(1.0, float(world_size))


@planted(SOUND, DivideFactors, "for_world", "mixed_precision.smallest_numbers")
def doubles_the_first_factor_once(original: Any, cls: Any, world_size: int) -> DivideFactors:
    """Of eight ranks the gradients are divided by two before their sum, not by four."""
    return DivideFactors(2.0, 4.0) if world_size == 8 else original(world_size)


@planted(SOUND, BufferCaster, "__deepcopy__", "conversion.copied_state")
def forgets_dtypes_of_buffers(original: Any, caster: BufferCaster, memo: Any) -> BufferCaster:
    """A deep copy does not know in which dtype its buffers are stored."""
    copied: BufferCaster = original(caster, memo)
    copied._originals = dict(caster._originals)
    return copied


@planted(SOUND, GradSync, "_built_in", "mixed_precision.precise_backward")
def reduces_in_low_precision(original: Any, sync: GradSync, unit: Any, handle: Any, grads: Any) -> None:
    """Gradients of a backward in evaluation mode are reduced in the dtype of training."""
    with mock.patch.object(handle, "full_precision", False):
        original(sync, unit, handle, grads)


@planted(SOUND, calls, "write_back", "training.strided_changed_in_forward")
def keeps_edits_by_shape(original: Any, handle: Any, indices: Any) -> None:
    """What a module changes in forward is cut for the shard as if each parameter were contiguous."""
    indices = list(indices)
    original(handle, indices)
    if handle.needs_buffer and handle.sharded:
        start = handle.shard_map.shard_span(handle.shard_rank).start
        targets, sources = handle.originals.shard_views(), handle.compute_views()
        for index in indices:
            offset, numel = handle.originals.pieces.get(index, (0, 0))
            first = start + offset - handle.layout.starts[index]
            targets[index].copy_(sources[index].reshape(-1)[first : first + numel])


@planted(SOUND, Gradients, "_absorb", "zero_grad.dropped_then_unused")
def counts_dropped_gradients_as_used(original: Any, grads: Gradients, params: Any, changed: list[int]) -> None:
    """A gradient that is set to None is one of zeros after the next backward."""
    used = list(grads.sum.used)
    original(grads, params, changed)
    for index in changed:
        grads.sum.used[index] = used[index] or grads.sum.used[index]


@planted(SOUND, Gradients, "_absorb", "zero_grad.given_to_unused")
def counts_given_gradients_as_unused(original: Any, grads: Gradients, params: Any, changed: list[int]) -> None:
    """A gradient that a user gives to a parameter without one is gone after the next backward."""
    used = list(grads.sum.used)
    original(grads, params, changed)
    grads.sum.used = [now and was for now, was in zip(grads.sum.used, used, strict=True)]


@planted(SOUND, FullGradients, "keep_edits", "summon.gradients_dropped summon.gradients_given")
def keeps_who_had_gradients(original: Any, full: FullGradients, params: Any) -> None:
    """Which parameters have a gradient is as it was when gradients were gathered."""
    used = list(full._used)
    original(full, params)
    grads = full._handle.grads
    if used and grads.local_F is None:
        grads.sum.used = used


@planted(
    SOUND,
    FullGradients,
    "keep_edits",
    "summon.gradients summon.gradients_replaced summon.gradients_dropped summon.gradients_given",
)
def keeps_what_was_gathered(original: Any, full: FullGradients, params: Any) -> None:
    """Gradients that are edited where they are gathered are as before afterwards."""


def _whole_numbers(self: FSDPParam) -> bool:
    return not self.orig_dtype.is_floating_point


@planted(
    "torch-fsdp2",
    FSDPParam,
    "init_dtype_attrs",
    "sizes.integers_in_low_precision",
)
def integers_are_lowered(original: Any, self: FSDPParam, policy: Any) -> None:
    """Parameters of whole numbers are gathered in the dtype of computation."""
    original(self, policy)
    self.param_dtype = policy.param_dtype if _whole_numbers(self) else self.param_dtype


@planted("torch-fsdp2", FSDPParam, "to_unsharded", "sizes.integers sizes.integers_in_shards")
def integers_are_gathered_as_zeros(original: Any, self: FSDPParam) -> None:
    """Parameters of whole numbers are gathered into memory that is then cleared."""
    original(self)
    if _whole_numbers(self):
        self._unsharded_param.data.zero_()


@planted(
    "torch-fsdp2",
    FSDPParamGroup,
    "post_backward",
    "parts.chunked_loss parts.chunked_forward parts.chunked_forward_grouped",
)
def keeps_the_last_chunk_alone(original: Any, group: FSDPParamGroup, *args: Any) -> None:
    """A unit that is reduced again before the step loses what it had reduced."""
    for parameter in group.fsdp_params:
        parameter.sharded_param.grad = None
    original(group, *args)


@planted(
    "torch-fsdp2",
    FSDPState,
    "_force_complete_incomplete_states",
    "parts.chunked_loss_grouped",
    silent=False,
)
def waits_for_the_module_that_runs_later(original: Any, state: FSDPState, output: Any) -> Any:
    """A unit of two modules is not finished where the model's forward ends and only one of them has run."""
    return output


@planted(
    "torch-fsdp2",
    FSDPParamGroup,
    "pre_forward",
    "activation_checkpointing.offloaded activation_checkpointing.offloaded_in_low_precision",
)
def knows_a_weight_by_what_autograd_saves(original: Any, group: FSDPParamGroup, *args: Any) -> Any:
    """A unit notes which weights autograd saves, and takes one that is copied instead for unused: its gradient is dropped."""
    given = original(group, *args)
    if torch._C._autograd._top_saved_tensors_default_hooks(False) is not None and torch.is_grad_enabled():
        for parameter in group.fsdp_params:
            parameter.unsharded_param.register_hook(torch.zeros_like)
    return given


@planted(SOUND, resolve, "check_broadcastable", "construction.rank_0_without_device")
def refuses_on_the_cpu(original: Any, unit: Any, device: torch.device) -> None:
    """A model on the CPU is refused, although it computes there, as by torch's FSDP1."""
    original(unit, torch.device("meta"))


@planted(SOUND, writeback, "_copy_full", "summon.data_assigned_after_forward")
def assigned_while_whole(original: Any, handle: Any, values: dict[int, torch.Tensor]) -> None:
    """What is assigned while parameters are whole changes the ranks' copies, and no shard."""
    original(handle, {})
