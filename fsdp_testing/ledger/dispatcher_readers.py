"""What does a call of a `c10d::*` operator mean? One reader per operator: (boxed group, call, blocking).

The operators carry the reduce op as an object that Python cannot open: `pending_reduce_op` holds the name when a Python
entry point announced it, and C++ callers (DDP's reducer) reduce with sum.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from fsdp_testing.ledger.calls import all_to_all_call, call_for, shapes_of
from fsdp_testing.ledger.records import WAITS_FOR_ALL, WAITS_FOR_NOBODY


class PendingReduceOp(threading.local):
    """What this thread's next collective reduces with, if its caller said so."""

    name: str | None = None


pending_reduce_op = PendingReduceOp()


def _reducing() -> str:
    return pending_reduce_op.name or "sum"


def _rank_in(group: Any) -> int:
    return int(dist.ProcessGroup.unbox(group).rank())


def _allreduce(tensors: Any, group: Any, op: Any, sparse: Any, async_op: bool = True, *_: Any) -> Any:
    return group, call_for(("all_reduce", (_reducing(),), tensors[0].dtype, shapes_of(tensors))), not async_op


def _allreduce_coalesced(tensors: Any, group: Any, op: Any, async_op: bool = True, *_: Any) -> Any:
    return group, call_for(("all_reduce", (_reducing(),), tensors[0].dtype, shapes_of(tensors))), not async_op


def _broadcast(tensors: Any, group: Any, root: int, root_tensor: int, async_op: bool = True, *_: Any) -> Any:
    key = ("broadcast", (f"root={root}",), tensors[0].dtype, shapes_of(tensors))
    return group, call_for(key, root if _rank_in(group) != root else WAITS_FOR_NOBODY), not async_op


def _reduce(tensors: Any, group: Any, op: Any, root: int, root_tensor: int, async_op: bool = True, *_: Any) -> Any:
    key = ("reduce", (_reducing(), f"root={root}"), tensors[0].dtype, shapes_of(tensors))
    return group, call_for(key, WAITS_FOR_ALL if _rank_in(group) == root else WAITS_FOR_NOBODY), not async_op


def _allgather(outputs: Any, inputs: Any, group: Any, async_op: bool = True, *_: Any) -> Any:
    # Uneven gathers are legal where every rank names the same list of sizes.
    shapes = tuple(tensor.shape for tensor in outputs[0])
    return group, call_for(("all_gather", (), inputs[0].dtype, shapes)), not async_op


def _allgather_base(output: Any, tensor: Any, group: Any, async_op: bool = True, *_: Any) -> Any:
    return group, call_for(("all_gather_single", (), tensor.dtype, output.shape)), not async_op


def _allgather_coalesced(outputs: Any, inputs: Any, group: Any, async_op: bool = True, *_: Any) -> Any:
    return group, call_for(("all_gather_coalesced", (), inputs[0].dtype, shapes_of(inputs))), not async_op


def _reduce_scatter(outputs: Any, inputs: Any, group: Any, op: Any, async_op: bool = True, *_: Any) -> Any:
    shapes = tuple(tensor.shape for tensor in inputs[0])
    return group, call_for(("reduce_scatter", (_reducing(),), outputs[0].dtype, shapes)), not async_op


def _reduce_scatter_base(output: Any, tensor: Any, group: Any, op: Any, async_op: bool = True, *_: Any) -> Any:
    return group, call_for(("reduce_scatter_single", (_reducing(),), tensor.dtype, tensor.shape)), not async_op


def _reduce_scatter_coalesced(outputs: Any, inputs: Any, group: Any, op: Any, async_op: bool = True, *_: Any) -> Any:
    key = ("reduce_scatter_coalesced", (_reducing(),), inputs[0].dtype, shapes_of(inputs))
    return group, call_for(key), not async_op


def _alltoall_base(output: Any, tensor: Any, group: Any, outs: Any, ins: Any, async_op: bool = True, *_: Any) -> Any:
    return group, all_to_all_call(tensor, even=not outs and not ins), not async_op


def _alltoall(outputs: Any, inputs: Any, group: Any, async_op: bool = True, *_: Any) -> Any:
    return group, call_for(("all_to_all", (), inputs[0].dtype, None), WAITS_FOR_NOBODY), not async_op


def _gather(outputs: Any, inputs: Any, group: Any, root: int, async_op: bool = True, *_: Any) -> Any:
    key = ("gather", (f"root={root}",), inputs[0].dtype, inputs[0].shape)
    return group, call_for(key, WAITS_FOR_ALL if _rank_in(group) == root else WAITS_FOR_NOBODY), not async_op


def _scatter(outputs: Any, inputs: Any, group: Any, root: int, async_op: bool = True, *_: Any) -> Any:
    key = ("scatter", (f"root={root}",), outputs[0].dtype, outputs[0].shape)
    return group, call_for(key, root if _rank_in(group) != root else WAITS_FOR_NOBODY), not async_op


def _barrier(tensor: Any, group: Any, devices: Any, async_op: bool = True, *_: Any) -> Any:
    return group, call_for(("barrier", (), None, None)), not async_op


def _monitored_barrier(tensor: Any, group: Any, *_: Any) -> Any:
    waits_for = WAITS_FOR_ALL if _rank_in(group) == 0 else 0
    return group, call_for(("monitored_barrier", (), None, None), waits_for), True


READERS: dict[str, Callable[..., Any]] = {
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
