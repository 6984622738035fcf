"""Finds a page of the documentation on this machine: in a checkout, or in an installed wheel."""

from __future__ import annotations

import bz2
import functools
import json
import os
from contextlib import suppress
from pathlib import Path

from fsdp_testing.base import env

ARCHIVE = "docs/findings.json.bz2"
"""Where a wheel has the pages that messages name and the scripts of findings, which are many and alike."""


def page(name: str) -> str:
    """Return the path of a page such as `docs/adapters.md`; `name` itself in a checkout, or if there is no such page.

    A page from the archive of a wheel is written into the user's cache, so that its path can be opened.
    """
    place, here = folder(), Path.cwd()
    in_checkout = (here / "fsdp_testing" / "base" / "documentation.py").is_file() and (here / name).is_file()
    if place is None or in_checkout or not name.startswith("docs/"):
        return name
    if (place / name).is_file():
        return str(place / name)
    text = text_of(name)
    return name if text is None else _cached(name, text)


def text_of(name: str) -> str | None:
    """Return the text of a page such as `docs/adapters.md`, or of a script that a page names; None if there is none."""
    place = folder()
    if place is None or not name.startswith("docs/") or ".." in name:
        return None
    if (place / name).is_file():
        return (place / name).read_text(encoding="utf-8")
    return _texts(place / ARCHIVE).get(name)


@functools.cache
def _texts(archive: Path) -> dict[str, str]:
    """Return the text of each file of a wheel's archive by its name in a checkout."""
    return dict(json.loads(bz2.decompress(archive.read_bytes()))) if archive.is_file() else {}


def _cached(name: str, text: str) -> str:
    """Return the path of a copy of a page in the user's cache; its name, where no copy can be written."""
    path = Path(env.get("XDG_CACHE_HOME") or "~/.cache", "fsdp-testing", name)
    with suppress(OSError, RuntimeError):
        path = path.expanduser()
        if not path.is_file() or path.read_text(encoding="utf-8") != text:
            path.parent.mkdir(parents=True, exist_ok=True)
            # Beside it and then in its place: another process may read it now.
            draft = path.with_name(f".{path.name}.{os.getpid()}")
            draft.write_text(text, encoding="utf-8")
            draft.replace(path)
        return str(path)
    return name


@functools.cache
def folder() -> Path | None:
    """Return the folder that holds `docs/`: a checkout, or the package of an installed wheel; None if neither does."""
    package = Path(__file__).resolve().parents[1]
    return next((place for place in (package.parent, package) if (place / "docs" / "exit-codes.md").is_file()), None)
