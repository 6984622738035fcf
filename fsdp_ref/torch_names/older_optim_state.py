"""The older static methods of torch's FSDP for optimizer state. Each warns and names today's function.

Source for names, argument order and defaults: ``torch.distributed.fsdp.FullyShardedDataParallel`` (torch 2.13).
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from fsdp_ref.checkpoint.optim_index import ModelIndex
from fsdp_ref.checkpoint.optim_load import Source, load_optim_state
from fsdp_ref.checkpoint.optim_save import save_optim_state
from fsdp_ref.checkpoint.optim_state import State
from fsdp_ref.config import (
    FullOptimStateDictConfig,
    OptimStateKeyType,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    StateDictSettings,
    StateDictType,
    coerce_enum,
)
from fsdp_ref.errors import FsdpTypeError, FsdpValueError, listing
from fsdp_ref.naming import clean_tensor_name

Input = Iterable[Any] | None
"""What an optimizer is made with: parameters, or groups of them."""


def full_optim_state_dict(
    model: nn.Module,
    optim: Optimizer,
    optim_input: Input = None,
    rank0_only: bool = True,
    group: dist.ProcessGroup | None = None,
) -> State:
    """Return whole values, on rank 0 alone by default; older form of :func:`optim_state_dict`."""
    _old("full_optim_state_dict", "optim_state_dict", optim_input)
    settings = StateDictSettings(optim_state_dict_config=FullOptimStateDictConfig(rank0_only=rank0_only))
    return save_optim_state(ModelIndex.of(model, group), optim, None, settings)


def sharded_optim_state_dict(model: nn.Module, optim: Optimizer, group: dist.ProcessGroup | None = None) -> State:
    """Return DTensors; older form of :func:`optim_state_dict`."""
    _old("sharded_optim_state_dict", "optim_state_dict")
    settings = StateDictSettings(
        StateDictType.SHARDED_STATE_DICT, ShardedStateDictConfig(), ShardedOptimStateDictConfig()
    )
    return save_optim_state(ModelIndex.of(model, group), optim, None, settings)


def shard_full_optim_state_dict(
    full_optim_state_dict: State, model: nn.Module, optim_input: Input = None, optim: Optimizer | None = None
) -> State:
    """Cut whole values, which every rank has, without communication; older form of :func:`optim_state_dict_to_load`."""
    _old("shard_full_optim_state_dict", "optim_state_dict_to_load", optim_input)
    return _loaded(full_optim_state_dict, model, optim_input, optim, Source.EVERY_RANK)


def flatten_sharded_optim_state_dict(sharded_optim_state_dict: State, model: nn.Module, optim: Optimizer) -> State:
    """Cut DTensors; older form of :func:`optim_state_dict_to_load`."""
    _old("flatten_sharded_optim_state_dict", "optim_state_dict_to_load")
    return _loaded(sharded_optim_state_dict, model, None, optim, Source.SHARDS)


def scatter_full_optim_state_dict(
    full_optim_state_dict: State | None,
    model: nn.Module,
    optim_input: Input = None,
    optim: Optimizer | None = None,
    group: dist.ProcessGroup | None = None,
) -> State:
    """Give every rank its part of what rank 0 has; older form of :func:`optim_state_dict_to_load` with ``rank0_only``."""
    _old("scatter_full_optim_state_dict", "optim_state_dict_to_load", optim_input)
    return _loaded(full_optim_state_dict, model, optim_input, optim, Source.FIRST_RANK, group)


def rekey_optim_state_dict(
    optim_state_dict: State,
    optim_state_key_type: OptimStateKeyType,
    model: nn.Module,
    optim_input: Input = None,
    optim: Optimizer | None = None,
) -> State:
    """Convert keys between names and positions, to load state into the plain model's optimizer or from it.

    Args:
        optim_state_dict: State by name or by position.
        optim_state_key_type: The form to return.
        model: The plain model.
        optim_input: The arguments of its optimizer; ``optim`` is more precise.
        optim: Its optimizer. Without both, one group of ``model.parameters()`` is assumed.

    Returns:
        A dictionary with new keys and the same values, or the argument itself if nothing changes.

    Raises:
        FsdpValueError: keys that are neither names nor positions, a mixture of both, or keys that the model's optimizer does
            not have.
    """
    _warn_of_input(optim_input)
    wanted = coerce_enum(OptimStateKeyType, optim_state_key_type, where="optim_state_key_type")
    keys = [*optim_state_dict["state"], *(k for g in optim_state_dict["param_groups"] for k in g["params"])]
    kinds = {str if isinstance(key, str) else int if isinstance(key, int) else object for key in keys}
    if len(kinds) > 1 or object in kinds:
        raise FsdpValueError(
            f"rekey_optim_state_dict: Invalid parameter keys: expected only names or only positions, got "
            f"{listing(dict.fromkeys(map(repr, keys)), limit=10)}. Leave out your own entries."
        )
    if kinds <= {str if wanted is OptimStateKeyType.PARAM_NAME else int}:
        return optim_state_dict
    called = {id(param): clean_tensor_name(name) for name, param in model.named_parameters()}
    tensors = dict.fromkeys(tensor for group in _tensors_of(optim, optim_input, model) for tensor in group)
    names = [called.get(id(tensor), f"<number {place}>") for place, tensor in enumerate(tensors)]
    to_new: dict[Any, Any] = dict(enumerate(names)) if int in kinds else {name: n for n, name in enumerate(names)}
    unknown = [key for key in dict.fromkeys(keys) if key not in to_new or str(to_new[key]).startswith("<")]
    if unknown:
        raise FsdpValueError(
            f"rekey_optim_state_dict: expected keys of the model's optimizer, which has {listing(names, limit=10)}, got "
            f"others: {listing(unknown)}. Pass the plain model and the optimizer that are to load it."
        )
    state = {to_new[key]: value for key, value in optim_state_dict["state"].items()}
    groups = [
        {**group, "params": [to_new[key] for key in group["params"]]} for group in optim_state_dict["param_groups"]
    ]
    return {**optim_state_dict, "state": state, "param_groups": groups}


def _loaded(
    saved: Any,
    model: nn.Module,
    optim_input: Input,
    optim: Optimizer | None,
    source: Source,
    group: dist.ProcessGroup | None = None,
) -> State:
    index = ModelIndex.of(model, group)
    return load_optim_state(index, _tensors_of(optim, optim_input, model), optim, saved, source)


def _old(name: str, instead: str, optim_input: Input = None) -> None:
    warnings.warn(
        f"`{name}` is being deprecated: use `{instead}` with a state-dict type instead.", FutureWarning, stacklevel=3
    )
    _warn_of_input(optim_input)


def _warn_of_input(optim_input: Input) -> None:
    if optim_input is not None:
        warnings.warn("The `optim_input` argument is deprecated: pass `optim` instead.", FutureWarning, stacklevel=4)


def _tensors_of(optim: Optimizer | None, optim_input: Any, model: nn.Module) -> list[list[Tensor]]:
    """Return the tensors of each parameter group, from an optimizer or from what one was made with.

    Args:
        optim: the optimizer; it goes first.
        optim_input: parameters or groups of them, as optimizers take them.
        model: whose parameters are meant when both are None.

    Raises:
        FsdpTypeError: ``optim_input`` is neither parameters nor dictionaries with parameters.
        FsdpValueError: it is empty.
    """
    if optim is not None:
        return [list(group["params"]) for group in optim.param_groups]
    if optim_input is None:
        return [list(model.parameters())]
    if isinstance(optim_input, (Tensor, str, Mapping)) or not isinstance(optim_input, Iterable):
        raise FsdpTypeError(_input_message(f"a {type(optim_input).__name__}"))
    items = list(optim_input)
    if not items:
        raise FsdpValueError("Optimizer input should not be empty: " + _input_message("nothing"))
    if all(isinstance(item, Tensor) for item in items):
        return [items]
    if not all(isinstance(item, Mapping) and "params" in item for item in items):
        raise FsdpTypeError(_input_message(listing(sorted({type(item).__name__ for item in items}))))
    return [[item["params"]] if isinstance(item["params"], Tensor) else list(item["params"]) for item in items]


def _input_message(got: str) -> str:
    return (
        f"optim_input: expected an iterable of parameters, or of dictionaries with the key 'params', got {got}. Pass "
        "optim= instead; it knows its groups."
    )
