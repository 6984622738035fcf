"""A script's environment and what it touches: torchrun's variables, files, other machines, numbers that it logs.

`init_process_group` takes over the existing world. A script works in its own folder, which shows the files of
the current one; files elsewhere and machines are noted. `item`, `float`, `tolist` of one number and formatting are seen where no
code of torch calls them. Afterwards everything is as before.
"""

from __future__ import annotations

import functools
import os
import shutil
import socket
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from fsdp_testing.base import env
from fsdp_testing.errors import InvalidArgument
from fsdp_testing.ranks.pool.world import World
from fsdp_testing.train.arithmetic import carried

# No agent serves a store there: code that joins its own store instead of the world's group is refused at once.
_ADDRESS, _PORT = "127.0.0.1", 29500


def variables(world: World) -> dict[str, str | None]:
    """Return the variables that torchrun sets in each process of one host."""
    return env.as_launched(world.rank, world.size, _ADDRESS, _PORT) | {
        "GROUP_RANK": "0",
        "TORCHELASTIC_RUN_ID": "none",
        "TORCHELASTIC_RESTART_COUNT": "0",
    }


@contextmanager
def as_torchrun_starts(world: World) -> Iterator[None]:
    """Set torchrun's variables, and let the code make and destroy "its" default group, which is the world's.

    Raises:
        InvalidArgument: From `init_process_group`, for another number of ranks than the world has.
    """
    real_destroy = dist.destroy_process_group
    mine = dist.group.WORLD

    def init_process_group(backend: Any = None, *args: Any, **kwargs: Any) -> None:
        del backend, args
        for name, wanted in (("world_size", world.size), ("rank", world.rank)):
            given = kwargs.get(name, -1)
            if given not in (-1, wanted):
                raise InvalidArgument(
                    f"init_process_group: expected {name}={wanted}, as torchrun says in {name.upper()}, got {given}. "
                    "Read it from the environment."
                )

    def destroy_process_group(group: Any = None) -> None:
        if group is not None and group is not mine:
            real_destroy(group)

    with env.temporary(variables(world)), ExitStack() as stack:
        for place in (dist, dist.distributed_c10d):
            stack.enter_context(mock.patch.object(place, "init_process_group", init_process_group))
            stack.enter_context(mock.patch.object(place, "destroy_process_group", destroy_process_group))
        yield


_MOST_FILES = 5000


@contextmanager
def in_folder(folder: str) -> Iterator[None]:
    """Work in `folder`; files that it only shows are put aside before they are written to."""
    before = Path.cwd()
    os.chdir(folder)
    real_save = torch.save

    def save(value: Any, file: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(file, (str, os.PathLike)):
            _own(os.fspath(file), empty=True)
        return real_save(value, file, *args, **kwargs)

    outside.clear()
    hosts.clear()
    _written_in.append(os.path.realpath(folder))
    _hook_once()
    try:
        with mock.patch.object(torch, "save", save):
            yield
    finally:
        _written_in.pop()
        os.chdir(before)


_written_in: list[str] = []
outside: set[str] = set()
"""Files that the run wrote elsewhere than below its folder."""
hosts: set[str] = set()
"""Other machines that the run asked for."""
_HERE = ("localhost", "127.", "::1", "0.0.0.0", "::")


@functools.cache
def _hook_once() -> None:
    """Put the hook in place that sees each file and host before it is opened; Python cannot take it away again."""
    sys.addaudithook(_see)


_CHANGES = ("os.truncate", "os.utime", "os.chmod")
_IN_FOLDERS = {"os.mkdir": 1, "os.remove": 1, "os.rmdir": 1, "os.symlink": 2, "os.link": 2, "os.rename": 2}
_FOLDERS = ("os.chdir", "shutil.rmtree")
_DATABASE = ("", "-wal", "-shm", "-journal")


def _see(event: str, arguments: tuple[Any, ...]) -> None:
    if not _written_in:
        return
    if event == "socket.getaddrinfo":
        host = arguments[0].decode() if isinstance(arguments[0], bytes) else str(arguments[0] or "")
        if host and not host.startswith(_HERE) and host != socket.gethostname():
            hosts.add(host)
    elif event == "open":
        path, mode, flags = arguments
        if isinstance(flags, int) and flags & (os.O_WRONLY | os.O_RDWR) and not isinstance(path, int):
            _own(os.fsdecode(path), empty=isinstance(mode, str) and "w" in mode)
    elif event == "sqlite3.connect":
        _own_database(os.fsdecode(arguments[0]))
    elif event in _CHANGES and not isinstance(arguments[0], int):
        _put_aside(os.fsdecode(arguments[0]), empty=False)
    elif event in _FOLDERS and not isinstance(arguments[0], int):
        _own_folder(Path(os.fsdecode(arguments[0])))
    else:
        for path in arguments[: _IN_FOLDERS.get(event, 0)]:
            _own_folder(Path(os.fsdecode(path)).parent)


def _own(path: str, *, empty: bool) -> None:
    """Put aside the file of a link in the run's folder, and take note of files elsewhere."""
    full = _put_aside(path, empty=empty)
    if not full.is_relative_to(_written_in[-1]) and full.parts[1:2] not in (("dev",), ("proc",)):
        outside.add(str(full))


def _own_database(name: str) -> None:
    """Put aside a database of SQLite, which opens its files out of Python's sight."""
    path, _, how = name.removeprefix("file:").partition("?") if name.startswith("file:") else (name, "", "")
    if path and path != ":memory:" and not {"mode=ro", "mode=memory", "immutable=1"} & {*how.split("&")}:
        for part in _DATABASE:
            _put_aside(path + part, empty=False)
        _own(path, empty=False)


def _put_aside(path: str, *, empty: bool) -> Path:
    """Make a path of the run's folder lead to no file of the user; return where it leads."""
    full = _own_folder(Path(path).parent) / Path(path).name
    if full.is_dir():
        return _own_folder(full)
    if _is_shown(full):
        _replace(full, empty=empty)
    return full


def _own_folder(path: Path) -> Path:
    """Make folders of the links to folders on a way below the run's folder; return where it leads."""
    here = Path.cwd()
    for part in path.parts:
        here /= part
        if _is_shown(here) and here.is_dir():
            with _alone_in(here.parent):
                if here.is_symlink():
                    source = here.resolve()
                    here.unlink()
                    here.mkdir()
                    for shown in source.iterdir():
                        _link(here / shown.name, shown)
        here = here.resolve()
    return here


def _is_shown(place: Path) -> bool:
    """Whether a place in the run's folder is a link to what lies elsewhere."""
    top = _written_in[-1]
    return place.is_relative_to(top) and place.is_symlink() and not place.resolve().is_relative_to(top)


def _replace(full: Path, *, empty: bool) -> None:
    """Replace a link by a file of its own, empty or a copy; of ranks that write at one moment the first one does."""
    with _alone_in(full.parent):
        if full.is_symlink():
            own = full.with_name(f".{full.name}.own")  # whole before others see it
            if empty or not full.exists():
                own.touch()
            else:
                shutil.copyfile(full, own)
            own.replace(full)


@contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """Keep other ranks from replacing links of a folder."""
    import fcntl  # systems without it have no ranks

    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)  # until it is closed
        yield
    finally:
        os.close(descriptor)


