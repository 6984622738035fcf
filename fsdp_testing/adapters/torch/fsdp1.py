"""torch's FullyShardedDataParallel (FSDP1) on the CPU, with `use_orig_params` (`torch-fsdp1`) and without (`-flat`).

Claims follow the class documentation and what its constructor accepts for `device_id=cpu`. Not claimed: CPU offload and
`sync_module_states` (both need an accelerator), 0-dim parameters (refused), parameters shared across units
(documented as unsupported), parts that only some ranks use, None for unused gradients (a flat parameter's gradient
is one tensor).
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.distributed import fsdp
from torch.distributed.algorithms._comm_hooks import default_hooks
from torch.distributed.algorithms._comm_hooks.default_hooks import LowPrecisionState
from torch.distributed.fsdp import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    FullyShardedDataParallel,
    StateDictType,
)
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

from fsdp_testing.adapters.adapter import TorchStyle
from fsdp_testing.adapters.protocol import Division, Setup
from fsdp_testing.adapters.shared import flat_pieces, naming
from fsdp_testing.adapters.shared.claims import SHARDED
from fsdp_testing.adapters.shared.flat_pieces import FlatOriginal, FlatUnit
from fsdp_testing.adapters.shared.fsdp_options import FsdpNames
from fsdp_testing.adapters.torch import saved_state, unit_trace


def flat_units(model: nn.Module) -> Iterator[FlatUnit]:
    """Yield every flat parameter as it is on this rank now."""
    for name, unit in model.named_modules():
        if isinstance(unit, FullyShardedDataParallel) and unit._handle is not None:
            yield _flat_unit(naming.original(name), unit._handle)


def _flat_unit(prefix: str, handle: Any) -> FlatUnit:
    flat: Any = handle.flat_param
    local = getattr(flat, "_local_shard", None)  # absent before lazy initialisation, when the data is the shard
    shard = (flat.data if local is None else local).detach()
    return FlatUnit(
        parameter=flat,
        originals=tuple(_originals(prefix, flat, by_original=bool(handle._use_orig_params))),
        shard_S=shard,
        unsharded_grad=flat.grad is not None and flat.grad.numel() != shard.numel(),
        reduced_S=getattr(flat, "_saved_grad_shard", None),
    )


def _originals(prefix: str, flat: Any, *, by_original: bool) -> Iterator[FlatOriginal]:
    starts = itertools.accumulate(flat._numels_with_padding, initial=0)
    real = [start for start, padding in zip(starts, flat._is_padding_mask) if not padding]
    objects = flat._params if by_original and flat._params is not None else [None] * len(flat._fqns)
    rows = zip(flat._fqns, flat._shapes, flat._strides, flat._contiguities, objects, real, flat._shard_param_infos)
    for fqn, shape, stride, contiguous, parameter, start, info in rows:
        whole_name = ".".join(part for part in (prefix, naming.original(fqn)) if part)
        span = (info.offset_in_shard, info.intra_param_start_idx, info.numel_in_shard)
        place = span if info.in_shard else (None, 0, 0)
        yield FlatOriginal(whole_name, tuple(shape), tuple(stride), bool(contiguous), parameter, start, *place)


_SHARED_CLAIMS = (SHARDED - {"compiled"}) | {
    "no_shard",
    "policy_wrapping",
    "strided_parameters",
    "buffer_dtype",
    "summon_writeback",
    "comm_hook",
    "meta_init",
    "backward_after_no_sync",
    "default_device",
    "default_groups",
    "mesh_for_group",
    "ignored_by_parameter",
    "own_state",
    "offloaded_state",
    "saved_on_rank_0",
    "limited_gathers",
    "compressing_hook",
    "unit_precisions",
    *("precise_norms", "precise_evaluation", "ignored_by_units"),
    "uncast_inputs",
    "low_gradients",
    "unit_strategies",
}

#: Only with original parameters: one unit may mix frozen and trainable ones, flags may change, and torch compiles it.
_ORIGINAL_CLAIMS = frozenset(
    {
        "frozen_mixed_unit",
        "thawed_parameters",
        "gradient_edits",
        "in_place_edits",
        "full_gradients",
        "gradient_replacement",
        "compiled",
    }
)

#: Only with flat parameters: with original ones torch saves the local form and cannot load it again.
_FLAT_CLAIMS = frozenset({"local_state_dict"})

_FSDP = FsdpNames(fsdp, fsdp.wrap)
_HOOKS = {torch.bfloat16: default_hooks.bf16_compress_hook, torch.float16: default_hooks.fp16_compress_hook}

_SETTINGS: WeakKeyDictionary[nn.Module, frozenset[str]] = WeakKeyDictionary()
"""Options of each model's case that access to its state needs."""


