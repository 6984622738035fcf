"""Which modules does the fork server import before it forks? torch at once; the lazily imported ones as recorded.

torch imports some two hundred modules at the first use of a feature (torch._dynamo under FSDP2 among them), which
dominates a fresh rank. Ranks report what they had to import; the list is kept per torch and Python version and only
names modules of torch and of what torch itself pulls in, never the code under test, which may change while we run.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import platform
import sys
import tempfile
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

FIRST = (
    "torch",
    "torch.distributed",
    "torch.distributed.device_mesh",
    "fsdp_testing.pool.worker",
    "fsdp_testing.ledger.interception",
    "fsdp_testing.backends",
    "fsdp_testing.pool.hygiene",
    "ctypes",
    "numpy.random",
)
_FAMILIES = (
    "torch",
    "numpy",
    "sympy",
    "mpmath",
    "networkx",
    "jinja2",
    "markupsafe",
    "filelock",
    "fsspec",
    "typing_extensions",
    "optree",
    "einops",
    "triton",
)
_NEVER = ("torch._inductor.compile_worker", "torch.testing._internal", "torch.utils.tensorboard", "antigravity", "this")
_MOST_MODULES = 5_000


def cache_file() -> Path:
    """Return where the recorded list for this torch and Python is kept."""
    from fsdp_testing.env import cache_directory

    return cache_directory() / f"preload-torch-{_torch_version()}-py{platform.python_version()}.json"


@functools.cache
def _torch_version() -> str:
    try:
        return version("torch")
    except PackageNotFoundError:
        return "none"


def recorded_modules() -> list[str]:
    """Return the recorded list in the order to import; empty when nothing was recorded or the file is damaged."""
    known = _read()
    refused = set(known["refused"])
    return [name for name in known["modules"] if name not in refused and _allowed(name)]


def _read() -> dict[str, list[str]]:
    content: Any = None
    with contextlib.suppress(OSError, ValueError, RecursionError):
        content = json.loads(cache_file().read_text(encoding="utf-8"))
    content = content if isinstance(content, dict) else {}
    known: dict[str, list[str]] = {}
    for part in ("modules", "refused"):
        names = content.get(part)
        names = names if isinstance(names, list) else []
        known[part] = [name for name in names if isinstance(name, str)][:_MOST_MODULES]
    return known


def _allowed(name: str) -> bool:
    root = name.partition(".")[0]
    known = root in _FAMILIES or root in sys.stdlib_module_names
    return known and not name.startswith(_NEVER) and "__main__" not in name


def record(modules: Iterable[str]) -> None:
    """Add `modules` that ranks had to import themselves, in the order in which their import began.

    What is not importable any more or not allowed does no harm: the list is filtered when read, and a module that
    fails to import is skipped. A cache that cannot be written only costs time.
    """
    known = _read()
    present = set(known["modules"])
    # Importers begin before what they import: from the back, imports come in small steps.
    fresh = [name for name in reversed(list(modules)) if _allowed(name) and name not in present]
    if fresh:
        _write({**known, "modules": known["modules"] + fresh})


def refuse(module: str) -> None:
    """Never import `module` ahead again: it starts threads, which a fork would lose."""
    known = _read()
    if module not in known["refused"]:
        _write({**known, "refused": [*known["refused"], module]})


def _write(known: dict[str, list[str]]) -> None:
    path = cache_file()
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name)
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as stream:
                json.dump(known, stream)
            Path(temporary).replace(path)
        except OSError:
            Path(temporary).unlink(missing_ok=True)
            raise
