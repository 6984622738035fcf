"""What must be equal on every member of a group when it issues a collective: one `Call` for each distinct kind."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.distributed as dist

from fsdp_testing.ranks.ledger.records import WAITS_FOR_ALL, WAITS_FOR_NOBODY, Call

_MOST_CALLS = 20_000
# Each rank may send a different number of elements, and a rank with even splits need not name them.
_UNEVEN = ("all_to_all_single", "all_to_all")


# Cached: the signature and the text are made once per distinct call.
_known: dict[tuple[Any, ...], Call] = {}


def call_for(key: tuple[Any, ...], waits_for: int = WAITS_FOR_ALL) -> Call:
    """Return the one `Call` for (operation, detail, dtype, shapes); `waits_for` as in `Call`.

    `detail` is what else must be equal: the name of a reduce op, the number of a root.
    """
    call = _known.get((key, waits_for))
    if call is None:
        if len(_known) >= _MOST_CALLS:
            _known.clear()
        call = _known[key, waits_for] = _make_call(key, waits_for)
    return call


def _make_call(key: tuple[Any, ...], waits_for: int) -> Call:
    # Element counts, not shapes, must agree: gloo and NCCL move [2, 4] against [8] correctly.
    operation, detail, dtype, shapes = key
    shown = [f"root={part}" if isinstance(part, int) else str(part) for part in detail]
    name = f"{operation}({', '.join(shown)})" if shown else operation
    if dtype is None:
        return Call((operation, detail), name, waits_for)
    text = str(dtype).removeprefix("torch.")
    if shapes is None:
        return Call((operation, detail, text), f"{name} {text}", waits_for)
    sizes = (shapes.numel(),) if isinstance(shapes, torch.Size) else tuple(shape.numel() for shape in shapes)
    if not any(sizes):
        waits_for = WAITS_FOR_NOBODY  # gloo has nothing to move and returns at once
    if operation in _UNEVEN:
        return Call((operation, detail, text), f"{name} {text}{list(shapes)}", waits_for)
    if isinstance(shapes, torch.Size):
        return Call((operation, detail, text, sizes[0]), f"{name} {text}{list(shapes)}", waits_for)
    listed = list(map(list, shapes)) if len(shapes) <= 4 else f"[{len(shapes)} tensors]"
    return Call((operation, detail, text, sizes), f"{name} {text}{listed}", waits_for)


@functools.lru_cache(maxsize=1024)
def on_meta(call: Call) -> Call:
    """Return the same collective on the meta device: torch accepts it and moves nothing, so no peer can join it."""
    return Call((*call.what, "meta"), f"{call.text} on the meta device (moves nothing)", WAITS_FOR_NOBODY)


# By number: hashing and comparing the compiled enum costs more than the rest of the record.
_OP_TEXT = {kind.value: name.lower() for name, kind in dist.ReduceOp.RedOpType.__members__.items()}
# The hash of a reduce op is its number, and cheaper to get.
_HASH_IS_NUMBER = all(hash(dist.ReduceOp(kind)) == kind.value for kind in (dist.ReduceOp.SUM, dist.ReduceOp.MAX))


def reduce_op_name(value: Any) -> str | None:
    """Return the name of a reduce op, whichever of torch's two classes it has; None for anything else."""
    kind = value.__class__
    if kind is dist.ReduceOp:
        return _OP_TEXT[hash(value) if _HASH_IS_NUMBER else value.op.value]
    if kind is dist.ReduceOp.RedOpType:
        return _OP_TEXT[value.value]
    return None
