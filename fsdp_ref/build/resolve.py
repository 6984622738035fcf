"""With which settings is each planned unit made, and can it be?

Everything that an application may refuse is refused here or before, so that a refused module is as it was and the
corrected call works. Options are read once per unit; what they mean is one frozen ``UnitConfig``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

import torch.distributed as dist

from fsdp_ref.build.device import compute_device, explicit_device
from fsdp_ref.build.materialize import check_broadcastable, check_initializable
from fsdp_ref.comm.groups import DataParallelGroups, default_group, effective_strategy, groups_by_host, resolve_groups
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
from fsdp_ref.errors import ConfigError, listing
from fsdp_ref.handle.flatten import check_params
from fsdp_ref.naming import join_fqn

if TYPE_CHECKING:
    import torch

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
    """A planned unit with all that its construction needs.

    Attributes:
        planned: The unit.
        config: Its settings for life.
        init: Gives values to modules on the meta device; None for their own ``reset_parameters``.
        moves: Move parameters and buffers to ``config.device`` first.
        synchronises: Start from rank 0's parameters and buffers.
    """

    planned: PlannedUnit
    config: UnitConfig
    init: object
    moves: bool
    synchronises: bool


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
    options = [_with_defaults(unit.options) for unit in plan.units]
    groups = _Groups(automatic=automatic)
    devices: dict[str, torch.device | None] = {}
    switches = read_switches()
    drafts: list[tuple[partial[UnitConfig], tuple[Any, ...]]] = []
    for unit, given in zip(plan.units, options):
        wanted = repr(given["device_id"])
        if wanted not in devices:
            devices[wanted] = explicit_device(given["device_id"])
        key, known = groups.given(given)
        draft = partial(
            UnitConfig,
            device=_check(unit, given, known, devices[wanted], plan),
            mixed_precision=MixedPrecision()
            if unit.full_precision
            else coerce_mixed_precision(given["mixed_precision"]),
            cpu_offload=coerce_cpu_offload(given["cpu_offload"]),
            backward_prefetch=coerce_backward_prefetch(given["backward_prefetch"]),
            forward_prefetch=bool(given["forward_prefetch"]),
            limit_all_gathers=bool(given["limit_all_gathers"]),
            use_orig_params=bool(given["use_orig_params"]),
            full_precision_module=unit.full_precision,
            applied_here=composable and unit is plan.root,
            switches=switches,
        )
        drafts.append((draft, key))
    # Making groups is what a refused call could not take back, hence last.
    return [
        ResolvedUnit(
            unit,
            draft(**groups.final(key)),
            given["param_init_fn"],
            given["device_id"] is not None,
            bool(given["sync_module_states"]),
        )
        for unit, given, (draft, key) in zip(plan.units, options, drafts)
    ]


def _with_defaults(given: Mapping[str, Any]) -> dict[str, Any]:
    unknown = sorted(set(given) - set(UNIT_OPTIONS))
    if unknown:
        raise ConfigError(
            f"options of a unit: expected some of {listing(sorted(UNIT_OPTIONS))}, got {listing(unknown)}. "
            "Correct the policy."
        )
    return {**UNIT_OPTIONS, **given}


def _check(
    unit: PlannedUnit,
    options: Mapping[str, Any],
    groups: DataParallelGroups | None,
    asked: torch.device | None,
    plan: WrapPlan,
) -> torch.device:
    """Refuse what cannot be built; return the device of computation."""
    params = [planned.param for planned in unit.params]
    if params:
        names = [join_fqn(unit.fqn, planned.fqn) for planned in unit.params]
        check_params(params, names, use_orig_params=bool(options["use_orig_params"]))
    check_initializable(unit, options["param_init_fn"], plan.ignored)
    device = compute_device(
        asked,
        params,
        needs_cuda=dist.get_backend(default_group() if groups is None else groups.shard) == "nccl",
        offload=coerce_cpu_offload(options["cpu_offload"]).offload_params,
    )
    if options["sync_module_states"] and asked is None:
        check_broadcastable(unit, device)
    return device


class _Groups:
    """The groups of one application's units, resolved once for each different request."""

    def __init__(self, *, automatic: bool) -> None:
        self._automatic = automatic
        self._given: dict[tuple[Any, ...], DataParallelGroups | None] = {}
        self._final: dict[tuple[Any, ...], dict[str, Any]] = {}
        self._made: DataParallelGroups | None = None

    def given(self, options: Mapping[str, Any]) -> tuple[tuple[Any, ...], DataParallelGroups | None]:
        """Return a key for :meth:`final`, and the groups; None for those that are still to be made."""
        group, mesh = options["process_group"], options["device_mesh"]
        strategy = coerce_sharding_strategy(options["sharding_strategy"]) or ShardingStrategy.FULL_SHARD
        key = (id(group), id(mesh), strategy)
        if key not in self._given:
            self._given[key] = resolve_groups(group, mesh, strategy, automatic=self._automatic)
        return key, self._given[key]

    def final(self, key: tuple[Any, ...]) -> dict[str, Any]:
        """Return the groups and the strategy that they allow, making groups on first need."""
        if key not in self._final:
            groups = self._given[key] or self._made
            if groups is None:
                groups = self._made = groups_by_host()
            self._final[key] = {"groups": groups, "strategy": effective_strategy(key[-1], groups)}
        return self._final[key]
