"""How does the recorder see every collective? Below Python, where all ways of calling one meet.

`torch.distributed` functions, functional collectives, DTensor and DDP's C++ reducer all end in the dispatcher's
`c10d::*` operators. A kernel at the `BackendSelect` key stands in front of every backend's own (it is consulted for
every call, in inference mode too), records, and hands on. The operators carry the reduce op as an opaque object, so the
Python entry points, which know it, leave it in a thread-local for the kernel; C++ callers (DDP) reduce with sum.

Installed once per rank process and never removed; without an active recorder it only hands on.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from fsdp_testing.ledger.recorder import Call, GroupIdentity, Recorder, group_identity

_BACKEND_SELECT = torch._C.DispatchKey.BackendSelect
_REDUCING_METHODS = (
    "allreduce",
    "allreduce_coalesced",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_single",
    "_reduce_scatter_base",
    "reduce_scatter_single_coalesced",
    "reduce_scatter_tensor_coalesced",
)
_FUNCTIONAL_REDUCTIONS = (
    "all_reduce",
    "all_reduce_",
    "all_reduce_coalesced",
    "all_reduce_coalesced_",
    "reduce_scatter_tensor",
    "reduce_scatter_tensor_coalesced",
)


class _ReduceOp(threading.local):
    """What the Python entry point of this thread's next collective reduces with."""

    name: str | None = None


_reduce_op = _ReduceOp()
_libraries: list[torch.library.Library] = []
_active: Recorder | None = None
_groups: dict[int, tuple[GroupIdentity, Any]] = {}


def activate(recorder: Recorder | None) -> None:
    """Send every collective of this process to `recorder`; None stops recording."""
    global _active
    if not _libraries:
        _install()
    _groups.clear()
    _active = recorder


def forget_groups() -> None:
    """Let go of the process groups seen so far; called between jobs, so that the ledger keeps no group alive."""
    _groups.clear()


def _install() -> None:
    library = torch.library.Library("c10d", "IMPL")
    _libraries.append(library)
    for name, reader in _READERS.items():
        packet = getattr(torch.ops.c10d, name, None)
        if packet is not None:
            library.impl(name, _kernel(packet.default, reader), "BackendSelect", with_keyset=True)
    functional = torch.library.Library("_c10d_functional", "IMPL")
    _libraries.append(functional)
    for name in _FUNCTIONAL_REDUCTIONS:
        packet = getattr(torch.ops._c10d_functional, name, None)
        if packet is not None:
            functional.impl(name, _named_reduction(packet.default), "BackendSelect", with_keyset=True)
    for name in _REDUCING_METHODS:
        if name in dist.ProcessGroup.__dict__:
            setattr(dist.ProcessGroup, name, _announcing(getattr(dist.ProcessGroup, name)))


def _kernel(operator: Any, reader: Callable[..., tuple[Any, Call, bool]]) -> Callable[..., Any]:
    redispatch = operator.redispatch

    def record_and_hand_on(keyset: Any, *args: Any) -> Any:
        recorder = _active
        if recorder is not None:
            boxed, call, blocking = reader(*args)
            recorder.record(_identity(boxed), call, blocking)
        return redispatch(keyset.remove(_BACKEND_SELECT), *args)

    return record_and_hand_on


def _named_reduction(operator: Any) -> Callable[..., Any]:
    def announce(keyset: Any, *args: Any) -> Any:
        _reduce_op.name = next((arg for arg in args[1:] if isinstance(arg, str)), None)
        try:
            return operator.redispatch(keyset.remove(_BACKEND_SELECT), *args)
        finally:
            _reduce_op.name = None

    return announce


def _announcing(method: Callable[..., Any]) -> Callable[..., Any]:
    # The compiled method's own attributes are kept, so that help() and torch's logging see what they expect.
    def reduce_with_name(group: Any, *args: Any, **kwargs: Any) -> Any:
        if _active is None:
            return method(group, *args, **kwargs)
        _reduce_op.name = _reduce_op_name(args, kwargs)
        try:
            return method(group, *args, **kwargs)
        finally:
            _reduce_op.name = None

    reduce_with_name.__name__ = getattr(method, "__name__", "reduce")
    reduce_with_name.__doc__ = method.__doc__
    return reduce_with_name


