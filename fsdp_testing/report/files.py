"""An output file appears all at once or not at all.

Every report is written to a temporary file beside its target and then renamed. A reader never sees half a report, and an
interrupted run leaves the previous report whole.
"""

from __future__ import annotations

import errno
import os
import uuid
from contextlib import suppress
from pathlib import Path

from fsdp_testing.errors import InvalidArgument


def check_writable(path: Path, option: str) -> None:
    """Check before a long run that its report can be written afterwards.

    Args:
        path: The file to be written; missing parent directories are made.
        option: How the user named it, for the message.

    Raises:
        InvalidArgument: The directory cannot be made or written to, or a directory is in the file's place.
    """
    path = _target(path, option)
    probe = _beside(path)
    try:
        if _is_device(path):
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_dir():
            raise IsADirectoryError(21, "it is a directory", str(path))
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise _unwritable(path, option, error) from error


def write_atomically(path: Path, text: str, option: str = "report") -> None:
    """Write `text` to `path` as UTF-8, whole or not at all; through a link, and straight into a device or a pipe.

    Raises:
        InvalidArgument: It cannot be written; what was there before is still there.
    """
    path = _target(path, option)
    temporary = _beside(path)
    try:
        if _is_device(path):
            path.write_text(text, encoding="utf-8", errors="backslashreplace")
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        # A path or message may contain bytes that are not UTF-8; the report shows them escaped.
        with temporary.open("x", encoding="utf-8", errors="backslashreplace", newline="\n") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        raise _unwritable(path, option, error) from error
    finally:
        with suppress(OSError):  # after a success it is renamed; after a failure the folder may never have existed
            temporary.unlink()


def _target(path: Path, option: str) -> Path:
    """Return the file to which a path leads: replacing a link would leave what it leads to as it was.

    Raises:
        InvalidArgument: The link leads to itself.
    """
    target = Path(os.path.realpath(path)) if path.is_symlink() else path
    if target.is_symlink():
        raise _unwritable(path, option, OSError(errno.ELOOP, os.strerror(errno.ELOOP)))
    return target


def _is_device(path: Path) -> bool:
    return path.exists() and not path.is_file() and not path.is_dir()


def _beside(path: Path) -> Path:
    return path.parent / f".{path.name}.{uuid.uuid4().hex[:8]}.tmp"


def _unwritable(path: Path, option: str, error: OSError) -> InvalidArgument:
    return InvalidArgument(
        f"{option}: expected a writable path, got {str(path)!r} ({error.strerror or error}). "
        "Give another path, or make this one writable."
    )
