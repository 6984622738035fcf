"""Which ranks shard and which replicate, from what users pass; and what is refused."""

from __future__ import annotations

import copy
from contextlib import contextmanager

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from fsdp_ref.comm.groups import default_group, make_groups, resolve_groups
from fsdp_ref.config import ShardingStrategy as S
from fsdp_ref.errors import ConfigError, ConfigTypeError, FsdpRuntimeError


@contextmanager
def fake_world(size, rank):
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()


def ranks(group):
    return dist.get_process_group_ranks(group)


@pytest.mark.parametrize("rank", range(6))
@pytest.mark.parametrize("shard_size", [1, 2, 3, 6])
def test_consecutive_shard_groups_and_replicas_across_them(rank, shard_size):
    with fake_world(6, rank):
        groups = make_groups(shard_size)
        first = rank - rank % shard_size
        assert ranks(groups.shard) == list(range(first, first + shard_size))
        assert ranks(groups.replicate) == list(range(rank % shard_size, 6, shard_size))
        assert (groups.rank, groups.shard_size) == (rank % shard_size, shard_size)
        assert (groups.replicate_size, groups.total_size) == (6 // shard_size, 6)
        assert copy.deepcopy(groups) is groups


@pytest.mark.parametrize("shard_size", [0, 4, 7])
def test_worlds_that_are_no_multiple(shard_size):
    refused = pytest.raises(
        ConfigError,
        match=f"hybrid sharding: expected a world size that is a multiple of the {shard_size} .* got 6. Pass",
    )
    with fake_world(6, 0), refused:
        make_groups(shard_size)


def test_without_a_default_group():
    with pytest.raises(
        FsdpRuntimeError, match="process_group: expected an initialized default process group, got none"
    ):
        default_group()


@pytest.mark.parametrize("rank", [0, 5])
def test_what_is_passed(rank):
    with fake_world(6, rank) as world:

        def resolved(group, mesh, strategy, automatic=True):
            found = resolve_groups(group, mesh, strategy, automatic=automatic)
            return ranks(found.shard), None if found.replicate is None else ranks(found.replicate)

        everybody = list(range(6))
        line, plane = init_device_mesh("cpu", (6,)), init_device_mesh("cpu", (2, 3))
        first = rank - rank % 3
        expected = list(range(first, first + 3)), [rank % 3, rank % 3 + 3]
        assert resolved(None, None, S.FULL_SHARD) == resolved(world, None, S.FULL_SHARD) == (everybody, None)
        assert resolved(None, line, S.FULL_SHARD) == (everybody, None)
        assert resolved(None, plane, S.HYBRID_SHARD) == expected
        pair = (plane.get_group(1), plane.get_group(0))
        assert resolved(pair, None, S.HYBRID_SHARD) == resolved(list(pair), None, S.HYBRID_SHARD, False) == expected
        for group, mesh, strategy, automatic, error, said in (
            (world, line, S.FULL_SHARD, True, ConfigError, "Cannot pass both process_group and device_mesh"),
            (None, plane, S.FULL_SHARD, True, ConfigError, "ndim=1 for FULL_SHARD but got ndim=2. Pass one axis"),
            (
                None,
                line,
                S.HYBRID_SHARD,
                True,
                ConfigError,
                r"ndim=2 for HYBRID_SHARD but got ndim=1. Pass \(replicate",
            ),
            (
                "all",
                None,
                S.FULL_SHARD,
                True,
                ConfigTypeError,
                "ProcessGroup that this rank belongs to.*'all' of type str",
            ),
            (None, None, S.HYBRID_SHARD, False, ConfigError, "Manual wrapping with .*HYBRID_SHARD requires explicit"),
            (world, None, S.HYBRID_SHARD, True, ConfigError, "None or Tuple.* for HYBRID_SHARD, got"),
            ((world, world, world), None, S.HYBRID_SHARD, True, ConfigError, "None or Tuple.* for HYBRID_SHARD, got"),
            ((world, "none"), None, S.HYBRID_SHARD, True, ConfigError, "None or Tuple.* for HYBRID_SHARD, got"),
        ):
            with pytest.raises(error, match=said):
                resolve_groups(group, mesh, strategy, automatic=automatic)
