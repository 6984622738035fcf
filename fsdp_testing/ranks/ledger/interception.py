"""Shows the recorder every collective, whichever way it is called, at the price of a few microseconds.

Three ways lead to a backend, each watched where it is cheapest:

1. `torch.distributed` functions call methods of `ProcessGroup`; those methods are replaced by ones that record first.
2. Functional collectives (DTensor) enter C++ through `_c10d_functional::*` operators; a kernel at the `BackendSelect`
   key, which every call passes in every autograd mode, stands in front of them.
3. C++ code (DDP's reducer, coalesced broadcasts) ends in `c10d::*` operators. Kernels in front of these cost some
   microseconds on every collective, so they are installed when the first such caller appears, not before. Calls
   that came by 1 or 2 are already recorded and pass through.

Installed in the process that ranks are forked from and never removed; without an active recorder they only pass calls on.
"""

from __future__ import annotations

import functools
import inspect
import os
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from fsdp_testing.base.compat import backend_select_key, keep_compiler_out, maker_of_groups
from fsdp_testing.errors import HarnessError
from fsdp_testing.ranks.ledger import late_delivery, messages
from fsdp_testing.ranks.ledger.readers import (
    FUNCTIONAL,
    METHODS,
    OPERATORS,
    OperatorReader,
    pending_reduce_op,
    reduce_op_among,
)
from fsdp_testing.ranks.ledger.recorder import Line, Listener, Recorder
from fsdp_testing.ranks.ledger.records import Call, GroupIdentity, group_identity, making_of_groups

_BACKEND_SELECT = backend_select_key()
_CPP_CALLERS = ("Reducer", "_broadcast_coalesced", "_verify_params_across_processes")


class _Passing(threading.local):
    """True while this thread is inside a collective that is recorded already."""

    recorded: bool = False


_passing = _Passing()
_libraries: list[torch.library.Library] = []
_watching_cpp = False
_active: Recorder | None = None
_HOST_BACKENDS = {"gloo", "mpi"}
# By identity of the group object; an entry goes with its group, so an identity is never used twice.
_lines: dict[int, Line | None] = {}
_identities: dict[int, GroupIdentity] = {}
_alive: dict[int, weakref.ref[Any]] = {}


def activate(recorder: Recorder | None) -> Recorder | None:
    """Send every collective of this process to `recorder`, None to stop recording; returns the one before."""
    global _active
    install()
    # A new recorder means a new world, in which members have other ranks.
    forget_groups()
    _identities.clear()
    before, _active = _active, recorder
    return before


def _stop_in_child() -> None:
    # A forked child shares the ledger's memory with the rank but is not a rank.
    global _active
    _active = None


def active_recorder() -> Recorder:
    """Return the recorder of this rank.

    Raises:
        HarnessError: Outside a rank, where none is active.
    """
    if _active is None:
        raise HarnessError("expected an active ledger, got none. Call it inside a rank of a world.")
    return _active


@contextmanager
def listen(listener: Listener) -> Iterator[None]:
    """Call `listener` with every collective of this rank while the context lasts.

    Raises:
        HarnessError: Outside a rank, where no recorder is active.
    """
    recorder = active_recorder()
    before, recorder.listener = recorder.listener, listener
    try:
        yield
    finally:
        recorder.listener = before


def forget_groups() -> None:
    """Forget the process groups seen so far; called between jobs, since numbers restart."""
    _lines.clear()


def install() -> None:
    """Put the recording methods and operators in place, inactive; once per process, and inherited by a fork of it.

    The fork server does it, so that no rank pays for the memory pages that it changes.
    """
    if _libraries:
        return
    os.register_at_fork(after_in_child=_stop_in_child)
    # A user's compiled code ends in these methods: traced, they cost seconds, and the compiler runs collectives on fake tensors.
    keep_compiler_out("fsdp_testing.ranks")
    for name, reader in METHODS.items():
        if name in dist.ProcessGroup.__dict__:
            setattr(dist.ProcessGroup, name, _recording(name, getattr(dist.ProcessGroup, name), reader))
    module, name = maker_of_groups()
    setattr(module, name, _comparing_members(getattr(module, name)))
    messages.watch()
    _stand_in_front_of("_c10d_functional", FUNCTIONAL)
    for name in _CPP_CALLERS:
        if hasattr(dist, name):
            setattr(dist, name, _announcing_cpp(getattr(dist, name)))


def _stand_in_front_of(namespace: str, readers: Mapping[str, OperatorReader]) -> None:
    library = torch.library.Library(namespace, "IMPL")
    _libraries.append(library)
    for name, reader in readers.items():
        packet = getattr(getattr(torch.ops, namespace), name, None)
        if packet is not None:
            library.impl(name, _kernel(packet.default, reader), "BackendSelect", with_keyset=True)


def _watch_cpp() -> None:
    global _watching_cpp
    if not _watching_cpp:
        _watching_cpp = True
        _stand_in_front_of("c10d", OPERATORS)


