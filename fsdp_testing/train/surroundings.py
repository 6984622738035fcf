"""What may a script touch beside its ranks: files of the current folder, files elsewhere, other machines?

It works in a folder of its own that shows the files of the current one; what it writes there is its own. The rest is noted.
"""

from __future__ import annotations

import os
import shutil
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch

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
_hooked: list[bool] = []


def _hook_once() -> None:
    """Put the hook in place that sees each file and host before it is opened; Python cannot take it away again."""
    if not _hooked:
        _hooked.append(True)
        sys.addaudithook(_see)


def _see(event: str, arguments: tuple[Any, ...]) -> None:
    if not _written_in:
        return
    if event == "socket.getaddrinfo":
        host = arguments[0].decode() if isinstance(arguments[0], bytes) else str(arguments[0] or "")
        if host and not host.startswith(_HERE) and host != socket.gethostname():
            hosts.add(host)
    if event != "open":
        return
    path, mode, flags = arguments
    writes = isinstance(flags, int) and flags & (os.O_WRONLY | os.O_RDWR)
    if writes and isinstance(path, (str, os.PathLike)):
        _own(os.fspath(path), empty=isinstance(mode, str) and "w" in mode)


def _own(path: str, *, empty: bool) -> None:
    """Put aside the file of a link in the run's folder, and take note of files elsewhere.

    Args:
        path: Of the file that is to be written.
        empty: Whether its old content goes anyway.
    """
    place = Path(path)
    full = place.parent.resolve() / place.name
    if _written_in and not full.is_relative_to(_written_in[-1]) and full.parts[1:2] not in (("dev",), ("proc",)):
        outside.add(str(full))
    elif _written_in and full.is_symlink():
        _replace(full, empty=empty)


def _replace(full: Path, *, empty: bool) -> None:
    """Replace a link by a file of its own, empty or a copy; of ranks that write at one moment the first one does."""
    import fcntl  # systems without it have no ranks

    folder = os.open(full.parent, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)  # until it is closed
        if full.is_symlink():
            source = full.resolve()
            full.unlink()
            if not empty:
                shutil.copyfile(source, full)
    finally:
        os.close(folder)


def show_files(source: Path, folder: Path) -> None:
    """Fill `folder` with links to the files of `source`; folders are made anew, beyond many files they are links too."""
    count = 0
    for place, folders, files in os.walk(source):
        here = folder / Path(place).relative_to(source)
        folders[:] = [name for name in folders if not name.startswith(".")]
        for name in files:
            count += 1
            (here / name).symlink_to(Path(place) / name)
        if count > _MOST_FILES:
            for name in folders:
                (here / name).symlink_to(Path(place) / name)
            folders.clear()
        for name in folders:
            (here / name).mkdir()
