"""How does the recorder see every collective, whichever way it is called, at the price of a few microseconds?

Three ways lead to a backend, each watched where it is cheapest:

1. `torch.distributed` functions call methods of `ProcessGroup`; those methods are replaced by ones that record first.
2. Functional collectives (DTensor) enter C++ through `_c10d_functional::*` operators; a kernel at the `BackendSelect`
   key, which every call passes in every autograd mode, stands in front of them.
3. C++ code (DDP's reducer, coalesced broadcasts) ends in `c10d::*` operators. Kernels in front of these cost some
   microseconds on every collective, so they are installed when the first such caller appears, not before. Calls
   that came by 1 or 2 are already recorded and pass through.

Installed once per rank process and never removed; without an active recorder they only hand on.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from fsdp_testing.errors import HarnessError
from fsdp_testing.ledger.dispatcher_readers import READERS, pending_reduce_op
from fsdp_testing.ledger.functional_readers import FUNCTIONAL_READERS
from fsdp_testing.ledger.method_readers import METHOD_READERS, reduce_op_among
from fsdp_testing.ledger.recorder import GroupIdentity, Listener, Recorder, group_identity

_BACKEND_SELECT = torch._C.DispatchKey.BackendSelect
_CPP_CALLERS = ("Reducer", "_broadcast_coalesced", "_verify_params_across_processes")


class _Passing(threading.local):
    """True while this thread is inside a collective that is recorded already."""

    recorded: bool = False


_passing = _Passing()
_libraries: list[torch.library.Library] = []
_watching_cpp = False
_active: Recorder | None = None
_groups: dict[int, tuple[GroupIdentity, Any]] = {}


def activate(recorder: Recorder | None) -> None:
    """Send every collective of this process to `recorder`; None stops recording."""
    global _active
    if not _libraries:
        _install()
    _groups.clear()
    _active = recorder


@contextmanager
def listen(listener: Listener) -> Iterator[None]:
    """Tell `listener` of every collective of this rank while the context lasts; without a recorder there is nothing.

    Raises:
        HarnessError: outside a rank, where no recorder is active.
    """
    recorder = _active
    if recorder is None:
        raise HarnessError("listen: expected an active ledger, got none. Call it inside a rank of a world.")
    before = recorder.listener
    recorder.listener = listener
    try:
        yield
    finally:
        recorder.listener = before


def forget_groups() -> None:
    """Let go of the process groups seen so far; called between jobs, so that the ledger keeps no group alive."""
    _groups.clear()


def _install() -> None:
    for name, reader in METHOD_READERS.items():
        if name in dist.ProcessGroup.__dict__:
            setattr(dist.ProcessGroup, name, _recording(getattr(dist.ProcessGroup, name), reader))
    library = torch.library.Library("_c10d_functional", "IMPL")
    _libraries.append(library)
    for name, reader in FUNCTIONAL_READERS.items():
        packet = getattr(torch.ops._c10d_functional, name, None)
        if packet is not None:
            library.impl(name, _functional_kernel(packet.default, reader), "BackendSelect", with_keyset=True)
    for name in _CPP_CALLERS:
        if hasattr(dist, name):
            setattr(dist, name, _announcing_cpp(getattr(dist, name)))


def _watch_cpp() -> None:
    global _watching_cpp
    if _watching_cpp:
        return
    _watching_cpp = True
    library = torch.library.Library("c10d", "IMPL")
    _libraries.append(library)
    for name, reader in READERS.items():
        packet = getattr(torch.ops.c10d, name, None)
        if packet is not None:
            library.impl(name, _kernel(packet.default, reader), "BackendSelect", with_keyset=True)


def _recording(method: Callable[..., Any], reader: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def record_and_call(group: Any, *args: Any, **kwargs: Any) -> Any:
        recorder = _active
        if recorder is None or _passing.recorded:
            return method(group, *args, **kwargs)
        read = reader(group, *args) if not kwargs else reader(group, *args, *kwargs.values())
        if read is None:
            # Another overload than torch.distributed uses: the operator underneath tells what it is.
            _watch_cpp()
            pending_reduce_op.name = reduce_op_among(args, kwargs)
            try:
                return method(group, *args, **kwargs)
            finally:
                pending_reduce_op.name = None
        call, blocking = read
        known = _groups.get(id(group))
        recorder.record(known[0] if known is not None and known[1] is group else _identify(group), call, blocking)
        if not _watching_cpp:
            return method(group, *args, **kwargs)
        _passing.recorded = True
        try:
            return method(group, *args, **kwargs)
        finally:
            _passing.recorded = False

    return record_and_call


def _kernel(operator: Any, reader: Callable[..., Any]) -> Callable[..., Any]:
    redispatch = operator.redispatch

    def record_and_hand_on(keyset: Any, *args: Any) -> Any:
        recorder = _active
        if recorder is not None and not _passing.recorded:
            boxed, call, blocking = reader(*args)
            recorder.record(_identify(dist.ProcessGroup.unbox(boxed)), call, blocking)
        return redispatch(keyset.remove(_BACKEND_SELECT), *args)

    return record_and_hand_on


def _functional_kernel(operator: Any, reader: Callable[..., Any]) -> Callable[..., Any]:
    def record_and_hand_on(keyset: Any, *args: Any) -> Any:
        recorder = _active
        if recorder is None or _passing.recorded:
            return operator.redispatch(keyset.remove(_BACKEND_SELECT), *args)
        group, call = reader(*args)
        recorder.record(_identify(group), call, False)
        _passing.recorded = True
        try:
            return operator.redispatch(keyset.remove(_BACKEND_SELECT), *args)
        finally:
            _passing.recorded = False

    return record_and_hand_on


def _announcing_cpp(caller: Any) -> Any:
    @functools.wraps(caller, updated=())
    def call(*args: Any, **kwargs: Any) -> Any:
        _watch_cpp()
        return caller(*args, **kwargs)

    return call


def _identify(group: Any) -> GroupIdentity:
    known = _groups.get(id(group))
    if known is not None and known[1] is group:
        return known[0]
    members = tuple(dist.get_process_group_ranks(group))
    configuration = str(dist.get_backend_config(group))
    host = "gloo" in configuration or "mpi" in configuration
    identity = group_identity(group.group_name, members, dist.get_world_size(), host)
    _groups[id(group)] = (identity, group)
    return identity
