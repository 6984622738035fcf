"""Builds a wheel without leaving anything in the checkout, and without what an earlier build left there.

setuptools' own backend, with its folders for what it makes on the way in a temporary one (its `build/` would otherwise be
packed again by the next build, with modules that are long gone).
"""

from __future__ import annotations

import contextlib
import os
import re
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from setuptools import build_meta
from setuptools.build_meta import (
    build_editable,
    get_requires_for_build_editable,
    get_requires_for_build_sdist,
    get_requires_for_build_wheel,
    prepare_metadata_for_build_editable,
)

__all__ = [
    "build_editable",
    "build_sdist",
    "build_wheel",
    "get_requires_for_build_editable",
    "get_requires_for_build_sdist",
    "get_requires_for_build_wheel",
    "prepare_metadata_for_build_editable",
    "prepare_metadata_for_build_wheel",
]


def build_wheel(wheel_directory: str, *arguments: Any, **options: Any) -> str:
    """See PEP 517."""
    with _elsewhere():
        name = build_meta.build_wheel(wheel_directory, *arguments, **options)
    _pack_again(Path(wheel_directory, name))
    return name


def _pack_again(wheel: Path) -> None:
    """Pack a wheel's files as small as their format allows, with the pages that messages name inside of the package."""
    packed = wheel.with_suffix(".packed")
    with zipfile.ZipFile(wheel) as old, zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as new:
        for entry in old.infolist():
            content = old.read(entry)
            if entry.filename.endswith(".dist-info/RECORD"):
                content = _in_package(content.decode()).encode()
            entry.filename = _in_package(entry.filename)
            new.writestr(entry, content, zipfile.ZIP_DEFLATED, 9)
    packed.replace(wheel)


def _in_package(names: str) -> str:
    """Return names of files, one a line, with data files below `fsdp_testing`: setuptools packs none from outside there."""
    return re.sub(r"^[^/\n]+\.data/data/", "fsdp_testing/", names, flags=re.MULTILINE)


def build_sdist(*arguments: Any, **options: Any) -> str:
    """See PEP 517."""
    with _elsewhere():
        return build_meta.build_sdist(*arguments, **options)


def prepare_metadata_for_build_wheel(*arguments: Any, **options: Any) -> str:
    """See PEP 517."""
    with _elsewhere():
        return build_meta.prepare_metadata_for_build_wheel(*arguments, **options)


@contextlib.contextmanager
def _elsewhere() -> Iterator[None]:
    before = os.environ.get("DIST_EXTRA_CONFIG")
    with tempfile.TemporaryDirectory(prefix="build-") as folder:
        config = Path(folder, "elsewhere.cfg")
        config.write_text(f"[build]\nbuild_base = {folder}\n\n[egg_info]\negg_base = {folder}\n", encoding="utf-8")
        os.environ["DIST_EXTRA_CONFIG"] = str(config)
        try:
            yield
        finally:
            os.environ.pop("DIST_EXTRA_CONFIG")
            if before is not None:
                os.environ["DIST_EXTRA_CONFIG"] = before
