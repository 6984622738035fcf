"""Communication backends of a world: six come with the package, vendors add theirs by entry point or call.

A `Backend` is a name, a device type and three functions. Entry points of the group `fsdp_testing.backends` give a `Backend`
object, loaded when its name is first asked for.

- gloo: collectives between CPU processes over loopback, always available if torch was built with it.
- nccl: collectives between CUDA devices, one rank per device.
- gloo-cuda: gloo between CUDA devices. Every collective passes through the host, slowly, but ranks may share a device, which
  NCCL refuses: so a machine with one GPU tests the CUDA path of an implementation (streams, events, memory).
- nccl-shared: nccl between ranks that share devices, an option of NCCL from 2.30 on.
- fake: one process as any rank of any size. Collectives return at once and move nothing: useful for shapes, counts
and memory at sizes too large to start; values after a collective mean nothing.
- bare: processes without a process group, started as torchrun starts them; the code makes its own groups.
Collectives are recorded but not compared: such code may let ranks differ on purpose.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import entry_points

from fsdp_testing.base import env
from fsdp_testing.errors import InvalidArgument


@dataclass(frozen=True, slots=True)
class RankPlace:
    """A rank's position: `rank` of `size`, and the index of its device."""

    rank: int
    size: int
    device_index: int


@dataclass(frozen=True, slots=True)
class Backend:
    """A communication backend and the device it computes on.

    Attributes:
        name: Name for markers and options.
        device_type: "cpu", "cuda", or a vendor's.
        unavailable: Called in a rank-like process (torch may be imported); returns the one reason why a world of this size
            cannot run here, or None.
        torch_backend: The backend for `torch.distributed.init_process_group`.
        single_process: One process acts as any one rank, without peers (FakeProcessGroup).
        prepare: Called in the rank before the process group is made (select the device).
        device_count: Called in the rank; number of devices of the type, None if ranks share one.
        makes_group: Whether ranks find themselves in a process group of all ranks.
    """

    name: str
    device_type: str
    unavailable: Callable[[int], str | None]
    torch_backend: str
    single_process: bool = False
    prepare: Callable[[RankPlace], None] | None = None
    device_count: Callable[[], int] | None = None
    makes_group: bool = True


def _device_count() -> int:
    import torch

    return torch.cuda.device_count()


def _select_device(place: RankPlace) -> None:
    import torch

    torch.cuda.set_device(place.device_index)


def _no_gloo(size: int) -> str | None:
    # Ranks ask again before they begin. A controller that does not use torch need not import it for this.
    if "torch" not in sys.modules:
        return None
    import torch.distributed as dist

    there = dist.is_available() and dist.is_gloo_available()
    return None if there else "this torch was built without gloo"


def _let_ranks_share(place: RankPlace) -> None:
    # NCCL reads both when it makes a communicator. Kernels of several ranks must fit on one device at once, or they wait for
    # one another forever: one block each.
    env.update({name: env.get(name, "1") for name in ("NCCL_MULTI_RANK_GPU_ENABLE", "NCCL_MAX_CTAS")})
    _select_device(place)


def _no_cuda() -> str | None:
    import torch

    if torch.cuda.is_available():
        return None
    return "this torch is a CPU build" if torch.version.cuda is None else "no CUDA device answers"


def _no_nccl(size: int) -> str | None:
    import torch.distributed as dist

    missing = _no_cuda()
    if missing is not None:
        return f"{missing}; nccl needs one CUDA device per rank"
    if not dist.is_nccl_available():
        return "this torch was built without nccl"
    devices = _device_count()
    return None if size <= devices else f"a world of {size} ranks needs {size} CUDA devices, {devices} found"


def _no_nccl_shared(size: int) -> str | None:
    import torch
    import torch.distributed as dist

    missing = _no_cuda()
    if missing is not None:
        return f"{missing}; nccl-shared needs one CUDA device, which its ranks share"
    if not dist.is_nccl_available():
        return "this torch was built without nccl"
    version = torch.cuda.nccl.version()  # of the library that is loaded
    if version >= _SHARES_DEVICES:
        return None
    loaded, wanted = (".".join(map(str, numbers)) for numbers in (version, _SHARES_DEVICES))
    return f"ranks can share a device from NCCL {wanted} on, but {loaded} is loaded; gloo-cuda works with any version"


def _no_gloo_cuda(size: int) -> str | None:
    missing = _no_cuda()
    if missing is not None:
        return f"{missing}; gloo-cuda needs one CUDA device, which its ranks may share"
    return _no_gloo(size)


def _no_fake(size: int) -> str | None:
    try:
        from fsdp_testing.base.compat import fake_store

        fake_store()
    except ImportError as error:
        return f"this torch has no FakeProcessGroup ({error})"
    return None


_SHARES_DEVICES = (2, 30)
BUILT_IN = (
    Backend("gloo", "cpu", _no_gloo, "gloo"),
    Backend("nccl", "cuda", _no_nccl, "nccl", prepare=_select_device, device_count=_device_count),
    Backend("fake", "cpu", _no_fake, "fake", single_process=True),
    Backend("gloo-cuda", "cuda", _no_gloo_cuda, "gloo", prepare=_select_device, device_count=_device_count),
    Backend("nccl-shared", "cuda", _no_nccl_shared, "nccl", prepare=_let_ranks_share, device_count=_device_count),
    Backend("bare", "cpu", lambda size: None, "", makes_group=False),
)


ENTRY_POINT_GROUP = "fsdp_testing.backends"

_registered: dict[str, Backend] = {backend.name: backend for backend in BUILT_IN}


def register_backend(backend: Backend) -> None:
    """Make `backend` known in this process under its name (ranks learn it through the entry point or a conftest)."""
    _registered[backend.name] = backend


def registered_backends() -> tuple[str, ...]:
    """Return the registered names, including entry points."""
    return tuple(dict.fromkeys((*_registered, *_entry_point_names())))


@functools.cache
def _entry_point_names() -> tuple[str, ...]:
    """Scanning the installed packages takes a millisecond, as long as a test; they do not change while we run."""
    return tuple(point.name for point in entry_points(group=ENTRY_POINT_GROUP))


def backend_named(name: str) -> Backend:
    """Return the backend called `name`.

    Raises:
        InvalidArgument: For an unregistered name, or an entry point that does not load a `Backend`.
    """
    if name not in _registered:
        value = next((point.value for point in entry_points(group=ENTRY_POINT_GROUP) if point.name == name), None)
        if value is None:
            known = ", ".join(registered_backends())
            raise InvalidArgument(f"backend: expected one of {known}, got {name!r}. Check the name or register it.")
        _registered[name] = _load(name, value)
    return _registered[name]


def _load(name: str, value: str) -> Backend:
    module, _, attribute = value.partition(":")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except Exception as error:
        raise InvalidArgument(
            f"backend {name!r}: expected {value} to load, got {type(error).__name__}: {error}. "
            "Fix or uninstall the package that registers it."
        ) from error
    if not isinstance(found, Backend):
        raise InvalidArgument(f"backend {name!r}: expected a fsdp_testing.base.backends.Backend, got {found!r}.")
    return found