def wrap(module: nn.Module, setup: Setup, *, use_orig_params: bool) -> nn.Module:
    """Put FSDP around every unit, children first, then around the root.

    Collectives: those of group creation for a 2-D mesh, which `setup.mesh` has behind it.
    """

    def apply(unit: nn.Module, setup: Setup, name: str, options: dict[str, Any]) -> nn.Module:
        options |= _FSDP.strategy(setup, name, "sharding_strategy") | (
            {"use_orig_params": True} if use_orig_params else {}
        )
        for setting, option in (("default_device", "device_id"), ("default_groups", "device_mesh")):
            if setting in setup.settings:
                options.pop(option, None)
        return FullyShardedDataParallel(unit, **options)

    setup.refuse("torch-fsdp1", "tensor_mesh")  # this adapter cannot tell which elements of a part a rank holds
    setup.refuse_settings("torch-fsdp1", *_SHARED_CLAIMS, *(_ORIGINAL_CLAIMS if use_orig_params else ()))
    stored = next((parameter.dtype for parameter in module.parameters()), torch.float32)
    model = _FSDP.wrap(module, setup, apply)
    if setup.compressed_to is not None:
        register_comm_hook(model, LowPrecisionState(setup.group, stored), _HOOKS[setup.compressed_to])
    _SETTINGS[model] = setup.settings
    return model


@contextmanager
def no_sync(model: nn.Module) -> Iterator[None]:
    """`no_sync` of the root, or of every unit that is a root of its own under a plain module."""
    with ExitStack() as stack:
        for unit in FullyShardedDataParallel.fsdp_modules(model, root_only=True):
            stack.enter_context(unit.no_sync())
        yield


def clip_grad_norm(model: nn.Module, max_norm: float, norm_type: float) -> torch.Tensor:
    """FSDP's own clipping. Collectives: one all-reduce over the shard group; every rank calls."""
    assert isinstance(model, FullyShardedDataParallel)
    return model.clip_grad_norm_(max_norm, norm_type)


@contextmanager
def full_parameters(model: nn.Module, *, writeback: bool) -> Iterator[Mapping[str, torch.Tensor]]:
    """`summon_full_params`. Collectives: an all-gather per unit; every rank enters."""
    settings = _SETTINGS.get(model, frozenset())
    options = {"offload_to_cpu": "offloaded_state" in settings, "with_grads": "full_gradients" in settings}
    with FullyShardedDataParallel.summon_full_params(model, writeback=writeback, **options):
        yield {naming.original(fqn): p if options["with_grads"] else p.data for fqn, p in model.named_parameters()}


def grad_scaler(model: nn.Module, **options: Any) -> ShardedGradScaler:
    """Return FSDP1's own scaler; of torch's other one each rank would skip steps by its own gradients."""
    return ShardedGradScaler(next(model.parameters()).device.type, **options)


def register_comm_hook(model: nn.Module, state: object, hook: Callable[..., Any]) -> None:
    """FSDP's own registration."""
    assert isinstance(model, FullyShardedDataParallel)
    model.register_comm_hook(state, hook)


def local_state_dict(model: nn.Module) -> Mapping[str, Any]:
    """Flat shards as they are. Collectives: none."""
    with FullyShardedDataParallel.state_dict_type(model, StateDictType.LOCAL_STATE_DICT):
        return copy.deepcopy(model.state_dict())


def load_local_state_dict(model: nn.Module, state: Mapping[str, Any]) -> None:
    """Load what `local_state_dict` gave on this rank."""
    with FullyShardedDataParallel.state_dict_type(model, StateDictType.LOCAL_STATE_DICT):
        model.load_state_dict(dict(state))


