"""Will torch refuse this call whatever the peers do? Asked only when the ranks disagree about it.

A test may try calls that torch must refuse. Ranks do so at different moments, so one may have gone on to its next
collective while another still tries: that is no disagreement, since nothing will be issued. Pure: it reads arguments.
What torch refuses later, while it waits for the work (a reduce op that does not fit the dtype), was issued on every rank.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def torch_refuses(name: str, group: Any, args: tuple[Any, ...]) -> bool:
    """Return whether method `name` of a `ProcessGroup` certainly raises for these arguments; False when in doubt."""
    check = _CHECKS.get(name)
    try:
        return check is not None and check(group, args)
    except (AttributeError, IndexError, TypeError):
        return False


def _allgather(group: Any, args: tuple[Any, ...]) -> bool:
    outputs, inputs = args[0][0], args[1]
    return len(outputs) != group.size() or any(out.dtype != inputs[0].dtype for out in outputs)


def _reduce_scatter(group: Any, args: tuple[Any, ...]) -> bool:
    return len(args[1][0]) != group.size()


def _gather_single(group: Any, args: tuple[Any, ...]) -> bool:
    output, tensor = args[0], args[1]
    return output.numel() != tensor.numel() * group.size() or output.dtype != tensor.dtype


def _scatter_single(group: Any, args: tuple[Any, ...]) -> bool:
    output, tensor = args[0], args[1]
    return tensor.numel() != output.numel() * group.size() or output.dtype != tensor.dtype


_CHECKS: dict[str, Callable[[Any, tuple[Any, ...]], bool]] = {
    "allgather": _allgather,
    "reduce_scatter": _reduce_scatter,
    "_allgather_base": _gather_single,
    "all_gather_single": _gather_single,
    "_reduce_scatter_base": _scatter_single,
    "reduce_scatter_single": _scatter_single,
}