def _recording(name: str, method: Callable[..., Any], reader: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def record_and_call(group: Any, *args: Any, **kwargs: Any) -> Any:
        recorder = _active
        if recorder is None or _passing.recorded:
            return method(group, *args, **kwargs)
        try:
            # torch.distributed passes one argument by name: the options of a barrier.
            read = reader(group, *args) if not kwargs else reader(group, *args, **kwargs)
        except Exception:  # noqa: BLE001 - arguments that are no collective's: torch says what is wrong with them
            return method(group, *args, **kwargs)
        if read is None:
            return _call_watched(method, group, args, kwargs)
        line = _lines.get(id(group)) or _line_of(group)
        if line is None:
            return method(group, *args, **kwargs)
        call, blocking = read
        if recorder.record(line, call, blocking, (name, group, args)):
            return method(group, *args, **kwargs)
        # If another thread uses the group before torch refuses this call, nothing is taken back.
        number = line.number
        # The operator underneath would record the call again; it is watched only once a C++ caller has appeared.
        if _watching_cpp:
            _passing.recorded = True
        try:
            if blocking or not late_delivery.wanted(name):
                work = method(group, *args, **kwargs)
            else:
                work = late_delivery.call_late(name, method, group, args, kwargs)
        except Exception:
            recorder.withdraw(line, number)
            raise
        finally:
            if _watching_cpp:
                _passing.recorded = False
        recorder.taken()
        return work

    return record_and_call


def _comparing_members(make: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(make)

    @functools.wraps(make)
    def compare_and_make(*args: Any, **kwargs: Any) -> Any:
        recorder = _active
        call = None if recorder is None else _making(recorder, signature, args, kwargs)
        if recorder is None or call is None:
            return make(*args, **kwargs)
        line = recorder.line(making_of_groups(recorder.world_size))
        # Not as blocking: only members wait for each other, and no longer than they take to connect.
        recorder.record(line, call, False)
        number = line.number
        recorder.taken()
        try:
            return make(*args, **kwargs)
        except Exception:
            recorder.withdraw(line, number)
            raise

    return compare_and_make


def _making(recorder: Recorder, signature: inspect.Signature, args: tuple[Any, ...], kwargs: Any) -> Call | None:
    """Return the call of `new_group` that all ranks must make alike; None if torch refuses it, or members alone make it."""
    try:
        given = signature.bind(*args, **kwargs).arguments
        ranks = given.get("ranks")
        members = tuple(range(recorder.world_size) if ranks is None else map(int, ranks))
        if given.get("use_local_synchronization") or not _is_world_of(recorder):
            return None
    except (TypeError, ValueError):
        return None
    if len({*members}) < len(members) or not {*members} <= {*range(recorder.world_size)}:
        return None
    if len(members) == 1:
        # A rank alone meets nobody, so each rank may make its own group of one in the same call.
        return _call_of_making(())
    return _call_of_making(members if given.get("sort_ranks") is False else tuple(sorted(members)))


@functools.cache  # a recorder knows a call by its identity
def _call_of_making(members: tuple[int, ...]) -> Call:
    return Call(("new_group", members), f"new_group {list(members) or 'of one rank'}", moves=False)


def _call_watched(method: Callable[..., Any], group: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call `method` in a way that torch.distributed does not; the operator underneath identifies the collective."""
    _watch_cpp()
    pending_reduce_op.name = reduce_op_among(args, kwargs)
    try:
        return method(group, *args, **kwargs)
    finally:
        pending_reduce_op.name = None


def _kernel(operator: Any, reader: OperatorReader) -> Callable[..., Any]:
    redispatch = operator.redispatch

    def record_and_hand_on(keyset: Any, *args: Any) -> Any:
        recorder = _active
        # With this key the dispatcher would come back to this kernel.
        handed = keyset.remove(_BACKEND_SELECT)
        if recorder is None or _passing.recorded or _only_traced(args[0]):
            return redispatch(handed, *args)
        try:
            group, call, blocking = reader(*args)
        except Exception:  # noqa: BLE001 - as above
            return redispatch(handed, *args)
        line = _lines.get(id(group)) or _line_of(group)
        if line is None:
            return redispatch(handed, *args)
        recorder.record(line, call, blocking)
        number = line.number
        _passing.recorded = True
        try:
            result = redispatch(handed, *args)
        except Exception:
            recorder.withdraw(line, number)
            raise
        finally:
            _passing.recorded = False
        recorder.taken()
        return result

    return record_and_hand_on


def _only_traced(value: Any) -> bool:
    """Return whether a collective moves nothing, because its tensors are on the meta device (as in FakeTensorMode)."""
    first = value[0] if isinstance(value, (list, tuple)) and value else value
    return isinstance(first, torch.Tensor) and first.device.type == "meta"


def _announcing_cpp(caller: Any) -> Any:
    @functools.wraps(caller, updated=())
    def call(*args: Any, **kwargs: Any) -> Any:
        _watch_cpp()
        return caller(*args, **kwargs)

    return call


def _line_of(group: Any) -> Line | None:
    """Return the line of `group`; None for a group whose ranks the ledger cannot name."""
    identity = id(group)
    if identity in _lines:
        return _lines[identity]
    line = _lines[identity] = _make_line(group)
    if identity not in _alive:
        _alive[identity] = weakref.ref(
            group, lambda _: [known.pop(identity, None) for known in (_lines, _identities, _alive)]
        )
    return line


def _is_world_of(recorder: Recorder) -> bool:
    """Whether members can be mapped to ranks of the world: the default group was not replaced by one with other ranks."""
    return dist.get_rank() == recorder.rank and dist.get_world_size() == recorder.world_size


def _make_line(group: Any) -> Line | None:
    recorder = _active
    if recorder is None:
        return None
    # One process stands for a rank of any world (backend `fake`), and no peer compares.
    alone = not recorder.compare and recorder.world_size == 1
    if not alone and not _is_world_of(recorder):
        return None
    earlier = _identities.get(id(group))
    if earlier is not None:
        return recorder.line(earlier)
    try:
        members = tuple(dist.get_process_group_ranks(group))
        backends, name = str(dist.get_backend_config(group)), group.group_name
    except (KeyError, ValueError, RuntimeError):
        return None  # a hand-made group that torch.distributed does not know
    # "cpu:gloo,cuda:nccl" and the like
    configuration = {part.rpartition(":")[2] for part in backends.split(",")}
    identity = group_identity(name, members, dist.get_world_size(), configuration <= _HOST_BACKENDS)
    _identities[id(group)] = identity
    return recorder.line(identity)