_ASKED_OF_FSDP = frozenset({"offloaded_state", "saved_on_rank_0"})
"""Settings of `FullStateDictConfig`."""


def _configured(settings: frozenset[str], model: nn.Module) -> AbstractContextManager[Any]:
    alone = "saved_on_rank_0" in settings
    config = FullStateDictConfig(rank0_only=alone, offload_to_cpu="offloaded_state" in settings)
    optimizers = FullOptimStateDictConfig(rank0_only=alone)
    return FullyShardedDataParallel.state_dict_type(model, StateDictType.FULL_STATE_DICT, config, optimizers)


def full_state_dict(model: nn.Module) -> Mapping[str, torch.Tensor]:
    """`state_dict` of FSDP itself, where the case asks for that. Collectives: gathers; every rank calls."""
    settings = _SETTINGS.get(model, frozenset())
    if settings & _ASKED_OF_FSDP:
        with _configured(settings, model):
            return model.state_dict()
    return model.state_dict() if "own_state" in settings else saved_state.full_state_dict(model)


def load_full_state_dict(model: nn.Module, state: Mapping[str, torch.Tensor]) -> None:
    """Load that state; every rank passes the complete tensors."""
    if "own_state" in _SETTINGS.get(model, ()):
        model.load_state_dict(state)
    else:
        saved_state.load_full_state_dict(model, state)


def full_optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> Mapping[str, Any]:
    """`optim_state_dict` of FSDP itself, where the case asks for that. Collectives: gathers; every rank calls."""
    settings = _SETTINGS.get(model, frozenset())
    if "saved_on_rank_0" in settings:
        with _configured(settings, model):
            return FullyShardedDataParallel.optim_state_dict(model, optimizer)
    if "own_state" not in settings:
        return saved_state.full_optimizer_state(model, optimizer)
    return FullyShardedDataParallel.optim_state_dict(model, optimizer)


def load_full_optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
    """Load that state, which every rank passes, or rank 0 alone. Collectives: broadcasts in the second case."""
    settings = _SETTINGS.get(model, frozenset())
    if not settings & {"own_state", "saved_on_rank_0"}:
        saved_state.load_full_optimizer_state(model, optimizer, state)
        return
    with _configured(settings, model) if "saved_on_rank_0" in settings else nullcontext():
        own = FullyShardedDataParallel.optim_state_dict_to_load(model, optimizer, dict(state))
    optimizer.load_state_dict(own)


def division(setup: Setup) -> Division:
    """Split the factor in two around the sum, in every dtype."""
    return Division.split(setup.world_size)


_STATE: Mapping[str, Any] = {
    "full_state_dict": full_state_dict,
    "load_full_state_dict": load_full_state_dict,
    "full_optimizer_state": full_optimizer_state,
    "load_full_optimizer_state": load_full_optimizer_state,
}


def _implementation(name: str, *, use_orig_params: bool) -> TorchStyle:
    return TorchStyle(
        name=name,
        wrap=partial(wrap, use_orig_params=use_orig_params),
        capabilities=_SHARED_CLAIMS | (_ORIGINAL_CLAIMS if use_orig_params else _FLAT_CLAIMS),
        source="https://pytorch.org/docs/stable/fsdp.html",
        no_sync=no_sync,
        clip_grad_norm=clip_grad_norm,
        full_parameters=full_parameters,
        **flat_pieces.methods(flat_units),
        division=division,
        units=unit_trace.fsdp1_units,
        trace_units=unit_trace.fsdp1_trace,
        gathered_bytes=unit_trace.fsdp1_gathered_bytes,
        register_comm_hook=register_comm_hook,
        grad_scaler=grad_scaler,
        local_state_dict=local_state_dict,
        load_local_state_dict=load_local_state_dict,
        **{**saved_state.METHODS, **_STATE},
    )


IMPLEMENTATION = _implementation("torch-fsdp1", use_orig_params=True)
FLAT = _implementation("torch-fsdp1-flat", use_orig_params=False)
