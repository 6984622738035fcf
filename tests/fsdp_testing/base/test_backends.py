"""Backends are found by name, a vendor's own by entry point, and a broken registration is one clear message."""

from __future__ import annotations

import os
import sys
import types
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from typing import Any

import pytest
import torch

from fsdp_testing.base import backends as registry
from fsdp_testing.base.backends import Backend, RankPlace, backend_named, register_backend, registered_backends
from fsdp_testing.errors import InvalidArgument


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    before = dict(registry._registered)
    yield
    registry._entry_point_names.cache_clear()
    registry._registered.clear()
    registry._registered.update(before)


def vendor(name: str = "vendor") -> Backend:
    return Backend(name=name, device_type="cpu", unavailable=lambda size: None, torch_backend="gloo")


def test_built_in_backends() -> None:
    assert registered_backends()[:6] == ("gloo", "nccl", "fake", "gloo-cuda", "nccl-shared", "bare")
    assert backend_named("gloo").unavailable(2) is None
    assert backend_named("fake").unavailable(1024) is None
    assert backend_named("fake").single_process
    assert not backend_named("gloo").single_process


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
@pytest.mark.parametrize(
    ("name", "needs"),
    [
        ("nccl", "one CUDA device per rank"),
        ("gloo-cuda", "one CUDA device, which its ranks may share"),
        ("nccl-shared", "one CUDA device, which its ranks share"),
    ],
)
def test_without_devices_there_is_one_reason(name: str, needs: str) -> None:
    reason = backend_named(name).unavailable(2)
    assert reason is not None
    assert reason.endswith(f"{name} needs {needs}")


@pytest.fixture
def one_device(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A machine that says it has one CUDA device."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    return monkeypatch


@pytest.mark.parametrize(
    ("version", "reason"),
    [
        (
            (2, 29, 7),
            "ranks can share a device from NCCL 2.30 on, but 2.29.7 is loaded; gloo-cuda works with any version",
        ),
        ((2, 30, 0), None),
        ((3, 0, 0), None),
    ],
)
def test_the_loaded_nccl_is_asked_whether_ranks_may_share(
    one_device: pytest.MonkeyPatch, version: tuple[int, ...], reason: str | None
) -> None:
    one_device.setattr(torch.cuda.nccl, "version", lambda: version)
    assert backend_named("nccl-shared").unavailable(4) == reason
    one_device.setattr(torch.distributed, "is_nccl_available", lambda: False)
    assert backend_named("nccl-shared").unavailable(4) == "this torch was built without nccl"


def test_what_needs_two_devices_says_so(one_device: pytest.MonkeyPatch) -> None:
    assert backend_named("nccl").unavailable(1) is None
    assert backend_named("nccl").unavailable(2) == "a world of 2 ranks needs 2 CUDA devices, 1 found"
    assert backend_named("gloo-cuda").unavailable(2) is None


def test_a_rank_that_shares_tells_nccl_before_its_group_is_made(one_device: pytest.MonkeyPatch) -> None:
    selected: list[int] = []
    one_device.setattr(torch.cuda, "set_device", selected.append)
    one_device.setenv("NCCL_MULTI_RANK_GPU_ENABLE", "undone at the end")
    one_device.delenv("NCCL_MULTI_RANK_GPU_ENABLE")
    one_device.setenv("NCCL_MAX_CTAS", "2")  # the user's own stays
    prepare = backend_named("nccl-shared").prepare
    assert prepare is not None
    prepare(RankPlace(1, 2, 0))
    assert (os.environ["NCCL_MULTI_RANK_GPU_ENABLE"], os.environ["NCCL_MAX_CTAS"]) == ("1", "2")
    assert selected == [0]


def test_a_registered_backend() -> None:
    register_backend(vendor())
    assert "vendor" in registered_backends()
    assert backend_named("vendor").torch_backend == "gloo"


def test_an_unknown_name() -> None:
    with pytest.raises(InvalidArgument, match="expected one of gloo, nccl, fake.*, got 'mpi2'"):
        backend_named("mpi2")


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("no_such_module:BACKEND", "expected no_such_module:BACKEND to load, got ModuleNotFoundError"),
        ("planted_backends:MISSING", "got AttributeError"),
        ("planted_backends:NOT_ONE", "expected a fsdp_testing.base.backends.Backend, got 3"),
    ],
)
def test_an_entry_point_that_does_not_load(value: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module: Any = types.ModuleType("planted_backends")
    module.NOT_ONE, module.GOOD = 3, vendor("planted")
    monkeypatch.setitem(sys.modules, "planted_backends", module)
    points = [EntryPoint("planted", value, registry.ENTRY_POINT_GROUP)]
    monkeypatch.setattr(registry, "entry_points", lambda group: points)
    registry._entry_point_names.cache_clear()
    assert "planted" in registered_backends()
    with pytest.raises(InvalidArgument, match=message):
        backend_named("planted")
    points[:] = [EntryPoint("planted", "planted_backends:GOOD", registry.ENTRY_POINT_GROUP)]
    assert backend_named("planted").name == "planted"
