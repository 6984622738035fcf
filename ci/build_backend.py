"""Builds a wheel without leaving anything in the checkout, and without what an earlier build left there.

setuptools' own backend, with its folders for what it makes on the way in a temporary one (its `build/` would otherwise be
packed again by the next build, with modules that are long gone).
"""

from __future__ import annotations

import base64
import bz2
import contextlib
import hashlib
import json
import os
import re
import tempfile
import zipfile
from collections.abc import Iterator, Mapping
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

_FINDINGS = "fsdp_testing/docs/findings/"
_KNOWN = "fsdp_testing/checks/findings/known_failures.toml"  # the tables of those pages are made from it
_PAGE = "fsdp_testing/docs/adapters.md"
_ARCHIVE = "fsdp_testing/docs/findings.json.bz2"  # fsdp_testing/base/documentation.py reads it


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
        contents = {_in_package(entry.filename): (entry, old.read(entry)) for entry in old.infolist()}
        findings = {
            name: contents.pop(name)[1] for name in sorted(contents) if name.startswith((_FINDINGS, _KNOWN, _PAGE))
        }
        archive = _archived(findings)
        for name, (entry, content) in contents.items():
            if name.endswith(".dist-info/RECORD"):
                content = _record(content.decode(), {_ARCHIVE: archive}).encode()
            entry.filename = name
            new.writestr(entry, content, zipfile.ZIP_DEFLATED, 9)
        place = zipfile.ZipInfo(_ARCHIVE)
        place.external_attr = 0o644 << 16
        new.writestr(place, archive)
    packed.replace(wheel)


def _archived(pages: Mapping[str, bytes]) -> bytes:
    """Return one archive of many small texts, which are alike: less than half of what they take one by one."""
    texts = {re.sub(r"^fsdp_testing/(docs|checks)/", "docs/", name): page.decode() for name, page in pages.items()}
    return bz2.compress(json.dumps(texts, ensure_ascii=False).encode())


def _record(lines: str, added: Mapping[str, bytes]) -> str:
    """Return the list of a wheel's files (PEP 376), with the archive in place of what it holds."""
    kept = [line for line in _in_package(lines).splitlines() if not line.startswith((_FINDINGS, _KNOWN, _PAGE))]
    for name, content in added.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
        kept.append(f"{name},sha256={digest},{len(content)}")
    return "\n".join(kept) + "\n"


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
