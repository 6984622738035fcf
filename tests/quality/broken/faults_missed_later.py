"""More faults that somebody planted without knowing the checks, and that no check noticed then."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import fields, replace
from typing import Any

import torch
from fault import fault
from faults_claims import StartingAdapter, StartingToy
from faults_kinds import kind
from planting import planted
from torch.distributed import _state_dict_utils
from torch.distributed.checkpoint import state_dict
from torch.distributed.fsdp._fully_shard import _fsdp_init, _fsdp_param, _fsdp_param_group
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState
from toy import Toy
from toy_more import MoreToy

from fsdp_ref.autograd.graph_ties import GraphSide
from fsdp_ref.build import materialize, targets
from fsdp_ref.build.ignored import Ignored
from fsdp_ref.checkpoint import model_state, optim_load, optim_source
from fsdp_ref.checkpoint.rows import Rows
from fsdp_ref.checkpoint.shards import Spread
from fsdp_ref.handle import param_hooks, writeback
from fsdp_ref.handle.accumulated import Accumulated
from fsdp_ref.handle.gradients import Gradients
from fsdp_ref.handle.originals import Originals
from fsdp_ref.runtime import calls, forward, unit
from fsdp_ref.runtime.root import Root
from fsdp_ref.storage import precision
from fsdp_ref.storage.precision import BufferCaster

SOUND, COMPOSABLE = "fsdp_ref-wrapper", "fsdp_ref-composable"

_nothing = lambda _: lambda _handle: None

# --------------------------------------------------------------------------------------------------- dtypes

_PRECISE = "mixed_precision.precise_evaluation mixed_precision.precise_evaluation_with_buffers"


@planted(SOUND, targets, "_full_precision", "mixed_precision.batch_norms mixed_precision.batch_norms_beside_buffers")
def lowers_batch_norms(original: Any, *_: Any) -> Any:
    """A policy makes units of batch norms like those of other modules."""
    return []


@planted(SOUND, Ignored, "union", "options.ignored_by_units")
def takes_what_inner_units_ignore(original: Any, self: Any, others: Any) -> Any:
    """A unit takes the parameters that units inside it ignore."""
    return self


@planted(COMPOSABLE, precision, "_map_dataclass", "inputs.rare_dataclasses")
def keeps_fields_alone(original: Any, value: Any, fn: Any) -> Any:
    """Of a dataclass that is a mapping, fields alone are cast and kept."""
    if not isinstance(value, dict):
        return original(value, fn)
    return type(value)(**{item.name: fn(getattr(value, item.name)) for item in fields(value)})


@planted(SOUND, forward, "_set_precision", _PRECISE)
def evaluates_in_low_precision(original: Any, unit: Any) -> None:
    """Evaluation computes in the precision of training."""


@planted(COMPOSABLE, BufferCaster, "restore", "mixed_precision.precise_evaluation_with_buffers")
def evaluates_with_low_buffers(original: Any, self: Any) -> None:
    """Buffers stay in the precision of training in evaluation."""


@planted(SOUND, BufferCaster, "original_dtype", "full_state_dict.buffer_dtypes")
def saves_lowered_buffers(original: Any, self: Any, *place: Any) -> None:
    """A state has buffers in the dtype in which they are held."""


@planted(COMPOSABLE, BufferCaster, "__init__", "mixed_precision.ignored_buffers")
def lowers_what_is_ignored(original: Any, self: Any, modules: Any, dtype: Any) -> None:
    """A unit casts the buffers of every module below it."""
    below = dict.fromkeys(inner for module in modules for inner in module.modules())
    original(self, tuple(below), dtype)


@planted(COMPOSABLE, forward, "_inputs", "mixed_precision.outputs")
def leaves_outputs_as_they_are(original: Any, unit: Any, frame: Any, args: Any, kwargs: Any) -> Any:
    """The root hands on its outputs in the dtype that it computed in."""
    inputs = original(unit, frame, args, kwargs)
    frame.cast_back = None
    return inputs


@planted(SOUND, forward, "_inputs", "mixed_precision.of_units")
def casts_as_the_root_does(original: Any, unit: Any, frame: Any, args: Any, kwargs: Any) -> Any:
    """Every unit casts its inputs to the root's dtype."""
    dtype = frame.root.unit.config.mixed_precision.param_dtype
    return original(unit, frame, args, kwargs) if dtype is None else forward.cast_floating((args, kwargs), dtype)