def show_files(source: Path, folder: Path) -> None:
    """Fill `folder` with links to the files of `source`; folders are new, but with very many files they are links too.

    Existing entries stay.
    """
    count = 0
    for place, folders, files in os.walk(source):
        here = folder / Path(place).relative_to(source)
        folders[:] = [name for name in folders if not name.startswith(".")]
        for name in files:
            count += 1
            _link(here / name, Path(place) / name)
        for name in folders:
            if count > _MOST_FILES or Path(place, name).is_symlink():
                _link(here / name, Path(place) / name)
            elif not (here / name).is_symlink():
                (here / name).mkdir(exist_ok=True)
        if count > _MOST_FILES:
            folders.clear()


def _link(place: Path, target: Path) -> None:
    if not place.exists() and not place.is_symlink():
        place.symlink_to(target)


_TORCH = str(Path(torch.__file__).parent)
_FORMATTING = str(Path(_TORCH, "_tensor.py"))
NOT_OF_SCRIPTS = (_TORCH, str(Path(__file__).parents[1]))
"""Folders without code of a script or its framework."""
_MOST = 1000


@dataclass(slots=True)
class NumbersTaken:
    """Floating numbers that one expression took out of tensors, in order, and the last dtype that they had.

    Attributes:
        values: With the factors that Python code gives them.
        read: As they were read.
        place: Place of the expression in the code of its function; a line may have several.
        is_known: Whether these factors are.
    """

    place: int = 0
    dtype: torch.dtype = torch.float64
    values: list[float] = field(default_factory=list)
    read: list[float] = field(default_factory=list)
    is_known: bool = True

    @property
    def tensor(self) -> torch.Tensor:
        return torch.tensor(self.values, dtype=torch.float64).to(self.dtype)

    @property
    def plain(self) -> torch.Tensor:
        return torch.tensor(self.read, dtype=torch.float64).to(self.dtype)


Log = dict[str, NumbersTaken]
"""By "file.py:line"; further expressions of a line have their number after it."""


@contextmanager
def watch_numbers() -> Iterator[Log]:
    """Note the numbers that are taken while the context lasts."""
    log: Log = {}

    def seeing(original: Any) -> Any:
        def take(tensor: torch.Tensor, *args: Any) -> Any:
            value = original(tensor, *args)
            if isinstance(value, float):
                _note(log, sys._getframe(1), tensor.dtype, value)
            return value

        return take

    with ExitStack() as stack:
        for name in ("item", "tolist", "__float__"):
            stack.enter_context(mock.patch.object(torch.Tensor, name, seeing(getattr(torch.Tensor, name))))
        yield log


def _note(log: Log, frame: Any, dtype: torch.dtype, value: float) -> None:
    while frame is not None and frame.f_code.co_filename == _FORMATTING:
        frame = frame.f_back
    if frame is None or frame.f_code.co_filename.startswith(NOT_OF_SCRIPTS):
        return
    line = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
    key, number = line, 1
    while key in log and log[key].place != frame.f_lasti:
        number += 1
        key = f"{line}, number {number}"
    taken = log.setdefault(key, NumbersTaken(frame.f_lasti))
    taken.dtype = dtype
    if len(taken.values) < _MOST:
        made = carried(frame, value)
        taken.is_known &= made is not None
        taken.values.append(value if made is None else made)
        taken.read.append(value)
