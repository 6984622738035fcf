"""What does a call of a `ProcessGroup` method mean? One reader per method: (call, blocking), or None.

Readers know the one overload that `torch.distributed` uses, whose last argument is an options object; None means that
the method was called in another way.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fsdp_testing.compat import collective_options
from fsdp_testing.ledger.calls import all_to_all_call, call_for, reduce_op_name, shapes_of
from fsdp_testing.ledger.records import WAITS_FOR_ALL, WAITS_FOR_NOBODY, Call

_Read = tuple[Call, bool] | None
_options = collective_options()


def reduce_op_among(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
    """Return the name of the reduce op among the arguments of a method call, if there is one."""
    for value in (*args[1:], *kwargs.values()):
        name = reduce_op_name(getattr(value, "reduceOp", value))
        if name is not None:
            return name
    return None


def _allreduce(group: Any, tensors: Any, options: Any = None, *rest: Any) -> _Read:
    if rest or options.__class__ is not _options.AllreduceOptions:
        return None
    key = ("all_reduce", (reduce_op_name(options.reduceOp),), tensors[0].dtype, shapes_of(tensors))
    return call_for(key), not options.asyncOp


def _allreduce_coalesced(group: Any, tensors: Any, options: Any = None, *rest: Any) -> _Read:
    if rest or options.__class__ is not _options.AllreduceCoalescedOptions:
        return None
    key = ("all_reduce", (reduce_op_name(options.reduceOp),), tensors[0].dtype, shapes_of(tensors))
    return call_for(key), not options.asyncOp


def _broadcast(group: Any, tensors: Any, options: Any = None, *rest: Any) -> _Read:
    if rest or options.__class__ is not _options.BroadcastOptions:
        return None
    root = options.rootRank
    key = ("broadcast", (f"root={root}",), tensors[0].dtype, shapes_of(tensors))
    return call_for(key, root if group.rank() != root else WAITS_FOR_NOBODY), not options.asyncOp


def _reduce(group: Any, tensors: Any, options: Any = None, *rest: Any) -> _Read:
    if rest or options.__class__ is not _options.ReduceOptions:
        return None
    root = options.rootRank
    key = ("reduce", (reduce_op_name(options.reduceOp), f"root={root}"), tensors[0].dtype, shapes_of(tensors))
    return call_for(key, WAITS_FOR_ALL if group.rank() == root else WAITS_FOR_NOBODY), not options.asyncOp


def _allgather(group: Any, outputs: Any, inputs: Any, options: Any = None, *rest: Any) -> _Read:
    if rest or options.__class__ is not _options.AllgatherOptions:
        return None
    shapes = tuple(tensor.shape for tensor in outputs[0])
    return call_for(("all_gather", (), inputs[0].dtype, shapes)), not options.asyncOp


def _all_gather_single(group: Any, output: Any, tensor: Any, options: Any = None, *rest: Any) -> _Read:
    if rest or options.__class__ is not _options.AllgatherOptions:
        return None
    return call_for(("all_gather_single", (), tensor.dtype, output.shape)), not options.asyncOp


def _all_gather_coalesced(group: Any, outputs: Any, inputs: Any, options: Any = None, *rest: Any) -> _Read:
    if rest or options.__class__ is not _options.AllgatherOptions:
        return None
    return call_for(("all_gather_coalesced", (), inputs[0].dtype, shapes_of(inputs))), not options.asyncOp


def _reduce_scatter(group: Any, outputs: Any, inputs: Any, options: Any = None, *rest: Any) -> _Read:
    if rest or options.__class__ is not _options.ReduceScatterOptions:
        return None
    shapes = tuple(tensor.shape for tensor in inputs[0])
    key = ("reduce_scatter", (reduce_op_name(options.reduceOp),), outputs[0].dtype, shapes)
    return call_for(key), not options.asyncOp


def _reduce_scatter_single(group: Any, output: Any, tensor: Any, options: Any = None, *rest: Any) -> _Read:
    if rest or options.__class__ is not _options.ReduceScatterOptions:
        return None
    key = ("reduce_scatter_single", (reduce_op_name(options.reduceOp),), tensor.dtype, tensor.shape)
    return call_for(key), not options.asyncOp


def _reduce_scatter_coalesced(group: Any, outputs: Any, inputs: Any, options: Any = None, *rest: Any) -> _Read:
    if rest or options.__class__ is not _options.ReduceScatterOptions:
        return None
    key = ("reduce_scatter_coalesced", (reduce_op_name(options.reduceOp),), inputs[0].dtype, shapes_of(inputs))
    return call_for(key), not options.asyncOp


def _all_to_all_single(
    group: Any, output: Any, tensor: Any, outs: Any = None, ins: Any = None, options: Any = None, *rest: Any
) -> _Read:
    if rest or options.__class__ is not _options.AllToAllOptions:
        return None
    return all_to_all_call(tensor, even=not outs and not ins), not options.asyncOp


def _all_to_all(group: Any, outputs: Any, inputs: Any, options: Any = None, *rest: Any) -> _Read:
    if rest or options.__class__ is not _options.AllToAllOptions:
        return None
    return call_for(("all_to_all", (), inputs[0].dtype, None), WAITS_FOR_NOBODY), not options.asyncOp


def _gather(group: Any, outputs: Any, inputs: Any, options: Any = None, *rest: Any) -> _Read:
    if rest or options.__class__ is not _options.GatherOptions:
        return None
    root = options.rootRank
    key = ("gather", (f"root={root}",), inputs[0].dtype, inputs[0].shape)
    return call_for(key, WAITS_FOR_ALL if group.rank() == root else WAITS_FOR_NOBODY), not options.asyncOp


def _scatter(group: Any, outputs: Any, inputs: Any, options: Any = None, *rest: Any) -> _Read:
    if rest or options.__class__ is not _options.ScatterOptions:
        return None
    root = options.rootRank
    key = ("scatter", (f"root={root}",), outputs[0].dtype, outputs[0].shape)
    return call_for(key, root if group.rank() != root else WAITS_FOR_NOBODY), not options.asyncOp


def _barrier(group: Any, opts: Any = None, *rest: Any) -> _Read:
    if rest or opts.__class__ is not _options.BarrierOptions:
        return None
    return call_for(("barrier", (), None, None)), not opts.asyncOp


def _monitored_barrier(group: Any, *rest: Any, **named: Any) -> _Read:
    return call_for(("monitored_barrier", (), None, None), WAITS_FOR_ALL if group.rank() == 0 else 0), True


# Both spellings: torch renamed the single-tensor collectives in 2.13.
METHOD_READERS: dict[str, Callable[..., _Read]] = {
    "allreduce": _allreduce,
    "allreduce_coalesced": _allreduce_coalesced,
    "broadcast": _broadcast,
    "reduce": _reduce,
    "allgather": _allgather,
    "_allgather_base": _all_gather_single,
    "all_gather_single": _all_gather_single,
    "allgather_into_tensor_coalesced": _all_gather_coalesced,
    "all_gather_single_coalesced": _all_gather_coalesced,
    "allgather_coalesced": _all_gather_coalesced,
    "reduce_scatter": _reduce_scatter,
    "_reduce_scatter_base": _reduce_scatter_single,
    "reduce_scatter_single": _reduce_scatter_single,
    "reduce_scatter_tensor_coalesced": _reduce_scatter_coalesced,
    "reduce_scatter_single_coalesced": _reduce_scatter_coalesced,
    "alltoall_base": _all_to_all_single,
    "all_to_all_single": _all_to_all_single,
    "alltoall": _all_to_all,
    "gather": _gather,
    "scatter": _scatter,
    "barrier": _barrier,
    "monitored_barrier": _monitored_barrier,
}
