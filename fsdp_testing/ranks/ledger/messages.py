"""Messages from one rank to another that this rank began and never waited for.

What nobody waits for stays under way: gloo gives a message that was sent to whoever receives next, and a receive that was
left takes the message that is sent next. So a later call would get another one's numbers, or wait for ever.
Only messages of CPU memory are watched: there, and only there, waiting is what completes one.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

_METHODS = ("send", "recv", "recv_anysource")
# Holds works, and with them their tensors, that their callers have dropped: they are under way all the same.
_under_way: list[tuple[Any, str]] = []


def watch() -> None:
    """Put noting methods in place of those of `ProcessGroup`; once per process, and inherited by a fork of it."""
    for name in _METHODS:
        if name in dist.ProcessGroup.__dict__:
            setattr(dist.ProcessGroup, name, _noting(name, getattr(dist.ProcessGroup, name)))


def pending() -> list[tuple[Any, str]]:
    """Return (work, what it is) of every message that was begun and not waited for."""
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