@planted(SOUND, unit.Unit, "_frees_after_backward", "options.unit_strategies")
def keeps_after_backward_what_another_strategy_keeps(original: Any, self: Any, handle: Any) -> bool:
    """A unit whose strategy is not the root's stays gathered after backward."""
    return original(self, handle) and self.config.reshards_after_forward == self.root.unit.config.reshards_after_forward


@planted(SOUND, forward, "_inputs", "mixed_precision.unit_inputs")
def casts_for_every_unit(original: Any, unit: Any, frame: Any, args: Any, kwargs: Any) -> Any:
    """Every unit casts its inputs, not the root alone."""
    args, kwargs = original(unit, frame, args, kwargs)
    dtype = unit.config.mixed_precision.param_dtype
    return (args, kwargs) if dtype is None else forward.cast_floating((args, kwargs), dtype)


@planted(SOUND, forward, "cast_floating", "inputs.containers")
def casts_into_dictionaries(original: Any, value: Any, dtype: torch.dtype) -> Any:
    """Whatever mapping inputs are in, they are in a dictionary once they are cast."""
    cast = original(value, dtype)
    plain = isinstance(cast, dict)
    return {k: dict(v) if isinstance(v, OrderedDict) else v for k, v in cast.items()} if plain else cast


@planted(SOUND, calls, "write_back", "mixed_precision.changed_in_forward")
def rounds_what_was_not_changed(original: Any, handle: Any, indices: Any) -> None:
    """An edit in forward rounds every element of the parameter to the dtype of computation."""
    low = handle.compute_dtype
    for index in indices if low != handle.precision.original else ():
        shard = handle.originals.shard_views()[index]
        shard.copy_(shard.to(low))
    original(handle, indices)


# ------------------------------------------------------------------------------------ forwards and backwards


@planted(SOUND, writeback, "keep_full_edits", "summon.changed_in_place", also=((unit, "keep_full_edits", _nothing),))
def loses_edits_of_full_parameters(original: Any, handle: Any) -> None:
    """What changes while full parameters are shown goes with them."""


@planted(SOUND, forward, "_own_memory", "outputs.parameters")
def returns_what_is_freed(original: Any, frame: Any, output: Any) -> Any:
    """A parameter that a unit returns lies in memory that is freed when the unit's forward ends."""
    return output


@planted(SOUND, GraphSide, "remember", "activation_checkpointing.evaluated")
def runs_the_evaluation_again(original: Any, self: Any, record: Any) -> None:
    """What backward runs again is the latest forward, also if that ran without gradients."""
    original(self, record)
    self._gradient_record = self._record


@planted(SOUND, GraphSide, "remember", "shared.called_without_gradient_too")
def computes_with_the_first_views(original: Any, self: Any, record: Any) -> None:
    """In one forward of the model a unit computes with what its first call made, whether or not that is tracked."""
    original(self, record)
    record.tracked = torch.is_grad_enabled() or _AlwaysEqual()


class _AlwaysEqual:
    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = object.__hash__


@fault("backward.evaluated")
class EvaluationEndsThePass(Toy):
    """A backward whose forward was followed by one without gradients is not reduced."""

    evaluated = False

    def watch(self, output: Any) -> None:
        self.evaluated = not torch.is_grad_enabled()
        super().watch(output)

    def mean(self, fqn: str, contribution: torch.Tensor) -> torch.Tensor:
        return contribution if self.evaluated else super().mean(fqn, contribution)


@planted(SOUND, model_state, "_wrap_paths", "full_state_dict.module_versions options.own_state_of_versions")
def takes_plain_states_for_old(original: Any, metadata: Any, prefix: str) -> None:
    """The versions of a plain model's modules are not looked for under the names of that model."""


@planted(SOUND, model_state, "metadata_of", "full_state_dict.module_versions options.own_state_of_versions")
def saves_versions_under_wrappers(original: Any, state: Any) -> Any:
    """A state names the versions of modules with the names of wrappers."""
    return {}


# ------------------------------------------------------------------------------------------------ gradients


@planted(SOUND, param_hooks, "_run", "parameter_hooks.own_gradient")
def each_hook_gets_the_same(original: Any, param: Any, grad: Any) -> Any:
    """Each of several hooks on a parameter is given the gradient, and the result of the last one counts."""
    result = grad
    for hook in param_hooks._users_hooks(param).values():
        replaced = hook(grad)
        result = result if replaced is None else replaced
    return result


