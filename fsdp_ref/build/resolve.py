"""With which settings is each planned unit made, and can it be?

Everything that an application may refuse is refused here or before, so that a refused module is as it was and the
corrected call works. Options are read once per unit; what they mean is one frozen ``UnitConfig``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

import torch.distributed as dist
from torch import nn

from fsdp_ref.build.device import compute_device, explicit_device
from fsdp_ref.build.materialize import check_broadcastable, check_initializable
from fsdp_ref.comm.groups import DataParallelGroups, default_group, effective_strategy, groups_by_host, resolve_groups
from fsdp_ref.comm.tensor_parallel import TensorParallel, is_dtensor, why_not
from fsdp_ref.config import (
    BackwardPrefetch,
    MixedPrecision,
    ShardingStrategy,
    UnitConfig,
    coerce_backward_prefetch,
    coerce_cpu_offload,
    coerce_mixed_precision,
    coerce_sharding_strategy,
)
from fsdp_ref.env import read_switches
from fsdp_ref.errors import ConfigError, FlattenError, UnsupportedError, explain, listing
from fsdp_ref.handle.flatten import check_params
from fsdp_ref.handle.param_hooks import is_hooked
from fsdp_ref.storage.extension import ParameterExtension, has_factories, registered_extension

if TYPE_CHECKING:
    import torch

    from fsdp_ref.build.ignored import Ignored
    from fsdp_ref.build.plan import PlannedUnit, WrapPlan

UNIT_OPTIONS: Final[Mapping[str, Any]] = MappingProxyType(
    {
        "process_group": None,
        "sharding_strategy": None,
        "cpu_offload": None,
        "backward_prefetch": BackwardPrefetch.BACKWARD_PRE,
        "mixed_precision": None,
        "param_init_fn": None,
        "device_id": None,
        "sync_module_states": False,
        "forward_prefetch": False,
        "limit_all_gathers": True,
        "use_orig_params": False,
        "device_mesh": None,
    }
)
"""What users, and policies for one module, may say about a unit: keyword arguments of the wrapper, with its defaults."""


@dataclass(frozen=True, slots=True)
class ResolvedUnit:
    """A planned unit, its settings for life, and all its options, of which construction alone needs some.

    ``extensions`` are those of its parameters that are more than a plain tensor, by name.
    """

    planned: PlannedUnit
    config: UnitConfig
    options: Mapping[str, Any]
    extensions: Mapping[str, ParameterExtension]


def resolve_units(plan: WrapPlan, *, automatic: bool, composable: bool) -> list[ResolvedUnit]:
    """Return the units of ``plan`` with their settings, in its order.

    Args:
        plan: Which units there are and what they own.
        automatic: A policy wraps, so that hybrid groups that nobody gave may be made.
        composable: The composable API was called on the root of the plan.

    Raises:
        FsdpError: Options that cannot be read, contradict one another or do not fit the unit's parameters.

    Collectives:
        Hybrid strategies without groups make them, when nothing is left to refuse: all ranks must call.
    """
    groups, devices, switches = _Groups(automatic=automatic), _Devices(), read_switches()
    drafts: list[tuple[PlannedUnit, Mapping[str, Any], partial[UnitConfig]]] = []
    for unit in plan.units:
        given = _with_defaults(unit.options)
        precision = MixedPrecision() if unit.full_precision else coerce_mixed_precision(given["mixed_precision"])
        draft = partial(
            UnitConfig,
            device=_check(unit, given, groups, devices[given["device_id"]], plan.ignored),
            mixed_precision=precision,
            cpu_offload=coerce_cpu_offload(given["cpu_offload"]),
            backward_prefetch=coerce_backward_prefetch(given["backward_prefetch"]),
            forward_prefetch=bool(given["forward_prefetch"]),
            limit_all_gathers=bool(given["limit_all_gathers"]),
            use_orig_params=bool(given["use_orig_params"]),
            full_precision_module=unit.full_precision,
            applied_here=composable and unit is plan.root,
            switches=switches,
        )
        drafts.append((unit, given, draft))
    # Making groups is what a refused call could not take back, hence last.
    final = [groups.final(given) for _, given, _ in drafts]
    extensions = [_extensions(unit, each["groups"]) for (unit, _, _), each in zip(drafts, final)]
    axis = _tensor_axis([extension for found in extensions for extension in found.values()])
    if axis is not None:
        final = [{**each, "groups": replace(each["groups"], tensor=axis)} for each in final]
    return [
        ResolvedUnit(unit, draft(**each), given, found)
        for (unit, given, draft), each, found in zip(drafts, final, extensions)
    ]


def _extensions(unit: PlannedUnit, groups: DataParallelGroups) -> dict[str, ParameterExtension]:
    # A DTensor that is a parameter is of its own type, whatever `nn.Parameter` was called with.
    params = {each.fqn: each.param for each in unit.params if has_factories() or type(each.param) is not nn.Parameter}
    found = {name: registered_extension(p, groups) or TensorParallel.of(p, groups) for name, p in params.items()}
    return {name: extension for name, extension in found.items() if extension is not None}


def _tensor_axis(extensions: Sequence[ParameterExtension]) -> dist.ProcessGroup | None:
    # torch may give two equal meshes groups of their own; one of them serves.
    found = [each.group for each in extensions if each.group is not None]
    axes = {tuple(dist.get_process_group_ranks(group)): group for group in reversed(found)}
    if len(axes) > 1:
        raise UnsupportedError(
            explain(
                "tensor parallelism",
                expected="one axis for all parameters of a model",
                got=f"{len(axes)}, over ranks {listing(axes)}",
                remedy="Use one mesh for parallelize_module",
            )
        )
    return found[0] if found else None


def _with_defaults(given: Mapping[str, Any]) -> dict[str, Any]:
    unknown = sorted(set(given) - set(UNIT_OPTIONS))
    if unknown:
        raise ConfigError(
            f"options of a unit: expected some of {listing(sorted(UNIT_OPTIONS))}, got {listing(unknown)}. "
            "Correct the policy."
        )
    return {**UNIT_OPTIONS, **given}


def _check(
    unit: PlannedUnit, options: Mapping[str, Any], groups: _Groups, asked: torch.device | None, ignored: Ignored
) -> torch.device:
    """Refuse what cannot be built; return the device of computation."""
    params, names = [planned.param for planned in unit.params], unit.fqns
    given, backend = groups.given(options)
    if params:
        check_params(params, names, use_orig_params=bool(options["use_orig_params"]))
    check_initializable(unit, options["param_init_fn"], ignored)
    offload = coerce_cpu_offload(options["cpu_offload"]).offload_params
    device = compute_device(asked, params, needs_cuda=backend == "nccl", offload=offload)
    if options["sync_module_states"] and asked is None:
        check_broadcastable(unit, device)
    spread = {name: param for name, param in zip(names, params) if is_dtensor(param)}
    reasons = {name: why_not(param, given, device) for name, param in spread.items()}
    bad = [f"{name} {reason}" for name, reason in reasons.items() if reason is not None]
    hooked = [name for name, param in spread.items() if is_hooked(param)]
    bad += [f"{name} with hooks, expected none, which go with it (register them after sharding)" for name in hooked]
    if bad:
        raise FlattenError(
            f"unit {unit.fqn or 'root'!r}: expected DTensors of one tensor-parallel axis beside the unit's own, got "
            f"{listing(bad)}. Apply parallelize_module(module, mesh['tp'], plan) first, then shard over mesh['dp']."
        )
    return device


class _Devices(dict[Any, "torch.device | None"]):
    """The devices that an application names; each is read, and warned of, once."""

    def __getitem__(self, device_id: object) -> torch.device | None:
        key = repr(device_id)
        if key not in self:
            self[key] = explicit_device(device_id)
        return super().__getitem__(key)


class _Groups:
    """The groups of one application's units, resolved once for each different request."""

    def __init__(self, *, automatic: bool) -> None:
        self._automatic = automatic
        self._given: dict[Any, DataParallelGroups | None] = {}
        self._final: dict[Any, dict[str, Any]] = {}
        self._made: DataParallelGroups | None = None

    @staticmethod
    def _request(options: Mapping[str, Any]) -> tuple[int, int, ShardingStrategy]:
        strategy = coerce_sharding_strategy(options["sharding_strategy"]) or ShardingStrategy.FULL_SHARD
        return id(options["process_group"]), id(options["device_mesh"]), strategy

    def given(self, options: Mapping[str, Any]) -> tuple[DataParallelGroups | None, str]:
        """Read the groups that were given; return them and the backend of these, or of those that are still to be made."""
        key = self._request(options)
        if key not in self._given:
            self._given[key] = resolve_groups(
                options["process_group"], options["device_mesh"], key[-1], automatic=self._automatic
            )
        groups = self._given[key]
        return groups, dist.get_backend(default_group() if groups is None else groups.shard)

    def final(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """Return the groups and the strategy that they allow, making groups on first need."""
        key = self._request(options)
        if key not in self._final:
            groups = self._given[key] or self._made
            if groups is None:
                groups = self._made = groups_by_host()
            self._final[key] = {"groups": groups, "strategy": effective_strategy(key[-1], groups)}
        return self._final[key]
