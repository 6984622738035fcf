"""Which modules does the fork server import before it forks? torch at once; the lazily imported ones as recorded.

torch imports some two hundred modules at the first use of a feature (torch._dynamo under FSDP2 among them), which
dominates a fresh rank. Ranks report what they had to import; the list is kept per torch and Python version and only
names modules of torch and of what torch itself pulls in, never the code under test, which may change while we run.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import sys
import tempfile
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

FIRST = ("torch", "torch.distributed", "torch.distributed.device_mesh", "fsdp_testing.pool.worker",
         "fsdp_testing.ledger.interception", "fsdp_testing.backends.gloo", "fsdp_testing.pool.hygiene", "ctypes")
_FAMILIES = ("torch", "numpy", "sympy", "mpmath", "networkx", "jinja2", "markupsafe", "filelock", "fsspec",
             "typing_extensions", "optree", "einops", "triton")
_NEVER = ("torch._inductor.compile_worker", "torch.testing._internal", "torch.utils.tensorboard")


def cache_file() -> Path:
    """Where the recorded list for this torch and Python is kept."""
    from fsdp_testing.env import cache_directory

    try:
        torch_version = version("torch")
    except PackageNotFoundError:
        torch_version = "none"
    return cache_directory() / f"preload-torch-{torch_version}-py{platform.python_version()}.json"


def recorded_modules() -> list[str]:
    """The recorded list, leaves first; empty when nothing was recorded or the file is damaged."""
    try:
        names = json.loads(cache_file().read_text())
    except (OSError, ValueError):
        return []
    return [name for name in names if isinstance(name, str) and _allowed(name)]


def _allowed(name: str) -> bool:
    root = name.partition(".")[0]
    known = root in _FAMILIES or root in sys.stdlib_module_names
    return known and not name.startswith(_NEVER) and "__main__" not in name


def record(modules: set[str]) -> None:
    """Add `modules` that a rank had to import itself; written atomically, kept for the next run."""
    wanted = [name for name in modules if _allowed(name)]
    if not wanted:
        return
    known = recorded_modules()
    fresh = [name for name in wanted if name not in set(known)]
    if not fresh:
        return
    path = cache_file()
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name)
        with os.fdopen(handle, "w") as stream:
            json.dump(known + fresh, stream)
        Path(temporary).replace(path)