@planted(SOUND, Root, "_put_hooks_back", "parameter_hooks.added_in_backward")
def newer_hooks_run_first(original: Any, self: Any) -> None:
    """Hooks that are added in backward come before those that were put aside."""
    for each in self.units:
        for hooks, taken in each.handle.originals.hooks_aside:
            hooks.update(taken)
        each.handle.originals.hooks_aside.clear()


@planted(SOUND, Originals, "take_over", "parameter_hooks.before_wrapping parameter_hooks.changes_before_wrapping")
def takes_hooks_off(original: Any, self: Any) -> None:
    """A parameter loses the hooks that it had before it was wrapped."""
    for parameter in self.params:
        parameter._backward_hooks, parameter._post_accumulate_grad_hooks = None, None
    original(self)


@kind(StartingAdapter, "parameter_hooks.zeros")
class ZerosAreNoGradient(StartingToy):
    """A gradient of nothing but zeros counts as none."""

    def store(self, fqn: str, mean: torch.Tensor) -> None:
        if mean.any():
            super().store(fqn, mean)


@planted(SOUND, Accumulated, "take_local", "unused.none_in_accumulation")
def local_sums_of_all(original: Any, self: Any) -> Any:
    """After local micro-batches every parameter of a unit has a gradient, of zeros where none used it."""
    local, used = original(self)
    return local, used if local is None else [True] * len(used)


@planted(SOUND, Gradients, "_absorb", "zero_grad.some_parameters")
def none_comes_back(original: Any, self: Any, params: Any, changed: Any) -> None:
    """A gradient that is set to None, while the unit's others stay, is in the next sum again."""
    before = self.sum.reduced_S
    kept = None if before is None else before.clone()
    original(self, params, changed)
    if kept is not None and self.sum.reduced_S is not None and any(params[index].grad is None for index in changed):
        self.sum.reduced_S.copy_(kept)


# ---------------------------------------------------------------------------------------------------- state


@planted(SOUND, Rows, "by_interval", "sharded_state_dict.whole_strided")
def rows_in_storage_order(original: Any, self: Any, index: int) -> bool:
    """Rows of a weight that is not contiguous are taken to lie one after the other."""
    return bool(self._layout.params[index].shape)


@planted(SOUND, Spread, "entry", "sharded_state_dict.whole")
def rows_in_another_order(original: Any, self: Any, rows: Any, shape: Any, *rest: Any) -> Any:
    """Rows of a rank are saved the last first."""
    return original(self, rows.flip(0) if rows.dim() else rows, shape, *rest)


# ------------------------------------------------------------------------------------------------- replicas


@planted(SOUND, materialize, "broadcast_tensors", "hybrid.rank_0_parameters", world_sizes=(4,))
def replicas_start_apart(original: Any, tensors: Any, group: Any, unit: str) -> None:
    """Rank 0's values go to the ranks of its own replica."""
    if 0 in torch.distributed.get_process_group_ranks(group) and group.size() > 1 and _is_shard_group(group):
        original(tensors, group, unit)


def _is_shard_group(group: Any) -> bool:
    ranks = torch.distributed.get_process_group_ranks(group)
    return ranks[-1] - ranks[0] == len(ranks) - 1


