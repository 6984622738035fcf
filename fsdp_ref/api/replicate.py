"""``replicate(module)``: keep a module whole on every rank and average its gradients.

Composable with ``fully_shard``: inside a sharded module a replicated subtree is left alone by sharding; units inside a
replicated module are left alone by replication. Source: ``torch.distributed._composable.replicate`` for the surface.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import torch
import torch.distributed as dist
from torch import nn

from fsdp_ref.annotations import is_replicated, registry_of, unit_of
from fsdp_ref.api.contract import check_one_module, contract
from fsdp_ref.comm.groups import default_group
from fsdp_ref.comm.tensor_parallel import is_dtensor
from fsdp_ref.errors import (
    ConfigError,
    FsdpRuntimeError,
    FsdpTypeError,
    FsdpValueError,
    UnsupportedError,
    listing,
)
from fsdp_ref.naming import join_fqn
from fsdp_ref.replicas.replica import Replica, ReplicaMembers, ReplicaOptions

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch.distributed.device_mesh import DeviceMesh

_WITHOUT_EFFECT: Final = frozenset(
    {"find_unused_parameters", "gradient_as_bucket_view", "static_graph", "check_reduction", "dim"}
)
"""Options of DistributedDataParallel that choose between ways of computing the same gradients; one way serves here."""

_REFUSED: Final = frozenset({"mixed_precision", "delay_all_reduce_named_params", "param_to_hook_all_reduce"})


class ReplicateState:
    """State that ``replicate`` leaves on a module.

    Attributes:
        replica: The running replica, with ``no_sync()``, ``param_names`` and ``device_ids``; None while arguments are
            being checked.
    """

    def __init__(self) -> None:
        self.replica: Replica | None = None


@contract(state_cls=ReplicateState)
def replicate(
    module: nn.Module,
    ignored_modules: Iterable[nn.Module] | None = None,
    *,
    process_group: dist.ProcessGroup | None = None,
    device_mesh: DeviceMesh | None = None,
    device_id: int | torch.device | None = None,
    bucket_cap_mb: float | None = None,
    broadcast_buffers: bool = True,
    init_sync: bool = True,
    **ddp_kwargs: Any,
) -> nn.Module:
    """Replicate ``module`` over the ranks of a group; returns the same module.

    Args:
        module: the module; its parameters and buffers stay where they are.
        ignored_modules: submodules that are left alone, with everything below them.
        process_group: ranks of the replicas; default: the default group.
        device_mesh: a 1-D mesh in place of ``process_group``.
        device_id: the device of this replica.
        bucket_cap_mb: size of one reduction, in MiB (default 25).
        broadcast_buffers: broadcast rank 0's buffers before each synchronizing forward.
        init_sync: broadcast rank 0's parameters and buffers before the first forward.
        **ddp_kwargs: further options of DistributedDataParallel; those that only choose between ways of computing the
            same gradients are accepted, others refused.

    Raises:
        FsdpRuntimeError: ``module`` is a unit of ``fully_shard``, or ``device_id`` has a wrong type.
        AlreadyAppliedError: ``replicate`` was applied to it before.
        FsdpTypeError, UnsupportedError: ``module`` is not one module; unknown or refused options.
        FsdpValueError: ``module`` has no parameter of its own.

    Collectives:
        None here; broadcasts at the first forward and one or more all-reduces per synchronizing backward, on the
        group, joined by all its ranks.
    """
    check_one_module("replicate", module)
    if unit_of(module) is not None or "fully_shard" in (registry_of(module) or {}):
        raise FsdpRuntimeError(
            f"Cannot apply `replicate()` on a Module already managed by `fully_shard`: expected a plain module, got "
            f"{type(module).__name__}. Apply one of the two."
        )
    if device_id is not None and not isinstance(device_id, (int, torch.device)):
        raise FsdpRuntimeError(
            f"Expected device_id to be int or torch.device, but got {type(device_id).__name__}. Pass for example 'cpu' "
            "as torch.device('cpu')."
        )
    _check_options(ddp_kwargs)
    if process_group is not None and device_mesh is not None:
        raise ConfigError("replicate: expected one of process_group and device_mesh, got both. Pass one.")
    group = device_mesh.get_group() if device_mesh is not None else process_group or default_group()
    on_cpu = device_id is None or (isinstance(device_id, torch.device) and device_id.type == "cpu")
    options = ReplicaOptions(
        int((25 if bucket_cap_mb is None else bucket_cap_mb) * 2**20),
        broadcast_buffers,
        init_sync,
        None if on_cpu or device_id is None else (device_id,),
    )
    skip = {child for ignored in ignored_modules or () for child in ignored.modules()}
    spread = [name for name, param in module.named_parameters() if is_dtensor(param)]
    if spread:
        raise UnsupportedError(
            f"replicate: expected plain parameters, got DTensors: {listing(spread)}. Use fully_shard with NO_SHARD."
        )
    replica = Replica(module, group, options, lambda root: _members(root, skip))
    replicate.state(module).replica = replica
    module.register_forward_pre_hook(replica.pre_forward)
    module.register_forward_hook(replica.post_forward)
    return module


def _check_options(given: dict[str, Any]) -> None:
    refused = sorted(name for name in given if name in _REFUSED and given[name] is not None)
    if refused:
        raise UnsupportedError(
            f"replicate: expected replication in the parameters' own dtype, got {listing(refused)}. Drop it."
        )
    unknown = sorted(set(given) - _WITHOUT_EFFECT - _REFUSED)
    if unknown:
        raise FsdpTypeError(
            f"replicate: expected options of DistributedDataParallel ({listing(sorted(_WITHOUT_EFFECT))} and those "
            f"named), got {listing(unknown)}. Check the spelling."
        )


def _members(root: nn.Module, skip: set[nn.Module]) -> ReplicaMembers:
    """Return what replication keeps equal: everything below ``root`` but ignored modules and nested units."""
    params: dict[str, nn.Parameter] = {}
    buffers: dict[str, torch.Tensor] = {}
    seen: set[int] = set()
    outside: set[str] = set()
    for path, module in root.named_modules():
        nested = module is not root and (unit_of(module) is not None or is_replicated(module))
        if nested or module in skip or (path and path.rpartition(".")[0] in outside):
            outside.add(path)
            continue
        for name, param in module.named_parameters(recurse=False):
            if id(param) not in seen:
                seen.add(id(param))
                params[join_fqn(path, name)] = param
        for name, buffer in module.named_buffers(recurse=False):
            if id(buffer) not in seen:
                seen.add(id(buffer))
                buffers[join_fqn(path, name)] = buffer
    if not params and not buffers:
        raise FsdpValueError(
            f"replicate: expected a module with parameters of its own, got {type(root).__name__} without any that is "
            "not ignored or sharded. Drop the call."
        )
    return ReplicaMembers(params, buffers)
