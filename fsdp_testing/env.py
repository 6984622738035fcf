"""What does the harness read from, and write to, the process environment? This file does it, and no other.

Of torchrun's variables it learns whether somebody else made the processes; the pool sets variables of its ranks and
puts them back; nothing else of the harness depends on the environment.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from fsdp_testing.errors import InvalidArgument


@dataclass(frozen=True, slots=True)
class Launch:
    """This process as torchrun started it.

    Attributes:
        rank: Rank among all processes of all hosts.
        world_size: Number of those processes.
        local_rank: Rank among the processes of this host.
        local_world_size: Number of those.
        master_addr: Host of the rendezvous store.
        master_port: Its port.
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    master_addr: str
    master_port: int


def torchrun() -> Launch | None:
    """Return how torchrun started this process, or `None` if it did not (`RANK` and `WORLD_SIZE` are not both set).

    Raises:
        InvalidArgument: Some of torchrun's variables are set, but not as torchrun sets them.
    """
    if get("RANK") is None or get("WORLD_SIZE") is None:
        return None
    rank, size = _integer("RANK"), _integer("WORLD_SIZE")
    if not 0 <= rank < size:
        raise InvalidArgument(
            f"environment: expected 0 <= RANK < WORLD_SIZE, got RANK={rank} and WORLD_SIZE={size}. "
            "Unset both, or start the command with torchrun."
        )
    return Launch(
        rank=rank,
        world_size=size,
        local_rank=_integer("LOCAL_RANK", rank),
        local_world_size=_integer("LOCAL_WORLD_SIZE", size),
        master_addr=get("MASTER_ADDR") or "127.0.0.1",
        master_port=_integer("MASTER_PORT"),
    )


def as_launched(rank: int, size: int, address: str, port: int) -> dict[str, str | None]:
    """Return the variables by which a process that a launcher started on one host knows its place."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": address,
        "MASTER_PORT": str(port),
    }


def _integer(name: str, default: int | None = None) -> int:
    text = get(name)
    if text is None and default is not None:
        return default
    try:
        return int(text or "")
    except ValueError:
        raise InvalidArgument(
            f"environment: expected an integer in {name}, got {text!r}. "
            "Unset RANK and WORLD_SIZE, or start the command with torchrun."
        ) from None


def get(name: str, default: str | None = None) -> str | None:
    """Return the value of one variable."""
    return os.environ.get(name, default)


def snapshot() -> dict[str, str]:
    """Return all variables as they are now."""
    return dict(os.environ)


def encoded() -> dict[bytes, bytes]:
    """Return all variables as the system stores them; twenty times cheaper than `snapshot`, for comparing often."""
    stored = getattr(os.environ, "_data", None)  # CPython's own table on POSIX
    return dict(stored) if isinstance(stored, dict) else dict(os.environb)


def restore(saved: Mapping[str, str]) -> None:
    """Put the environment back to what `snapshot` returned."""
    update({**dict.fromkeys(os.environ), **saved})


def update(values: Mapping[str, str | None]) -> None:
    """Set variables; `None` removes one."""
    for name, value in values.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


@contextmanager
def temporary(values: Mapping[str, str | None]) -> Iterator[None]:
    """Set variables while the context is open, then put these same ones back; others are left alone."""
    before = {name: os.environ.get(name) for name in values}
    update(values)
    try:
        yield
    finally:
        update(before)