def _reduce_op_name(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
    for value in (*args[1:], *kwargs.values()):
        operation = getattr(value, "reduceOp", value)
        name = _OP_NAMES.get(operation.__class__)
        if name is not None:
            return name(operation)
    return None


def _red_op_text(operation: Any) -> str:
    return _OP_TEXT.get(operation) or _learn_op_text(operation)


def _learn_op_text(operation: Any) -> str:
    text = str(operation).rpartition(".")[2].lower()
    _OP_TEXT[operation] = text
    return text


_OP_TEXT: dict[Any, str] = {}
_OP_NAMES: dict[type, Callable[[Any], str]] = {
    dist.ReduceOp.RedOpType: _red_op_text,
    dist.ReduceOp: lambda operation: _red_op_text(operation.op),
}


def _identity(boxed: Any) -> GroupIdentity:
    group = dist.ProcessGroup.unbox(boxed)
    known = _groups.get(id(group))
    if known is not None and known[1] is group:
        return known[0]
    members = tuple(dist.get_process_group_ranks(group))
    host = "gloo" in str(dist.get_backend_config(group)) or "mpi" in str(dist.get_backend_config(group))
    identity = group_identity(group.group_name, members, dist.get_world_size(), host)
    _groups[id(group)] = (identity, group)
    return identity


_DTYPES: dict[torch.dtype, str] = {}


def _dtype(tensor: torch.Tensor) -> str:
    dtype = tensor.dtype
    text = _DTYPES.get(dtype)
    if text is None:
        text = _DTYPES[dtype] = str(dtype).removeprefix("torch.")
    return text


def _shown(tensor: torch.Tensor) -> str:
    return f"{_dtype(tensor)}{list(tensor.shape)}"


class _Calls:
    """Calls by their signature: the text is made once for each."""

    def __init__(self) -> None:
        self._known: dict[tuple[Any, ...], Call] = {}

    def get(self, what: tuple[Any, ...], tensor: torch.Tensor | None, waits: bool = True) -> Call:
        key = (what, waits, None if tensor is None else tensor.shape)
        call = self._known.get(key)
        if call is None:
            extra = ", ".join(str(part) for part in what[1:] if isinstance(part, str) and part.startswith(("op=", "root=")))
            detail = "" if tensor is None else f" {_shown(tensor)}"
            name = what[0] if not extra else f"{what[0]}({extra.replace('op=', '')})"
            call = self._known[key] = Call(what, f"{name}{detail}", waits)
        return call


_calls = _Calls()


def _sizes(tensors: list[torch.Tensor]) -> tuple[int, ...]:
    return tuple(tensor.numel() for tensor in tensors)


def _reducing() -> str:
    name = _reduce_op.name
    return f"op={name}" if name else "op=sum"


# One reader per operator: what must be equal on every member. Sizes count elements, not shapes: gloo and NCCL move
# [2, 4] against [8] correctly, so a difference there is no fault.


def _allreduce(tensors: Any, group: Any, op: Any, sparse: Any, async_op: bool = True, *_: Any) -> Any:
    return _allreduce_coalesced(tensors, group, op, async_op)


def _allreduce_coalesced(tensors: Any, group: Any, op: Any, async_op: bool = True, *_: Any) -> Any:
    tensor = tensors[0]
    size = tensor.numel() if len(tensors) == 1 else _sizes(tensors)
    what = ("all_reduce", _reducing(), _dtype(tensor), size)
    return group, _calls.get(what, tensor), not async_op


def _broadcast(tensors: Any, group: Any, root: int, root_tensor: int, async_op: bool = True, *_: Any) -> Any:
    tensor = tensors[0]
    waits = dist.ProcessGroup.unbox(group).rank() != root
    return group, _calls.get(("broadcast", f"root={root}", _dtype(tensor), _sizes(tensors)), tensor, waits), not async_op


def _reduce(tensors: Any, group: Any, op: Any, root: int, root_tensor: int, async_op: bool = True, *_: Any) -> Any:
    tensor = tensors[0]
    waits = dist.ProcessGroup.unbox(group).rank() == root
    what = ("reduce", _reducing(), f"root={root}", _dtype(tensor), _sizes(tensors))
    return group, _calls.get(what, tensor, waits), not async_op


def _allgather(outputs: Any, inputs: Any, group: Any, async_op: bool = True, *_: Any) -> Any:
    # Uneven gathers are legal where every rank names the same list of sizes.
    tensor = inputs[0]
    return group, _calls.get(("all_gather", _dtype(tensor), _sizes(outputs[0])), tensor), not async_op


def _allgather_base(output: Any, tensor: Any, group: Any, async_op: bool = True, *_: Any) -> Any:
    return group, _calls.get(("all_gather_single", _dtype(tensor), output.numel()), tensor), not async_op


def _allgather_coalesced(outputs: Any, inputs: Any, group: Any, async_op: bool = True, *_: Any) -> Any:
    return group, _calls.get(("all_gather_coalesced", _dtype(inputs[0]), _sizes(inputs)), inputs[0]), not async_op


def _reduce_scatter(outputs: Any, inputs: Any, group: Any, op: Any, async_op: bool = True, *_: Any) -> Any:
    what = ("reduce_scatter", _reducing(), _dtype(outputs[0]), _sizes(inputs[0]))
    return group, _calls.get(what, outputs[0]), not async_op


def _reduce_scatter_base(output: Any, tensor: Any, group: Any, op: Any, async_op: bool = True, *_: Any) -> Any:
    what = ("reduce_scatter_single", _reducing(), _dtype(tensor), tensor.numel())
    return group, _calls.get(what, tensor), not async_op


def _reduce_scatter_coalesced(outputs: Any, inputs: Any, group: Any, op: Any, async_op: bool = True, *_: Any) -> Any:
    what = ("reduce_scatter_coalesced", _reducing(), _dtype(inputs[0]), _sizes(inputs))
    return group, _calls.get(what, inputs[0]), not async_op


def _alltoall_base(output: Any, tensor: Any, group: Any, outs: Any, ins: Any, async_op: bool = True, *_: Any) -> Any:
    # With splits, sizes differ between ranks by right.
    size = tensor.numel() if not outs and not ins else None
    return group, _calls.get(("all_to_all_single", _dtype(tensor), size), tensor), not async_op


def _alltoall(outputs: Any, inputs: Any, group: Any, async_op: bool = True, *_: Any) -> Any:
    return group, _calls.get(("all_to_all", _dtype(inputs[0])), inputs[0]), not async_op


def _gather(outputs: Any, inputs: Any, group: Any, root: int, async_op: bool = True, *_: Any) -> Any:
    tensor = inputs[0]
    waits = dist.ProcessGroup.unbox(group).rank() == root
    return group, _calls.get(("gather", f"root={root}", _dtype(tensor), tensor.numel()), tensor, waits), not async_op


def _scatter(outputs: Any, inputs: Any, group: Any, root: int, async_op: bool = True, *_: Any) -> Any:
    tensor = outputs[0]
    waits = dist.ProcessGroup.unbox(group).rank() != root
    return group, _calls.get(("scatter", f"root={root}", _dtype(tensor), tensor.numel()), tensor, waits), not async_op


def _barrier(tensor: Any, group: Any, devices: Any, async_op: bool = True, *_: Any) -> Any:
    return group, _calls.get(("barrier",), None), not async_op


def _monitored_barrier(tensor: Any, group: Any, *_: Any) -> Any:
    return group, _calls.get(("monitored_barrier",), None), True


_READERS: dict[str, Callable[..., Any]] = {
    "allreduce_": _allreduce,
    "allreduce_coalesced_": _allreduce_coalesced,
    "broadcast_": _broadcast,
    "reduce_": _reduce,
    "allgather_": _allgather,
    "_allgather_base_": _allgather_base,
    "allgather_coalesced_": _allgather_coalesced,
    "allgather_into_tensor_coalesced_": _allgather_coalesced,
    "reduce_scatter_": _reduce_scatter,
    "_reduce_scatter_base_": _reduce_scatter_base,
    "reduce_scatter_tensor_coalesced_": _reduce_scatter_coalesced,
    "alltoall_base_": _alltoall_base,
    "alltoall_": _alltoall,
    "gather_": _gather,
    "scatter_": _scatter,
    "barrier": _barrier,
    "monitored_barrier_": _monitored_barrier,
}
