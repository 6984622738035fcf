"""More faults that somebody planted without knowing the checks, and that no check noticed then."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import torch
from fault import fault
from faults_claims import StartingAdapter, StartingToy
from faults_kinds import kind
from planting import planted
from toy import Toy

from fsdp_ref.autograd.graph_ties import GraphSide
from fsdp_ref.build import materialize
from fsdp_ref.checkpoint.rows import Rows
from fsdp_ref.checkpoint.shards import Spread
from fsdp_ref.handle import param_hooks, writeback
from fsdp_ref.handle.accumulated import Accumulated
from fsdp_ref.handle.gradients import Gradients
from fsdp_ref.runtime import calls, forward, unit
from fsdp_ref.storage.precision import BufferCaster

SOUND, COMPOSABLE = "fsdp_ref-wrapper", "fsdp_ref-composable"

_nothing = lambda _: lambda _handle: None

# --------------------------------------------------------------------------------------------------- dtypes


@planted(SOUND, BufferCaster, "original_dtype", "full_state_dict.buffer_dtypes")
def saves_lowered_buffers(original: Any, self: Any, *place: Any) -> None:
    """A state has buffers in the dtype in which they are held."""


@planted(COMPOSABLE, BufferCaster, "__init__", "mixed_precision.ignored_buffers")
def lowers_what_is_ignored(original: Any, self: Any, modules: Any, dtype: Any) -> None:
    """A unit casts the buffers of every module below it."""
    below = dict.fromkeys(inner for module in modules for inner in module.modules())
    original(self, tuple(below), dtype)


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


# ------------------------------------------------------------------------------------------------ gradients


@planted(SOUND, param_hooks, "_run", "parameter_hooks.own_gradient")
def each_hook_gets_the_same(original: Any, param: Any, grad: Any) -> Any:
    """Each of several hooks on a parameter is given the gradient, and the result of the last one counts."""
    result = grad
    for hook in param_hooks._users_hooks(param).values():
        replaced = hook(grad)
        result = result if replaced is None else replaced
    return result


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
