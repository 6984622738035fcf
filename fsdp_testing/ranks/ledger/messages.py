"""Finds messages between ranks that this rank began and never waited for.

A message without a wait stays pending: gloo hands a leaked send to the next receive, and a leaked receive takes the next
message. A later call would then get the wrong numbers, or wait forever. Only messages of CPU memory are watched: only there
does the wait complete the message.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

_METHODS = ("send", "recv", "recv_anysource")
# Keeps works, and their tensors, that the callers have dropped: the messages are still pending.
_under_way: list[tuple[Any, str]] = []


def watch() -> None:
    """Replace methods of `ProcessGroup` by ones that note messages; once per process, and inherited by its forks."""
    for name in _METHODS:
        if name in dist.ProcessGroup.__dict__:
            setattr(dist.ProcessGroup, name, _noting(name, getattr(dist.ProcessGroup, name)))


def pending() -> list[tuple[Any, str]]:
    """Return (work, description) of every message that was begun and not waited for."""
    if _under_way:
        _under_way[:] = [message for message in _under_way if not message[0].is_completed()]
    return list(_under_way)


def _noting(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def note_and_call(group: Any, tensors: Any, *args: Any) -> Any:
        work = method(group, tensors, *args)
        if work is not None and all(tensor.device.type == "cpu" for tensor in tensors):
            pending()  # so that no tensor is kept for longer than until the next message
            peer = (
                "" if name == "recv_anysource" else f" {'to' if name == 'send' else 'from'} rank {args[0]} of its group"
            )
            _under_way.append((work, f"a {name.partition('_')[0]}{peer}"))
        return work

    return note_and_call


__all__ = ["pending", "watch"]
