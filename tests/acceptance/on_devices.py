"""Training on simulated devices, right and with a wait left out; run by test_sim.py."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_param_group as fsdp2
from torch.nn.parallel import DistributedDataParallel

import fsdp_ref
from fsdp_ref import compat
from fsdp_ref.comm.streams import DeviceStreams
from fsdp_testing.ranks.streams.simulated import Event

pytestmark = [pytest.mark.gpu, pytest.mark.world(2, backend="nccl")]


def net() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Linear(6, 5), nn.Tanh(), nn.Sequential(nn.Linear(5, 5), nn.Tanh()), nn.Linear(5, 3)
    ).double()


def sharded(kind: str, world, model: nn.Module, **options) -> nn.Module:
    if kind == "ddp":
        return DistributedDataParallel(model)
    if kind == "fsdp2":
        fully_shard(model[2], mesh=world.mesh)
        return fully_shard(model, mesh=world.mesh)
    cls = FullyShardedDataParallel if kind == "fsdp1" else fsdp_ref.FullyShardedDataParallel
    model[2] = cls(model[2], use_orig_params=True, device_id=world.device, **options)
    return cls(model, use_orig_params=True, device_id=world.device, **options)


def difference(kind: str, world, **options) -> float:
    """How far the output is after three steps from that of one process; NaN is far."""
    plain, model = net(), sharded(kind, world, net().to(world.device), **options)
    optimizers = [torch.optim.Adam(each.parameters(), 0.1) for each in (plain, model)]
    for step in range(3):
        inputs = torch.randn(2, 4, 6, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
        torch.stack([plain(part).square().mean() for part in inputs]).mean().backward()
        model(inputs[world.rank].to(world.device)).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    have, want = model(inputs[0].to(world.device)).cpu(), plain(inputs[0])
    return (have - want).abs().nan_to_num(nan=1.0).max().item()


# Two ranks and six layers in float64 are exact to about 1e-14, which three steps of Adam amplify little.
EXACT = 1e-10


def left_out(owner: object, name: str, instead: Callable[..., Any] = lambda *args: None) -> AbstractContextManager[Any]:
    return mock.patch.object(owner, name, instead)


@pytest.fixture(autouse=True)
def _late_as_before(world) -> Iterator[None]:
    yield
    torch.sim.set_late("all")


@pytest.fixture(params=["all", "default", "others"])
def late(request: pytest.FixtureRequest, world) -> None:
    """Each choice of the streams whose work is late."""
    torch.sim.set_late(request.param)


@pytest.mark.usefixtures("late")
@pytest.mark.parametrize("kind", ["ref", "fsdp1", "fsdp2", "ddp"])
def test_right(world, kind: str) -> None:
    assert difference(kind, world) < EXACT


@pytest.mark.usefixtures("late")
def test_right_offloaded(world) -> None:
    assert difference("ref", world, cpu_offload=fsdp_ref.CPUOffload(True)) < EXACT


def test_planted_reduction_before_its_gradients(world) -> None:
    torch.sim.set_late("default")
    with left_out(DeviceStreams, "reduce_after_compute"):
        assert difference("ref", world) > EXACT


@pytest.mark.parametrize("kind", ["ref", "fsdp2"])
def test_planted_streams_that_wait_for_nobody(world, kind: str) -> None:
    torch.sim.set_late("default")
    with left_out(torch.sim.Stream, "wait_stream"), left_out(torch.sim.Stream, "wait_event"):
        assert difference(kind, world) > EXACT


def test_planted_use_before_its_gather(world) -> None:
    original = fsdp2.foreach_all_gather_copy_out

    def hasty(result, *args):
        """Copy out of a gather without a wait for its stream."""
        return original(result._replace(all_gather_event=None, all_gather_work=None), *args)

    torch.sim.set_late("others")
    with left_out(fsdp2, "foreach_all_gather_copy_out", hasty):
        assert difference("fsdp2", world) > EXACT


def offloaded_step(world) -> None:
    """Three steps with shards and gradients on the host, whose optimizer runs there."""
    with world.check_streams():
        difference("ref", world, cpu_offload=fsdp_ref.CPUOffload(True))


@pytest.mark.parametrize("kind", ["ref", "fsdp1", "fsdp2", "ddp"])
def test_no_race_is_seen_on_a_device(world, kind: str) -> None:
    with world.check_streams():
        assert difference(kind, world) < EXACT


def test_no_race_is_seen_of_the_host(world) -> None:
    offloaded_step(world)


@pytest.mark.parametrize("waits", [True, False])
def test_planted_host_that_does_not_wait_for_a_copy(world, waits: bool) -> None:
    with nullcontext() if waits else pytest.raises(AssertionError) as raised, world.check_streams():
        home = torch.empty(4, pin_memory=True)
        home.copy_(torch.ones(4, device=world.device), non_blocking=True)
        if waits:
            torch.sim.current_stream().synchronize()
        home.add_(1)
    if not waits:
        assert "Nothing orders add_ on the host after copy_ on the default stream" in str(raised.value)
        assert str(raised.value).count("on_devices.py") == 2


def test_planted_offload_whose_optimizer_does_not_wait(world) -> None:
    model = fully_shard(net(), mesh=world.mesh, offload_policy=CPUOffloadPolicy())
    with left_out(Event, "synchronize"), pytest.raises(AssertionError) as raised, world.check_streams():
        model(torch.ones(4, 6, dtype=torch.float64, device=world.device)).square().mean().backward()
        torch.optim.SGD(model.parameters(), 0.1).step()
    assert "on the host after" in str(raised.value)


def test_a_cleared_gradient_of_a_failed_backward_stays_cleared(world) -> None:
    """Autograd's thread of a device lets go of a failed pass after the caller; what was cleared came back with the next step."""
    kept: list[object] = []  # as that thread does for a moment
    queue = compat.queue_backward_callback

    def queue_and_keep(end: Callable[[], None]) -> None:
        kept.append(end)
        queue(end)

    model = sharded("ref", world, net().to(world.device))
    inputs = torch.ones(4, 6, dtype=torch.float64, device=world.device)

    def gradients() -> list[torch.Tensor]:
        model(inputs).square().mean().backward()
        return [param.grad.cpu() for param in model.parameters() if param.grad is not None and param.grad.numel()]

    wanted = gradients()
    for _ in range(2):
        model.zero_grad()
        failing = model[1].register_full_backward_hook(lambda *args: 1 / 0)
        queued = left_out(compat, "queue_backward_callback", queue_and_keep)
        with queued, model.no_sync(), pytest.raises(ZeroDivisionError):
            model(inputs).square().mean().backward()
        failing.remove()
        model.zero_grad()
        assert all(torch.equal(have, want) for have, want in zip(gradients(), wanted, strict=True))
