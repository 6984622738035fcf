"""Is it still the implementation that was judged? One digest of its source text, and of the harness that judges it."""

from __future__ import annotations

import hashlib
import importlib.util
import re
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import torch

from fsdp_testing.adapters import registry
from fsdp_testing.adapters.adapter import Adapter

_ALWAYS = ("fsdp_testing", "fsdp_ref")
_INSTALLED = frozenset({"site-packages", "dist-packages"})
_IMPORT = re.compile(rb"^[ \t]*(?:from|import)[ \t]+([\w., \t]+)", re.MULTILINE)


def source_digest(adapter: Adapter) -> str:
    """Return a digest that changes with the text of the implementation, of what it imports, or of the harness.

    The text is that of all Python files of the package of its adapter, of this one, and of every package or module that is
    not installed and that these import, also inside functions. What is installed besides counts by its version.
    """
    total = hashlib.sha256(f"torch {torch.__version__}".encode())
    own = registry.module_of(adapter.reference).partition(".")[0]
    seen: set[str] = set()
    todo = [own, *_ALWAYS]
    while todo:
        name = todo.pop(0)
        if name in seen or name == "torch" or name in sys.stdlib_module_names:
            continue
        seen.add(name)
        place = _place(name)
        if place is None or (name not in (own, *_ALWAYS) and _INSTALLED & set(place.parts)):
            total.update(f"\n{name} {_version(name)}\n".encode())
            continue
        imported: set[str] = set()
        for file in sorted(place.rglob("*.py")) if place.is_dir() else [place]:
            text = file.read_bytes()
            total.update(f"\n{file.relative_to(place.parent)}\n".encode() + text)
            imported.update(_imported(text) if name not in _ALWAYS else ())
        todo += sorted(imported)
    return total.hexdigest()[:16]


def _place(name: str) -> Path | None:
    """Return folder or file of a package or module; None for one that is not there, or is no Python text."""
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return None
    if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
        return None
    file = Path(spec.origin)
    return file.parent if file.name == "__init__.py" else file


def _imported(text: bytes) -> Iterator[str]:
    for found in _IMPORT.finditer(text):
        for name in found[1].decode().split(" import ")[0].split(","):
            top = name.strip().partition(" ")[0].partition(".")[0]
            if top.isidentifier():
                yield top


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""
