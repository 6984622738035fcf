"""The ranks over which a unit is sharded, and those over which it is replicated.

Turns what users pass (a group, a pair of groups, a mesh, nothing) into :class:`DataParallelGroups`, and decides the
strategy that these groups allow.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from fsdp_ref.config import HYBRID_SHARDING_STRATEGIES, ShardingStrategy
from fsdp_ref.env import local_world_size
from fsdp_ref.errors import ConfigError, ConfigTypeError, FsdpRuntimeError


@dataclass(frozen=True, slots=True, eq=False)
class DataParallelGroups:
    """The groups of one unit.

    Attributes:
        shard: ranks with one shard each of the unit's parameters.
        replicate: ranks with the same shard in other shard groups; None without replication.
        mesh: the mesh that the user gave, with axes (replicate, shard) or (shard); None where groups were given or made.
        tensor: ranks that train on the same data with other parts of the same parameters (tensor parallelism), each with
            groups of its own; None without.
    """

    shard: dist.ProcessGroup
    replicate: dist.ProcessGroup | None = None
    mesh: DeviceMesh | None = None
    tensor: dist.ProcessGroup | None = None

    @property
    def rank(self) -> int:
        """This rank's number in the shard group."""
        return self.shard.rank()

    @property
    def is_first(self) -> bool:
        """Whether this rank is the first of its shard group, in the first replica."""
        return self.rank == 0 and (self.replicate is None or self.replicate.rank() == 0)

    @property
    def shard_size(self) -> int:
        """Ranks of the shard group."""
        return self.shard.size()

    @property
    def replicate_size(self) -> int:
        """Ranks of the replicate group, 1 without one."""
        return 1 if self.replicate is None else self.replicate.size()

    @property
    def total_size(self) -> int:
        """Ranks over which gradients are averaged."""
        return self.shard_size * self.replicate_size

    def __deepcopy__(self, memo: dict[int, Any]) -> DataParallelGroups:
        """A copied model communicates over the same groups; a process group itself cannot be copied."""
        return self


def resolve_groups(
    process_group: object, device_mesh: DeviceMesh | None, strategy: ShardingStrategy, *, automatic: bool
) -> DataParallelGroups | None:
    """Return the groups of a unit; None where they are left to :func:`groups_by_host`.

    Args:
        process_group: None, a group, or (hybrid) a pair (shard group, replicate group).
        device_mesh: None, a 1-D mesh, or (hybrid) a 2-D mesh with axes (replicate, shard).
        strategy: what the user asked for.
        automatic: whether a policy wraps the rest, so that hybrid groups may be made.

    Raises:
        ConfigError: both given; hybrid without groups; a mesh or group of the wrong form.
    """
    # Before reading either: it is unknown which one was meant.
    if process_group is not None and device_mesh is not None:
        raise ConfigError(
            "Cannot pass both process_group and device_mesh at the same time: expected one of them, got both. "
            "Drop one; a mesh carries its own groups."
        )
    if strategy in HYBRID_SHARDING_STRATEGIES:
        return _hybrid_groups(process_group, device_mesh, strategy, automatic=automatic)
    if device_mesh is not None:
        _require_axes(device_mesh, 1, strategy)
        return DataParallelGroups(device_mesh.get_group(mesh_dim=0), mesh=device_mesh)
    if process_group is None:
        return DataParallelGroups(default_group())
    # Also what ``new_group`` returns on a rank that is no member: a number.
    if not isinstance(process_group, dist.ProcessGroup):
        raise ConfigTypeError(
            f"process_group: expected a ProcessGroup that this rank belongs to, for {strategy.name}, got "
            f"{process_group!r} of type {type(process_group).__name__}. Pass a group made by "
            "torch.distributed.new_group on a rank that is a member of it."
        )
    return DataParallelGroups(process_group)


def default_group() -> dist.ProcessGroup:
    """Return the default process group.

    Raises:
        FsdpRuntimeError: there is none yet.
    """
    world = dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
    if world is None:
        raise FsdpRuntimeError(
            "process_group: expected an initialized default process group, got none. Call "
            "torch.distributed.init_process_group first, or pass a group."
        )
    return world


