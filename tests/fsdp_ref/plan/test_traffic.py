"""What a step is planned to send, and to gather at once, equals what was recorded: on small worlds, and as one of 1,024 ranks."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as Fsdp1
from torch.distributed.fsdp import ShardingStrategy as Strategy1
from torch.distributed.fsdp import fully_shard

import fsdp_ref
from fsdp_ref.plan.traffic import LIBRARIES, Message, messages, peak_bytes, step_seconds
from fsdp_ref.plan.unit_layouts import UnitLayout, unit_layouts
from fsdp_testing.base.compat import Operator, freed, operators_run_by, storage_key, storage_reference
from fsdp_testing.ranks.ledger import interception

BYTES = {"uint8": 1, "float32": 4, "int64": 8}


WIDTHS = (3, 5, 2, 6)


def model() -> nn.Sequential:
    """A root around units, of which the second is no multiple of another and the last is the largest."""
    torch.manual_seed(0)
    parts = [nn.Sequential(nn.Linear(7, width), nn.Linear(width, 7, bias=width % 2 > 0)) for width in WIDTHS]
    return nn.Sequential(nn.Linear(5, 7), *parts, nn.Linear(7, 2))


def replicas_of(strategy: str, size: int) -> int:
    """Copies of the model: a hybrid strategy has two of a small world, and shards over groups of 8 ranks of a large one."""
    if strategy.startswith("HYBRID"):
        return 2 if size < 16 else size // 8
    return size if strategy == "NO_SHARD" else 1


@contextlib.contextmanager
def mesh_of(strategy: str, world) -> Iterator[DeviceMesh | None]:
    """The mesh of (replicate, shard) of a hybrid strategy, whose groups are gone afterwards."""
    if not strategy.startswith("HYBRID"):
        yield None
        return
    replicas = replicas_of(strategy, world.size)
    mesh = init_device_mesh("cpu", (replicas, world.size // replicas), mesh_dim_names=("replicate", "shard"))
    try:
        yield mesh
    finally:
        for group in {*mesh.get_all_groups()} - {dist.group.WORLD}:
            dist.destroy_process_group(group)


def shard(library: str, strategy: str, world, mesh: DeviceMesh | None) -> nn.Module:
    net = model()
    if library == "fsdp2":
        frees = strategy in {"FULL_SHARD", "HYBRID_SHARD"}
        for module in (*net[1:-1], net):
            fully_shard(module, mesh=mesh or world.mesh, reshard_after_forward=frees and module is not net)
        return net
    name = strategy.replace("HYBRID_SHARD_ZERO2", "_HYBRID_SHARD_ZERO2")
    if library == "fsdp1":
        wrap, kind, more = Fsdp1, Strategy1[name], {"device_id": torch.device("cpu"), "device_mesh": mesh}
    else:
        wrap, kind, more = fsdp_ref.FullyShardedDataParallel, fsdp_ref.ShardingStrategy[name], {"device_mesh": mesh}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # NO_SHARD is warned about
        for place in range(1, 1 + len(WIDTHS)):
            net[place] = wrap(net[place], use_orig_params=True, sharding_strategy=kind, **more)
        return wrap(net, use_orig_params=True, sharding_strategy=kind, **more)


def step(net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    net(torch.ones(2, 5)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def recorded(library: str, strategy: str, world) -> list[tuple[str, int]]:
    """Kind and bytes of each collective of a second step; the bytes of an exchange are not recorded."""
    calls = []
    with mesh_of(strategy, world) as mesh:
        net = shard(library, strategy, world, mesh)
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        for _ in range(2):
            calls.clear()
            with interception.listen(lambda group, call, site: calls.append(call.what)):
                step(net, optimizer)
    return [(what[0].removesuffix("_single").removesuffix("_tensor"), full_bytes(what)) for what in calls]


def full_bytes(what) -> int:
    if len(what) < 4:
        return -1
    return BYTES[what[2]] * (sum(what[3]) if isinstance(what[3], tuple) else what[3])


class GatheredMemory:
    """Memory that gathers write to, and that is filled and emptied again, while somebody holds it."""

    def __init__(self) -> None:
        self.peak_bytes = 0
        self._bytes: dict[int, int] = {}
        self._references: dict[int, Any] = {}

    def _note(self, storage: torch.UntypedStorage) -> None:
        for key in freed(self._references):
            del self._references[key], self._bytes[key]
        self._references[storage_key(storage)] = storage_reference(storage)
        self._bytes[storage_key(storage)] = storage.nbytes()
        self.peak_bytes = max(self.peak_bytes, sum(self._bytes.values()))

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        resize = torch.UntypedStorage.resize_

        def noted(storage: torch.UntypedStorage, size: int) -> Any:
            result = resize(storage, size)
            self._note(storage)
            return result

        def run(operator: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if operator.name == "_allgather_base_":
                self._note(args[0].untyped_storage())
            return operator.call(*args, **kwargs)

        with mock.patch.object(torch.UntypedStorage, "resize_", noted), operators_run_by(run):
            yield


def recorded_peak(library: str, strategy: str, world) -> int:
    """Bytes of full parameters that a second step has at once."""
    memory = GatheredMemory()
    with mesh_of(strategy, world) as mesh:
        net = shard(library, strategy, world, mesh)
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        step(net, optimizer)
        with memory.watched():
            step(net, optimizer)
    return memory.peak_bytes


def units_of(strategy: str, size: int) -> tuple[UnitLayout, ...]:
    return unit_layouts(
        model(), world_size=size // replicas_of(strategy, size), units=[str(1 + place) for place in range(len(WIDTHS))]
    )


def planned(library: str, strategy: str, size: int) -> list[tuple[str, int]]:
    units = units_of(strategy, size)
    sent = messages(units, strategy=strategy, replicas=replicas_of(strategy, size), library=library)
    return [(message.op, message.full_bytes) for message in sent]


HYBRID = [(library, kind) for library in LIBRARIES for kind in ("HYBRID_SHARD", "HYBRID_SHARD_ZERO2")]
ONE_GROUP = [
    *((library, kind) for library in LIBRARIES for kind in ("FULL_SHARD", "SHARD_GRAD_OP")),
    ("fsdp_ref", "NO_SHARD"),
    ("fsdp1", "NO_SHARD"),
]


def check_messages(library: str, strategy: str, world) -> None:
    have, want = recorded(library, strategy, world), planned(library, strategy, world.size)
    if library == "fsdp_ref" and world.size < 1024:
        # Over gloo the reference exchanges terms, and adds them up in the order of the ranks.
        want = [("all_to_all", -1) if op == "reduce_scatter" else (op, size) for op, size in want]
    assert sorted(have) == sorted(want)


def check_peak(library: str, strategy: str, world) -> None:
    units = units_of(strategy, world.size)
    assert recorded_peak(library, strategy, world) == peak_bytes(units, strategy=strategy, library=library)


CHECKS = pytest.mark.parametrize("check", [check_messages, check_peak])


@CHECKS
@pytest.mark.parametrize(("library", "strategy"), ONE_GROUP)
@pytest.mark.world([1, 2, 3])
def test_a_plan_equals_the_record_of_a_small_world(world, library, strategy, check) -> None:
    check(library, strategy, world)


@CHECKS
@pytest.mark.parametrize(("library", "strategy"), HYBRID)
@pytest.mark.world([2, 4])
def test_a_plan_equals_the_record_of_two_replicas(world, library, strategy, check) -> None:
    check(library, strategy, world)


@CHECKS
@pytest.mark.parametrize(("library", "strategy"), ONE_GROUP + HYBRID)
@pytest.mark.world(1024, backend="fake", rank=3)
def test_a_plan_equals_the_record_of_one_of_1024_ranks(world, library, strategy, check) -> None:
    check(library, strategy, world)


def test_of_units_within_units_no_peak_is_said() -> None:
    units = unit_layouts(model(), world_size=2, units=["1", "1.0"])
    assert peak_bytes(units, strategy="FULL_SHARD") is None


def test_time_by_hand() -> None:
    """A ring of 4 sends 3/4 of a gather's result, and twice that in an all-reduce."""
    sent = (Message("all_gather", 400, 4), Message("all_reduce", 400, 4))
    assert [message.link_bytes for message in sent] == [300.0, 600.0]
    assert step_seconds(sent, 10, tokens=5, link_bytes=90.0, flops=30.0) == (10.0, 10.0)
