"""Reads what a call of a collective means: one table for each of the three ways to call, over the same kinds.

- Methods of `ProcessGroup`, as `torch.distributed` calls them: tensors, then an options object that says the rest.
- `c10d::*` operators, as C++ calls them. They carry the reduce op as an object that Python cannot open: `pending_reduce_op`
  holds the name when a Python entry point announced it, and C++ callers (DDP's reducer) reduce with sum.
- `_c10d_functional::*` operators, which DTensor issues: they name the group and the reduce op in words.

The kinds are called what the methods of `ProcessGroup` are: the bytes are the same, and ranks may mix the ways.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from fsdp_testing.base.compat import collective_options, process_group_named
from fsdp_testing.ranks.ledger.calls import call_for, on_meta, reduce_op_name
from fsdp_testing.ranks.ledger.records import WAITS_FOR_ALL, WAITS_FOR_NOBODY, Call


class PendingReduceOp(threading.local):
    """The reduce op of this thread's next collective, if its caller announced one."""

    name: str | None = None


pending_reduce_op = PendingReduceOp()


def reduce_op_among(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
    """Return the name of the reduce op among the arguments of a method call, if there is one."""
    for value in (*args[1:], *kwargs.values()):
        name = reduce_op_name(getattr(value, "reduceOp", value))
        if name is not None:
            return name
    return None


# ------------------------------------------------------------------------------------------------ kinds


def _kind(name: str, tensors: Any, detail: tuple[Any, ...] = (), waits_for: int = WAITS_FOR_ALL) -> Call:
    shapes = tensors[0].shape if len(tensors) == 1 else tuple(tensor.shape for tensor in tensors)
    return call_for((name, detail, tensors[0].dtype, shapes), waits_for)


def _all_reduce(tensors: Any, op: str | None) -> Call:
    return _kind("all_reduce", tensors, (op,))


def _all_gather(outputs: Any, inputs: Any) -> Call:
    # Uneven gathers are legal where every rank names the same list of sizes.
    return call_for(("all_gather", (), inputs[0].dtype, tuple(output.shape for output in outputs[0])))


def _all_gather_single(dtype: torch.dtype, gathered: torch.Size) -> Call:
    # By the output: every rank's part, one after the other.
    return call_for(("all_gather_single", (), dtype, gathered))


def _all_gather_coalesced(inputs: Any) -> Call:
    return _kind("all_gather_coalesced", inputs)


def _reduce_scatter(outputs: Any, inputs: Any, op: str | None) -> Call:
    return call_for(("reduce_scatter", (op,), outputs[0].dtype, tuple(part.shape for part in inputs[0])))


def _reduce_scatter_single(tensor: Any, op: str | None) -> Call:
    return _kind("reduce_scatter_single", [tensor], (op,))


def _reduce_scatter_coalesced(inputs: Any, op: str | None) -> Call:
    return _kind("reduce_scatter_coalesced", inputs, (op,))


def _from_root(name: str, tensors: Any, root: int, rank: int) -> Call:
    """Return a collective whose root only sends."""
    return _kind(name, tensors, (root,), root if rank != root else WAITS_FOR_NOBODY)


def _to_root(name: str, tensors: Any, root: int, rank: int, *detail: Any) -> Call:
    """Return a collective whose root alone waits."""
    return _kind(name, tensors, (*detail, root), WAITS_FOR_ALL if rank == root else WAITS_FOR_NOBODY)


def _all_to_all_single(tensor: torch.Tensor, *, even: bool) -> Call:
    # With splits a rank may exchange nothing with some members.
    key = ("all_to_all_single", (), tensor.dtype, tensor.shape)
    return call_for(key, WAITS_FOR_ALL if even else WAITS_FOR_NOBODY)


def _all_to_all(tensors: Any) -> Call:
    return call_for(("all_to_all", (), tensors[0].dtype, None), WAITS_FOR_NOBODY)


def _barrier() -> Call:
    return call_for(("barrier", (), None, None))


def _monitored_barrier(rank: int) -> Call:
    return call_for(("monitored_barrier", (), None, None), WAITS_FOR_ALL if rank == 0 else 0)


# ------------------------------------------------------------------------------------------------ methods

MethodReader = Callable[..., tuple[Call, bool] | None]


def _method(options: str, call: Callable[..., Call]) -> MethodReader:
    """Return a reader: (call, blocking) of the one overload that `torch.distributed` uses, None for any other.

    Args:
        options: Class of the last argument.
        call: Makes the call of the group and all arguments.
    """
    kind, count = getattr(collective_options(), options), len(inspect.signature(call).parameters) - 1

    def read(group: Any, *args: Any, opts: Any = None) -> tuple[Call, bool] | None:
        if opts is not None:
            args = (*args, opts)
        if len(args) != count or args[-1].__class__ is not kind:
            return None
        first = args[0]
        while first.__class__ is list and first:
            first = first[0]
        made = call(group, *args)
        return on_meta(made) if getattr(first, "is_meta", False) else made, not args[-1].asyncOp

    return read


def _op(options: Any) -> str | None:
    return reduce_op_name(options.reduceOp)


# Both spellings where there are two: torch renamed the single-tensor collectives in 2.13. It has `gather_single` since 2.14.
METHODS: dict[str, MethodReader] = {
    "allreduce": _method("AllreduceOptions", lambda _, tensors, o: _all_reduce(tensors, _op(o))),
    "allreduce_coalesced": _method("AllreduceCoalescedOptions", lambda _, tensors, o: _all_reduce(tensors, _op(o))),
    "broadcast": _method(
        "BroadcastOptions", lambda group, tensors, o: _from_root("broadcast", tensors, o.rootRank, group.rank())
    ),
    "reduce": _method(
        "ReduceOptions", lambda group, tensors, o: _to_root("reduce", tensors, o.rootRank, group.rank(), _op(o))
    ),
    "allgather": _method("AllgatherOptions", lambda _, outs, inputs, o: _all_gather(outs, inputs)),
    "_allgather_base": _method("AllgatherOptions", lambda _, out, part, o: _all_gather_single(part.dtype, out.shape)),
    "allgather_coalesced": _method("AllgatherOptions", lambda _, outs, inputs, o: _all_gather_coalesced(inputs)),
    "reduce_scatter": _method("ReduceScatterOptions", lambda _, outs, inputs, o: _reduce_scatter(outs, inputs, _op(o))),
    "_reduce_scatter_base": _method(
        "ReduceScatterOptions", lambda _, out, whole, o: _reduce_scatter_single(whole, _op(o))
    ),
    "reduce_scatter_tensor_coalesced": _method(
        "ReduceScatterOptions", lambda _, outs, inputs, o: _reduce_scatter_coalesced(inputs, _op(o))
    ),
    "alltoall_base": _method(
        "AllToAllOptions", lambda _, out, given, outs, ins, o: _all_to_all_single(given, even=not outs and not ins)
    ),
    "alltoall": _method("AllToAllOptions", lambda _, outs, inputs, o: _all_to_all(inputs)),
    "gather": _method(
        "GatherOptions", lambda group, outs, inputs, o: _to_root("gather", inputs[:1], o.rootRank, group.rank())
    ),
    "gather_single": _method(
        "GatherOptions", lambda group, out, part, o: _to_root("gather_single", [part], o.rootRank, group.rank())
    ),
    "scatter": _method(
        "ScatterOptions", lambda group, outs, inputs, o: _from_root("scatter", outs[:1], o.rootRank, group.rank())
    ),
    "barrier": _method("BarrierOptions", lambda _, o: _barrier()),
    "monitored_barrier": lambda group, *_, **__: (_monitored_barrier(group.rank()), True),
}
METHODS |= {
    "all_gather_single": METHODS["_allgather_base"],
    "allgather_into_tensor_coalesced": METHODS["allgather_coalesced"],
    "all_gather_single_coalesced": METHODS["allgather_coalesced"],
    "reduce_scatter_single": METHODS["_reduce_scatter_base"],
    "reduce_scatter_single_coalesced": METHODS["reduce_scatter_tensor_coalesced"],
    "all_to_all_single": METHODS["alltoall_base"],
    "gather_into_tensor": METHODS["gather_single"],
}

# ------------------------------------------------------------------------------------------------ operators

#: Reader of an operator: (group, call, blocking).
OperatorReader = Callable[..., tuple[Any, Call, bool]]


def _operator(group: int, is_async: int, call: Callable[..., Call]) -> OperatorReader:
    """Return a reader, from the places of the group and of `async_op`, which is true when left out."""

    def read(*args: Any) -> tuple[Any, Call, bool]:
        return dist.ProcessGroup.unbox(args[group]), call(*args), len(args) > is_async and not args[is_async]

    return read


def _reducing() -> str:
    return pending_reduce_op.name or "sum"


def _rank_in(group: Any) -> int:
    return int(dist.ProcessGroup.unbox(group).rank())


OPERATORS: dict[str, OperatorReader] = {
    "allreduce_": _operator(1, 4, lambda tensors, *_: _all_reduce(tensors, _reducing())),
    "allreduce_coalesced_": _operator(1, 3, lambda tensors, *_: _all_reduce(tensors, _reducing())),
    "broadcast_": _operator(
        1, 4, lambda tensors, group, root, *_: _from_root("broadcast", tensors, root, _rank_in(group))
    ),
    "reduce_": _operator(
        1, 5, lambda tensors, group, op, root, *_: _to_root("reduce", tensors, root, _rank_in(group), _reducing())
    ),
    "allgather_": _operator(2, 3, lambda outs, inputs, *_: _all_gather(outs, inputs)),
    "_allgather_base_": _operator(2, 3, lambda out, part, *_: _all_gather_single(part.dtype, out.shape)),
    "allgather_coalesced_": _operator(2, 3, lambda outs, inputs, *_: _all_gather_coalesced(inputs)),
    "allgather_into_tensor_coalesced_": _operator(2, 3, lambda outs, inputs, *_: _all_gather_coalesced(inputs)),
    "reduce_scatter_": _operator(2, 4, lambda outs, inputs, *_: _reduce_scatter(outs, inputs, _reducing())),
    "_reduce_scatter_base_": _operator(2, 4, lambda out, whole, *_: _reduce_scatter_single(whole, _reducing())),
    "reduce_scatter_tensor_coalesced_": _operator(
        2, 4, lambda outs, inputs, *_: _reduce_scatter_coalesced(inputs, _reducing())
    ),
    "alltoall_base_": _operator(
        2, 5, lambda out, given, group, outs, ins, *_: _all_to_all_single(given, even=not outs and not ins)
    ),
    "alltoall_": _operator(2, 3, lambda outs, inputs, *_: _all_to_all(inputs)),
    "gather_": _operator(
        2, 4, lambda outs, inputs, group, root, *_: _to_root("gather", inputs[:1], root, _rank_in(group))
    ),
    "gather_into_tensor_": _operator(
        2, 4, lambda out, part, group, root, *_: _to_root("gather_single", [part], root, _rank_in(group))
    ),
    "scatter_": _operator(
        2, 4, lambda outs, inputs, group, root, *_: _from_root("scatter", outs[:1], root, _rank_in(group))
    ),
    "barrier": _operator(1, 3, lambda *_: _barrier()),
    "monitored_barrier_": lambda tensor, group, *_: (
        dist.ProcessGroup.unbox(group),
        _monitored_barrier(_rank_in(group)),
        True,
    ),
}

# ------------------------------------------------------------------------------------------------ functional operators


def _functional(group: int, call: Callable[..., Call]) -> OperatorReader:
    """Return a reader, from the place of the group's name."""
    return lambda *args: (process_group_named(args[group]), call(*args), False)


FUNCTIONAL: dict[str, OperatorReader] = {
    "all_reduce": _functional(2, lambda tensor, op, *_: _all_reduce([tensor], op.lower())),
    "all_reduce_coalesced": _functional(2, lambda tensors, op, *_: _all_reduce(tensors, op.lower())),
    "all_gather_into_tensor": _functional(
        2, lambda tensor, size, *_: _all_gather_single(tensor.dtype, torch.Size((size, *tensor.shape)))
    ),
    "all_gather_into_tensor_coalesced": _functional(2, lambda tensors, *_: _all_gather_coalesced(tensors)),
    "reduce_scatter_tensor": _functional(3, lambda tensor, op, *_: _reduce_scatter_single(tensor, op.lower())),
    "reduce_scatter_tensor_coalesced": _functional(
        3, lambda tensors, op, *_: _reduce_scatter_coalesced(tensors, op.lower())
    ),
    "all_to_all_single": _functional(3, lambda tensor, *_: _all_to_all_single(tensor, even=False)),
    "broadcast": _functional(2, lambda tensor, root, *_: _kind("broadcast", [tensor], (root,))),
}
FUNCTIONAL |= {f"{name}_": FUNCTIONAL[name] for name in ("all_reduce", "all_reduce_coalesced", "broadcast")}