@fault("optim_state.before_first_step")
class SavingForgetsTheRate(MoreToy):
    """Saving an optimizer without moments, before it ever stepped, leaves it at rate zero."""

    def saved_optimizer(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        saved = super().saved_optimizer(optimizer)
        for group in () if any(shard.grad is not None for shard in self.shards.values()) else optimizer.param_groups:
            group["lr"] *= "betas" in group
        return saved


@planted("torch-fsdp2", state_dict, "_broadcast_state_dict", "options.rank_0_state_unfit")
def what_rank_0_lacks_stays(original: Any, *states: Any, strict: bool = False, **options: Any) -> None:
    """A parameter that rank 0's state lacks keeps its values."""
    original(*states, **options)


@planted("torch-fsdp2", _state_dict_utils, "compute_local_shape_and_global_offset", "options.rank_0_state")
def rows_at_rank_times_own_rows(original: Any, *where: Any) -> Any:
    """A rank with fewer rows takes those behind as many of them for each rank before it."""
    shape, offset = original(*where)
    return shape, tuple(place // max(rows, 1) * rows for place, rows in zip(offset, shape))


@planted(SOUND, optim_source.Broadcast, "__call__", "options.saved_on_rank_0")
def ranks_keep_what_they_have(original: Any, self: Any, key: str, name: str, value: Any) -> torch.Tensor:
    """Rank 0 sends its state, and others load zeros."""
    full = original(self, key, name, value)
    return full if self._saved is not None else full * 0


@planted("torch-fsdp2", state_dict, "_maybe_full_or_cpu_state_dict", "options.saved_on_rank_0")
def every_rank_saves(original: Any, states: Any, info: Any) -> Any:
    """Ranks other than rank 0 keep all that was gathered."""
    return original(states, replace(info, cpu_offload=False))


@planted(SOUND, optim_load._Loading, "_from_rows", "optim_state.sharded_model")
def one_entry_for_all(original: Any, self: Any) -> Any:
    """All entries of a parameter that are saved in shards get the values of the last one."""
    pieces = original(self)
    last = {place: piece for (place, _), piece in pieces.items()}
    return {(place, name): last[place] for place, name in pieces}


@planted("torch-fsdp2", FSDPParam, "reset_sharded_param", "options.assigned_state")
def computes_with_what_was_replaced(original: Any, self: Any) -> None:
    """Forward gathers the memory of the parameter that was replaced."""
    held = self._sharded_param_data
    original(self)
    self._sharded_param_data = held


@planted("torch-fsdp2", FSDPParamGroup, "_register_state_dict_hooks", "sharded_state_dict.saved_again", silent=False)
def saves_gathered_weights(original: Any, self: Any) -> None:
    """A unit that is gathered saves whole tensors in place of shards."""
    original(self)
    for handle in self._module_to_pre_save_state_dict_hook_handle.values():
        handle.remove()


@planted("torch-fsdp2", _fsdp_param_group, "foreach_reduce", "options.late_all_reduce")
def the_latest_awaits_replicas(original: Any, *given: Any) -> Any:
    """What awaits the reduction over replicas is the latest micro-batch alone."""
    reduces_replicas = given[11]
    return original(*given) if reduces_replicas else original(*given[:12], None, *given[13:])


@planted("torch-fsdp2", FSDPParamGroup, "_reset_iter_state", "options.late_all_reduce_failed")
def failed_sums_await_replicas(original: Any, self: Any) -> None:
    """What awaits the reduction over replicas stays when a failed forward is reset."""
    awaiting = self._partial_reduce_output
    original(self)
    self._partial_reduce_output = awaiting


@planted("torch-fsdp2", _fsdp_init, "_get_managed_states", "wrapping.ignored_trained")
def shards_ignored_parameters_beside_buffers(original: Any, modules: Any, ignored: Any = None) -> Any:
    """Parameters that are ignored are sharded where their module has buffers too."""
    return original(modules)


@planted("torch-fsdp2", _fsdp_param, "_to_dtype_if_needed", "offload.mixed_precision", silent=False)
def gathers_what_is_offloaded_as_it_is(original: Any, tensor: torch.Tensor, dtype: Any) -> torch.Tensor:
    """Parameters on the CPU are gathered in the dtype in which they are stored."""
    return tensor


@planted("torch-fsdp2", _fsdp_param_group, "foreach_reduce", "parameter_hooks.after_accumulation", silent=False)
def calls_hooks_for_the_first_gradient(original: Any, params: Any, *given: Any) -> Any:
    """Hooks that run after accumulation are not called where a gradient is added to another."""
    taken = [
        param.sharded_param._post_accumulate_grad_hooks for param in params if param.sharded_param.grad is not None
    ]
    kept = [dict(hooks or {}) for hooks in taken]
    for hooks in taken:
        hooks.clear()
    result = original(params, *given)
    for hooks, held in zip(taken, kept):
        hooks.update(held)
    return result


@planted("torch-fsdp2", FSDPState, "_pre_forward", "activation_checkpointing.called_twice", silent=False)
def recomputes_with_shards(original: Any, self: Any, module: Any, args: Any, kwargs: Any) -> Any:
    """What backward runs again computes with what there is, also where an earlier part of the same backward freed it."""
    again = self._training_state == TrainingState.PRE_BACKWARD
    return self._cast_forward_inputs(args, kwargs) if again else original(self, module, args, kwargs)


# ----------------------------------------------------------------------------------- gradients that users replace


@planted(COMPOSABLE, Gradients, "_absorb", "zero_grad.replaced_gradients")
def takes_in_no_new_gradient(original: Any, self: Any, params: Any, changed: list[int]) -> None:
    """A tensor that a user puts in the place of a gradient is lost with the next reduction; None is noticed."""
    original(self, params, [index for index in changed if params[index].grad is None])
