"""What must be equal on every member of a group when it issues a collective? One `Call` for each distinct kind."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from fsdp_testing.ledger.recorder import Call


class Calls:
    """Calls by what tells them apart here; the signature and the text are made once for each."""

    def __init__(self) -> None:
        self._known: dict[tuple[Any, ...], Call] = {}

    def get(self, key: tuple[Any, ...], waits: bool = True) -> Call:
        """The call for (operation, detail, dtype, shapes); `waits` as in `Call`."""
        call = self._known.get((key, waits))
        if call is None:
            call = self._known[key, waits] = _make_call(key, waits)
        return call


def _make_call(key: tuple[Any, ...], waits: bool) -> Call:
    # Element counts, not shapes, must agree: gloo and NCCL move [2, 4] against [8] correctly.
    operation, detail, dtype, shapes = key
    name = operation if not detail else f"{operation}({', '.join(str(part) for part in detail)})"
    if dtype is None:
        return Call((operation, detail), name, waits)
    text = str(dtype).removeprefix("torch.")
    if shapes is None:
        return Call((operation, detail, text), f"{name} {text}", waits)
    if isinstance(shapes, torch.Size):
        return Call((operation, detail, text, shapes.numel()), f"{name} {text}{list(shapes)}", waits)
    shown = list(map(list, shapes)) if len(shapes) <= 4 else f"[{len(shapes)} tensors]"
    return Call((operation, detail, text, tuple(shape.numel() for shape in shapes)), f"{name} {text}{shown}", waits)


call_for = Calls().get


def shapes_of(tensors: list[torch.Tensor]) -> Any:
    return tensors[0].shape if len(tensors) == 1 else tuple(tensor.shape for tensor in tensors)


# By number: hashing and comparing the compiled enum costs more than the rest of the record.
_OP_TEXT = {kind.value: name.lower() for name, kind in dist.ReduceOp.RedOpType.__members__.items()}


def reduce_op_name(value: Any) -> str | None:
    """Name of a reduce op, whichever of torch's two classes it has; None for anything else."""
    kind = value.__class__
    if kind is dist.ReduceOp:
        return _OP_TEXT[value.op.value]
    if kind is dist.ReduceOp.RedOpType:
        return _OP_TEXT[value.value]
    return None
