"""What does a call of a `_c10d_functional::*` operator mean? One reader per operator: (group, call).

Functional collectives are what DTensor issues; they name the group and the reduce op in words. A collective is called
here what the methods of `ProcessGroup` call it: the bytes are the same, and ranks may mix both ways.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from fsdp_testing.compat import process_group_named
from fsdp_testing.ledger.calls import all_to_all_call, call_for, shapes_of
from fsdp_testing.ledger.records import Call

_Read = tuple[Any, Call]


def _all_reduce(tensor: Any, op: str, group: str, *_: Any) -> _Read:
    return process_group_named(group), call_for(("all_reduce", (op.lower(),), tensor.dtype, tensor.shape))


def _all_reduce_coalesced(tensors: Any, op: str, group: str, *_: Any) -> _Read:
    key = ("all_reduce", (op.lower(),), tensors[0].dtype, shapes_of(tensors))
    return process_group_named(group), call_for(key)


def _all_gather(tensor: Any, size: int, group: str, *_: Any) -> _Read:
    # By the output, like the methods do: every rank's part, one after the other.
    gathered = torch.Size((size, *tensor.shape))
    return process_group_named(group), call_for(("all_gather_single", (), tensor.dtype, gathered))


def _all_gather_coalesced(tensors: Any, size: int, group: str, *_: Any) -> _Read:
    return process_group_named(group), call_for(("all_gather_coalesced", (), tensors[0].dtype, shapes_of(tensors)))


def _reduce_scatter(tensor: Any, op: str, size: int, group: str, *_: Any) -> _Read:
    return process_group_named(group), call_for(("reduce_scatter_single", (op.lower(),), tensor.dtype, tensor.shape))


def _reduce_scatter_coalesced(tensors: Any, op: str, size: int, group: str, *_: Any) -> _Read:
    key = ("reduce_scatter_coalesced", (op.lower(),), tensors[0].dtype, shapes_of(tensors))
    return process_group_named(group), call_for(key)


def _all_to_all_single(tensor: Any, outs: Any, ins: Any, group: str, *_: Any) -> _Read:
    return process_group_named(group), all_to_all_call(tensor, even=False)


def _broadcast(tensor: Any, root: int, group: str, *_: Any) -> _Read:
    return process_group_named(group), call_for(("broadcast", (f"root={root}",), tensor.dtype, tensor.shape))


FUNCTIONAL_READERS: dict[str, Callable[..., _Read]] = {
    "all_reduce": _all_reduce,
    "all_reduce_": _all_reduce,
    "all_reduce_coalesced": _all_reduce_coalesced,
    "all_reduce_coalesced_": _all_reduce_coalesced,
    "all_gather_into_tensor": _all_gather,
    "all_gather_into_tensor_coalesced": _all_gather_coalesced,
    "reduce_scatter_tensor": _reduce_scatter,
    "reduce_scatter_tensor_coalesced": _reduce_scatter_coalesced,
    "all_to_all_single": _all_to_all_single,
    "broadcast": _broadcast,
    "broadcast_": _broadcast,
}
