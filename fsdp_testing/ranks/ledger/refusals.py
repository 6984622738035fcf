"""Predicts whether torch will refuse a call whatever the peers do; used only when the ranks disagree about it.

A test may try calls that torch must refuse. Ranks do so at different moments, so one may have gone on to its next
collective while another still tries. That is no disagreement, since nothing will be issued. Pure: it only reads arguments.
Calls that torch refuses only while it waits for the work (a reduce op that does not fit the dtype) were issued on every rank.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def torch_refuses(name: str, group: Any, args: tuple[Any, ...]) -> bool:
    """Return whether method `name` of a `ProcessGroup` certainly raises for these arguments; False when in doubt."""
    check = _CHECKS.get(name)
    try:
        return check is not None and check(group.size(), args[0], args[1])
    except (AttributeError, IndexError, TypeError):
        return False


def _not_gathered(size: int, whole: Any, part: Any) -> bool:
    return whole.numel() != part.numel() * size or whole.dtype != part.dtype


# From the size of the group, the outputs and the inputs.
_CHECKS: dict[str, Callable[[int, Any, Any], bool]] = {
    "allgather": lambda size, outs, inputs: (
        len(outs[0]) != size or any(out.dtype != inputs[0].dtype for out in outs[0])
    ),
    "reduce_scatter": lambda size, outs, inputs: len(inputs[0]) != size,
    "_allgather_base": _not_gathered,
    "all_gather_single": _not_gathered,
    "_reduce_scatter_base": lambda size, part, whole: _not_gathered(size, whole, part),
    "reduce_scatter_single": lambda size, part, whole: _not_gathered(size, whole, part),
}
