"""Finds a page of the documentation on this machine: in a checkout, or in an installed wheel."""

from __future__ import annotations

import functools
import tarfile
from pathlib import Path


def page(name: str) -> str:
    """Return the path of a page such as `docs/adapters.md`; `name` itself in a checkout, or if there is no such page."""
    place, here = folder(), Path.cwd()
    in_checkout = (here / "fsdp_testing" / "base" / "documentation.py").is_file() and (here / name).is_file()
    if place is None or in_checkout or not name.startswith("docs/") or not (place / name).is_file():
        return name
    return str(place / name)


def text_of(name: str) -> str | None:
    """Return the text of a page such as `docs/adapters.md`, or of a script that a page names; None if there is none."""
    place = folder()
    path = place / name if place is not None and name.startswith("docs/") and ".." not in name else None
    if path is not None and not path.is_file() and path.parent.with_suffix(".tar.xz").is_file():
        return _text_in(path.parent.with_suffix(".tar.xz"), f"{path.parent.name}/{path.name}")
    return path.read_text(encoding="utf-8") if path is not None and path.is_file() else None


def _text_in(archive: Path, name: str) -> str | None:
    """Read a file of an archive: a wheel has its many small scripts in one."""
    with tarfile.open(archive) as files:
        content = files.extractfile(name) if name in files.getnames() else None
        return None if content is None else content.read().decode()


@functools.cache
def folder() -> Path | None:
    """Return the folder that holds `docs/`: a checkout, or the package of an installed wheel; None if neither does."""
    package = Path(__file__).resolve().parents[1]
    return next((place for place in (package.parent, package) if (place / "docs" / "exit-codes.md").is_file()), None)
