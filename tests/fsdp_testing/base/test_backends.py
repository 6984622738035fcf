"""Backends are found by name, a vendor's own by entry point, and a broken registration is one clear message."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from typing import Any

import pytest
import torch

from fsdp_testing.base import backends as registry
from fsdp_testing.base.backends import Backend, backend_named, register_backend, registered_backends
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
    assert registered_backends()[:5] == ("gloo", "nccl", "fake", "gloo-cuda", "bare")
    assert backend_named("gloo").unavailable(2) is None
    assert backend_named("fake").unavailable(1024) is None
    assert backend_named("fake").single_process
    assert not backend_named("gloo").single_process


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
@pytest.mark.parametrize(
    ("name", "needs"),
    [("nccl", "one CUDA device per rank"), ("gloo-cuda", "one CUDA device, which its ranks may share")],
)
def test_without_devices_there_is_one_reason(name: str, needs: str) -> None:
    reason = backend_named(name).unavailable(2)
    assert reason is not None
    assert reason.endswith(f"{name} needs {needs}")


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
