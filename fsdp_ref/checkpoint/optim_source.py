"""Sources of the state that an optimizer loads, and how each rank gets a whole entry from one.

A rank reads its own dictionary, gathers DTensors, or receives from rank 0. Unreadable state is refused before ranks wait for
one another.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fsdp_ref.checkpoint.optim_index import ModelIndex
from fsdp_ref.comm.collectives import as_bytes, collectives_for, gather_objects
from fsdp_ref.comm.tensor_parallel import is_dtensor
from fsdp_ref.errors import FsdpRuntimeError, listing


class Source(Enum):
    """The ranks that have the state to load."""

    EVERY_RANK = auto()
    """Whole values on each rank."""
    SHARDS = auto()
    """DTensors, or whole values, under the same names on each rank."""
    FIRST_RANK = auto()
    """Whole values on rank 0; the arguments of other ranks are ignored."""


@dataclass(frozen=True, slots=True)
class Outline:
    """The metadata of a tensor, without its values."""

    shape: torch.Size
    dtype: torch.dtype

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return len(self.shape)


Value = Tensor | Outline | Any
Fetch = Callable[[str, str, Any], Tensor]
"""Returns the whole tensor of one entry; all ranks call it for the same entries in the same order."""


def malformed(saved: Any, source: Source) -> str:
    """Return why a dictionary is not state by name from this source; nothing if it is."""
    if not isinstance(saved, Mapping) or not isinstance(saved.get("state"), Mapping):
        got = listing(saved) if isinstance(saved, Mapping) else f"a {type(saved).__name__}"
        return (
            "optim_state_dict_to_load: expected a dictionary that must have the keys 'state' (a dictionary itself) and "
            f"'param_groups', got {got}. Pass what optim_state_dict() returned."
        )
    state, groups = saved["state"], saved.get("param_groups", ())
    if not isinstance(groups, (list, tuple)) or not all(isinstance(g, Mapping) and "params" in g for g in groups):
        return (
            "optim_state_dict_to_load: expected param_groups to be a list of dictionaries with the key 'params', got "
            f"{groups!r}. Pass what optim_state_dict() returned."
        )
    listed = [key for group in groups for key in group["params"]]
    ids = [key for key in (*state, *listed) if not isinstance(key, str)]
    if ids:
        return (
            f"optim_state_dict_to_load: expected names of parameters as keys, got {listing(dict.fromkeys(ids))}. Turn "
            "positions into names with rekey_optim_state_dict(state, OptimStateKeyType.PARAM_NAME, plain_model)."
        )
    odd = [f"{key}: a {type(state[key]).__name__}" for key in listed if not isinstance(state.get(key, {}), Mapping)]
    if odd:
        return (
            f"optim_state_dict_to_load: expected a dictionary of entries for each parameter, got {listing(odd)}. Pass "
            "what optim_state_dict() returned."
        )
    sharded = [
        f"{key}.{name} ({type(value).__name__})"
        for key, entries in state.items()
        if isinstance(entries, Mapping)
        for name, value in entries.items()
        if type(value).__name__ == "ShardedTensor" or (is_dtensor(value) and source is not Source.SHARDS)
    ]
    if sharded:
        return (
            "optim_state_dict_to_load: expected whole tensors, or DTensors under the state-dict type "
            f"SHARDED_STATE_DICT, got {listing(sharded)}. Set the type under which the state was saved; give torch's "
            "FSDP a device_mesh, and it saves DTensors."
        )
    return ""


def compare_names(index: ModelIndex, saved: Any, problem: str) -> None:
    """Refuse state on all ranks if one of them cannot load it; the others would hang in gathers."""
    state = {} if problem else saved["state"]
    mine = problem or [
        (key, [(name, _laid_out(each)) for name, each in value.items()] if isinstance(value, Mapping) else None)
        for key, value in state.items()
    ]
    of_ranks: list[tuple[int, Any]] = [(dist.get_rank(), mine)]
    for group in index.exchanged:
        of_ranks = [theirs for each in gather_objects(of_ranks, group) for theirs in each]
    others = [str(rank) for rank, theirs in of_ranks if theirs != of_ranks[0][1]]
    if others:
        raise FsdpRuntimeError(
            "optim_state_dict_to_load: expected all ranks to have the same names in the same order, with tensors of the "
            f"same placements, got differences between rank {of_ranks[0][0]} and ranks {listing(others)}. Load the same "
            "sharded state on every rank."
        )


def _laid_out(value: Any) -> str:
    return str(value.placements) if is_dtensor(value) else ""


def of_all_ranks(index: ModelIndex, problems: list[str]) -> list[str]:
    """Return the problems of all ranks.

    Collectives:
        One exchange over the shard group of the outermost unit, one over its replicas, one over its tensor-parallel axis.
    """
    for group in index.exchanged:
        problems = [problem for theirs in gather_objects(problems, group) for problem in theirs]
    return list(dict.fromkeys(problems))


def outlined(saved: Mapping[str, Any]) -> dict[str, Any]:
    """Return a dictionary of state without the values of tensors that have dimensions."""
    state = {
        key: {name: _outline(value) for name, value in entries.items()} if isinstance(entries, Mapping) else entries
        for key, entries in saved["state"].items()
    }
    return {**saved, "state": state}


def _outline(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    return Outline(value.shape, value.dtype) if value.ndim else value.detach().cpu()


class Broadcast:
    """Gives every rank the whole tensors that rank 0 has."""

    def __init__(self, index: ModelIndex, saved: Any) -> None:
        self._device = index.device
        self._saved = saved
        self._groups = index.exchanged

    def __call__(self, key: str, name: str, value: Any) -> Tensor:
        """Return the tensor that rank 0 has under ``key`` and ``name``; ``value`` says what it is."""
        if self._saved is None:
            full = torch.empty(value.shape, dtype=value.dtype, device=self._device)
        else:
            full = self._saved["state"][key][name].detach().to(self._device).contiguous()
        for group in self._groups if full.numel() else ():
            flat = as_bytes(full.view(-1))
            collectives_for(group, self._device).broadcast(flat, 0, group, key).wait()
        return full