def _hybrid_groups(
    process_group: object, device_mesh: DeviceMesh | None, strategy: ShardingStrategy, *, automatic: bool
) -> DataParallelGroups | None:
    if device_mesh is not None:
        _require_axes(device_mesh, 2, strategy)
        # The outer axis are replicas, as in torch: it crosses hosts, where less is sent.
        return DataParallelGroups(device_mesh.get_group(mesh_dim=1), device_mesh.get_group(mesh_dim=0), device_mesh)
    if process_group is None:
        if not automatic:
            raise ConfigError(
                f"Manual wrapping with {strategy} requires explicit specification of process group or device_mesh: "
                "expected (shard group, replicate group) or a 2-D mesh, got neither. Pass one of them."
            )
        # Made later, when every unit of the call was checked: making a group cannot be taken back.
        return None
    pair = tuple(process_group) if isinstance(process_group, (tuple, list)) else ()
    if len(pair) != 2 or not all(isinstance(group, dist.ProcessGroup) for group in pair):
        raise ConfigError(
            f"Expected process_group to be passed in as either None or Tuple[dist.ProcessGroup, dist.ProcessGroup] "
            f"(shard group, replicate group) for {strategy.name}, got {process_group!r}. "
            "Pass the pair of groups that this rank belongs to, or a 2-D device_mesh."
        )
    return DataParallelGroups(pair[0], pair[1])


def _require_axes(mesh: DeviceMesh, axes: int, strategy: ShardingStrategy) -> None:
    if mesh.ndim != axes:
        raise ConfigError(
            f"Expected device_mesh to have ndim={axes} for {strategy.name} but got ndim={mesh.ndim}. "
            f"Pass {'(replicate, shard)' if axes == 2 else 'one axis; slice a larger mesh by name'}."
        )


def groups_by_host() -> DataParallelGroups:
    """Make a shard group of the ranks on this host and a replicate group of the ranks with this local number.

    The launcher says how many ranks a host has; without a launcher all ranks count as one host.

    Collectives:
        Makes groups, so all ranks of the default group must call it.
    """
    size = dist.get_world_size()
    # A launcher may start more ranks on a host than this world has.
    local = local_world_size() or size
    return make_groups(min(local, size))


def make_groups(shard_size: int) -> DataParallelGroups:
    """Cut the default group into consecutive shard groups of ``shard_size`` ranks, and replicate groups across them.

    Raises:
        ConfigError: the world is no multiple of ``shard_size``.

    Collectives:
        Makes groups, so all ranks of the default group must call it.
    """
    # All ranks get here or none: what a rank may refuse was refused before any group is made.
    size, rank = dist.get_world_size(), dist.get_rank()
    if shard_size < 1 or size % shard_size:
        raise ConfigError(
            f"hybrid sharding: expected a world size that is a multiple of the {shard_size} ranks of a shard group, got "
            f"{size}. Pass process_group=(shard group, replicate group) or a 2-D device_mesh."
        )
    # ``new_group`` is joined by all ranks, members or not, and matched by order: every rank makes every group in turn.
    shard, replicate = None, None
    for start in range(0, size, shard_size):
        group = dist.new_group(list(range(start, start + shard_size)))
        shard = group if start <= rank < start + shard_size else shard
    for local in range(shard_size):
        group = dist.new_group(list(range(local, size, shard_size)))
        replicate = group if rank % shard_size == local else replicate
    assert shard is not None  # the loops above cover every rank
    assert replicate is not None
    return DataParallelGroups(shard, replicate)


def effective_strategy(strategy: ShardingStrategy, groups: DataParallelGroups) -> ShardingStrategy:
    """Return the strategy that the groups allow, and warn if it is not the requested one.

    One rank has nothing to shard: it becomes NO_SHARD. Hybrid sharding over several replicas stays hybrid whatever
    the size of its shard group, because its gradients must still be averaged over the replicas.
    """
    if strategy is ShardingStrategy.NO_SHARD:
        if groups.total_size > 1:
            warnings.warn(
                "The `NO_SHARD` sharding strategy is deprecated. Replicate with DistributedDataParallel instead.",
                FutureWarning,
                stacklevel=5,
            )
        return strategy
    # By all ranks, not by those of the shard group: replicas of one rank each still average their gradients.
    if groups.total_size == 1:
        warnings.warn(
            f"FSDP is switching to use `NO_SHARD` instead of {strategy} since the world size is 1.",
            UserWarning,
            stacklevel=5,
        )
        return ShardingStrategy.NO_SHARD
    return strategy
