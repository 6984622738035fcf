"""Which backends are there? Built-in gloo, nccl, fake and gloo-cuda, and a vendor's own by entry point or call.

A vendor copies nothing: a `Backend` is a name, a device type and three functions. Entry points of the group
`fsdp_testing.backends` give a `Backend` object, loaded when its name is first asked for.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Any

from fsdp_testing.errors import InvalidArgument

ENTRY_POINT_GROUP = "fsdp_testing.backends"


@dataclass(frozen=True, slots=True)
class RankPlace:
    """Where a rank stands: `rank` of `size`, and the device index it may use."""

    rank: int
    size: int
    device_index: int


@dataclass(frozen=True, slots=True)
class Backend:
    """A communication backend and the device it computes on.

    Attributes:
        name: Name for markers and options.
        device_type: "cpu", "cuda", or a vendor's.
        unavailable: Called in a rank-like process (torch may be imported); returns the one reason why a world of so
            many ranks cannot run here, or None.
        torch_backend: What `torch.distributed.init_process_group` is given.
        single_process: One process stands for any one rank, no peers exist (FakeProcessGroup).
        prepare: Called in the rank before the process group is made (select the device).
        device_count: Called in the rank; how many devices of the type there are, None where ranks share one.
    """

    name: str
    device_type: str
    unavailable: Callable[[int], str | None]
    torch_backend: str
    single_process: bool = False
    prepare: Callable[[RankPlace], None] | None = None
    device_count: Callable[[], int] | None = None


_BUILT_IN = {
    "gloo": "fsdp_testing.backends.gloo:GLOO",
    "nccl": "fsdp_testing.backends.nccl:NCCL",
    "fake": "fsdp_testing.backends.fake:FAKE",
    "gloo-cuda": "fsdp_testing.backends.gloo_cuda:GLOO_CUDA",
}
_registered: dict[str, Backend | str] = dict(_BUILT_IN)


def register_backend(backend: Backend) -> None:
    """Make `backend` known in this process under its name (ranks learn it through the entry point or a conftest)."""
    _registered[backend.name] = backend


def registered_backends() -> tuple[str, ...]:
    """Return the names that can be asked for, entry points included."""
    names = dict.fromkeys(_registered)
    names.update(dict.fromkeys(_entry_point_names()))
    return tuple(names)


@functools.cache
def _entry_point_names() -> tuple[str, ...]:
    """Scanning what is installed takes a millisecond, as long as a test; it does not change while we run."""
    return tuple(point.name for point in entry_points(group=ENTRY_POINT_GROUP))


def backend_named(name: str) -> Backend:
    """Return the backend called `name`.

    Raises:
        InvalidArgument: For a name nobody registered, or an entry point that does not load to a `Backend`.
    """
    found: Any = _registered.get(name)
    if found is None:
        points = [point for point in entry_points(group=ENTRY_POINT_GROUP) if point.name == name]
        if not points:
            known = ", ".join(registered_backends())
            raise InvalidArgument(f"backend: expected one of {known}, got {name!r}. Check the name or register it.")
        found = points[0].value
    if isinstance(found, str):
        found = _load(name, found)
        _registered[name] = found
    return found


def _load(name: str, value: str) -> Backend:
    module, _, attribute = value.partition(":")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except Exception as error:
        raise InvalidArgument(
            f"backend {name!r}: expected {value} to load, got {type(error).__name__}: {error}. "
            "Mend or uninstall the package that registers it."
        ) from error
    if not isinstance(found, Backend):
        raise InvalidArgument(f"backend {name!r}: expected a fsdp_testing.backends.Backend, got {found!r}.")
    return found
