"""On which device a unit computes, and what is refused: decided from facts, so that no accelerator is needed here."""

from __future__ import annotations

import copy
import gc

import pytest
import torch
from torch import nn

from fsdp_ref import CPUOffload
from fsdp_ref.api.fully_shard import fully_shard
from fsdp_ref.build import resolve
from fsdp_ref.build.device import compute_device, explicit_device
from fsdp_ref.errors import FsdpRuntimeError, FsdpValueError
from fsdp_ref.wrap import always_wrap_policy

CPU = torch.device("cpu")


class Located:
    """A tensor as far as its device goes."""

    is_meta = False

    def __init__(self, device: str) -> None:
        self.device = torch.device(device)


@pytest.fixture
def two_accelerators(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)


@pytest.mark.parametrize("device_id", [2, -1, "cuda:2", torch.device("cuda", 7)])
def test_an_index_that_is_not_there(two_accelerators, device_id):
    with pytest.raises(FsdpRuntimeError, match="expected one of the 2 accelerators .* got index .*Pass 0 to 1"):
        explicit_device(device_id)


@pytest.mark.parametrize("device_id", [0, "cuda", "cuda:0", torch.device("cuda")])
def test_an_accelerator_on_a_host_without_one(device_id, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(FsdpRuntimeError, match="got none on this host. Pass torch.device"):
        explicit_device(device_id)


@pytest.mark.covers("CTOR-02", "CTOR-13")
def test_devices_that_are_there(two_accelerators):
    assert explicit_device(None) is None
    assert explicit_device("cpu") == explicit_device(torch.device("cpu", 0)) == CPU
    assert explicit_device(1) == explicit_device("cuda:1") == torch.device("cuda", 1)
    with pytest.warns(UserWarning, match="does not have an explicit index"):
        assert explicit_device("cuda") == torch.device("cuda", 1)


@pytest.mark.parametrize("device_id", ["disk:0", "meta", torch.device("meta"), [0], 1.5])
def test_what_is_no_device(device_id):
    with pytest.raises(
        FsdpValueError, match="device_id: expected an int, a string or a torch.device that holds values"
    ):
        explicit_device(device_id)


@pytest.mark.covers("CTOR-11", "CTOR-12")
def test_where_the_parameters_are(two_accelerators):
    first, second, host = Located("cuda:0"), Located("cuda:1"), Located("cpu")
    on_meta = torch.empty(1, device="meta")
    assert compute_device(None, [host], needs_cuda=False) == CPU
    assert compute_device(None, [first, on_meta], needs_cuda=False) == first.device
    assert compute_device(first.device, [host, first], needs_cuda=True) == first.device
    assert compute_device(None, [on_meta], needs_cuda=True) == second.device
    assert compute_device(None, [host], needs_cuda=True, offload=True) == second.device
    with pytest.raises(FsdpRuntimeError, match="only supports single device modules.*got cuda:0, cuda:1"):
        compute_device(None, [second, first], needs_cuda=True)
    with pytest.raises(FsdpRuntimeError, match=r"CPU and accelerator parameters \(cpu, cuda:0\)"):
        compute_device(None, [host, first], needs_cuda=True)
    with pytest.raises(ValueError, match="Inconsistent compute device.*on cuda:1 or the CPU, got cuda:0"):
        compute_device(second.device, [first], needs_cuda=True)


@pytest.mark.world(2)
@pytest.mark.covers("CTOR-14")
@pytest.mark.parametrize("units", [None, always_wrap_policy])
def test_a_module_on_the_cpu_and_a_group_that_communicates_elsewhere(world, units, monkeypatch):
    from fsdp_ref import FullyShardedDataParallel as FSDP

    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    before = copy.deepcopy(model)
    with monkeypatch.context() as patched:
        patched.setattr(resolve.dist, "get_backend", lambda group: "nccl")
        patched.setattr(torch.cuda, "current_device", lambda: 0)  # of a unit without parameters
        with pytest.raises(FsdpRuntimeError, match="passed-in module is on the CPU: .* Pass device_id, or move"):
            FSDP(model, auto_wrap_policy=units)
    assert gc.isenabled()  # paused while units are made
    assert [name for name, _ in model.named_parameters()] == [name for name, _ in before.named_parameters()]
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(model.parameters(), before.parameters()))
    gc.disable()
    try:
        sharded = FSDP(model, auto_wrap_policy=units, device_id="cpu")
        assert not gc.isenabled()  # as the user wants it
    finally:
        gc.enable()
    assert sharded.compute_device == CPU
    sharded(torch.ones(1, 2)).sum().backward()


@pytest.mark.world(2)
@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("how", ["flat", "original", "composable"])
def test_a_model_is_not_moved_after_it_was_sharded(world, how, offload):
    """The meta device stands for another one; refused before anything moves, where the wrapper hears of it."""
    from fsdp_ref import FullyShardedDataParallel as FSDP

    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    x = torch.arange(4.0).reshape(2, 2)
    expected = copy.deepcopy(plain)(x)
    options = {"cpu_offload": CPUOffload(offload)}
    if how == "composable":
        model = fully_shard(plain, **options)
    else:
        model = FSDP(plain, use_orig_params=how == "original", **options)
    refused = pytest.raises(FsdpRuntimeError, match="unexpectedly has parameters on meta.*expected cpu")
    if how == "composable":
        kept = [(layer, dict(layer._parameters), dict(layer._buffers)) for layer in plain]
        model.to("meta")
        with refused:
            model(x)
        for layer, params, buffers in kept:  # back where it was: meta tensors have no values to move
            layer._parameters.update(params)
            layer._buffers.update(buffers)
    else:
        with refused:
            model.to("meta")
    model.cpu()
    torch.testing.assert_close(model(x), expected)
