"""Reads and writes the process environment; no other file of the harness does.

torchrun's variables tell whether a launcher made the processes; the pool sets variables of its ranks and restores
them; nothing else in the harness depends on the environment.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from fsdp_testing.errors import InvalidArgument


@dataclass(frozen=True, slots=True)
class Launch:
    """This process as torchrun started it.

    Attributes:
        rank: Rank among all processes of all hosts.
        world_size: Number of those processes.
        local_rank: Rank among the processes of this host.
        local_world_size: Number of processes of this host.
        master_addr: Host of the rendezvous store.
        master_port: Its port.
        launcher: Name of the launcher.
        store_is_there: Whether the launcher serves the store; otherwise the first process does.
        node: Number of this host among the launcher's; empty if unknown.
        attempt: Number of the launcher's attempt (torchrun may restart the processes).
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    master_addr: str
    master_port: int
    launcher: str = "torchrun"
    store_is_there: bool = False
    node: str = ""
    attempt: str = "0"


# Launcher; what it calls rank, number of processes, rank on this host, number on this host, host.
_LAUNCHERS = (
    ("torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK"),
    # Not SLURM_NTASKS, which is set in the batch script too, and that is one process.
    ("srun", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "", "SLURM_NODEID"),
    (
        "mpirun",
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
        "",
    ),
    ("mpiexec", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS", ""),
)
_OF_A_LAUNCH = {"MASTER_ADDR", "MASTER_PORT"}.union(*(names[1:] for names in _LAUNCHERS)) - {""}
_OF_TORCHRUN = ("TORCHELASTIC_", "ROLE_", "GROUP_")
# Memory of the values of `set_in_place`: C reads it, so it is never freed.
_PLACES: dict[str, Any] = {}
_ROOM = 4096


def torchrun() -> Launch | None:
    """Return how torchrun started this process, or `None` if it did not (`RANK` and `WORLD_SIZE` are not both set).

    Raises:
        InvalidArgument: Some of torchrun's variables are set, but not as torchrun sets them.
    """
    return _launch(*_LAUNCHERS[0])


def launched() -> Launch | None:
    """Return how a launcher (torchrun, srun, mpirun, mpiexec) started this process, or `None` if none did.

    Raises:
        InvalidArgument: Its variables are damaged, or do not say where the processes can meet.
    """
    found = torchrun()
    if found is not None:
        return found
    for names in _LAUNCHERS[1:]:
        # One process has no other to meet.
        if get(names[1]) is not None and get(names[2], "1") != "1":
            return _launch(*names)
    return None


def forget_launch() -> None:
    """Remove the launcher's variables: this process has met the others and is no longer a rank itself."""
    update({name: None for name in snapshot() if name in _OF_A_LAUNCH or name.startswith(_OF_TORCHRUN)})


def _launch(launcher: str, rank_name: str, size_name: str, local: str, local_size: str, node: str) -> Launch | None:
    if get(rank_name) is None or get(size_name) is None:
        return None
    rank, size = _integer(rank_name), _integer(size_name)
    if not 0 <= rank < size:
        raise InvalidArgument(
            f"environment: expected 0 <= {rank_name} < {size_name}, got {rank_name}={rank} and {size_name}={size}. "
            f"Unset both, or start the command with {launcher}."
        )
    if launcher != "torchrun" and not (get("MASTER_ADDR") and get("MASTER_PORT")):
        raise InvalidArgument(
            f"{launcher}: expected MASTER_ADDR and MASTER_PORT, where its {size} processes can meet, got none. Set them to "
            "the first host and a port that is free there, for all processes (ci/recipes/slurm.sh does), or use torchrun."
        )
    port = _integer("MASTER_PORT")
    if not 0 <= port < 2**16:
        raise InvalidArgument(
            f"environment: expected a port of at most 65535 in MASTER_PORT, got {port}. Set one that is free."
        )
    return Launch(
        rank=rank,
        world_size=size,
        local_rank=_integer(local, rank),
        local_world_size=_integer(local_size, size) if local_size else size,
        master_addr=get("MASTER_ADDR") or "127.0.0.1",
        master_port=port,
        launcher=launcher,
        store_is_there=launcher == "torchrun" and get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        node=(get(node) or "") if node else "",
        attempt=get("TORCHELASTIC_RESTART_COUNT") or "0",
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
    """Return all current variables; safe while another thread changes some."""
    return {os.fsdecode(name): os.fsdecode(value) for name, value in encoded().items()}


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


def set_in_place(name: str, value: str | None) -> None:
    """Set a variable that changes often, overwriting its last value in place; `None` removes it.

    `setenv` of the GNU C library keeps a copy of every value as long as the process lives.
    """
    stored = getattr(os.environ, "_data", None)
    text = os.fsencode(f"{name}={value}")
    if value is None or not isinstance(stored, dict) or len(text) >= _ROOM:
        update({name: value})
        return
    import ctypes

    place = _PLACES.setdefault(name, ctypes.create_string_buffer(_ROOM))
    place.value = text
    ctypes.CDLL(None).putenv(place)
    stored[os.fsencode(name)] = os.fsencode(value)


@contextmanager
def temporary(values: Mapping[str, str | None]) -> Iterator[None]:
    """Set variables while the context is open, then restore them; others are left alone."""
    before = {name: os.environ.get(name) for name in values}
    update(values)
    try:
        yield
    finally:
        update(before)
