"""The modules that the fork server imports before it forks: torch at once; the lazily imported ones once a rank had to.

torch imports some hundreds of modules at the first use of a feature (torch._dynamo under FSDP2 among them), which
dominates a new rank. Ranks report what they had to import, and a successor of the fork server imports the same: modules of
torch, of what torch itself pulls in, and of pytest; never the code under test, which may change while we run.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable

FIRST = (
    "torch",
    "torch.distributed",
    "torch.distributed.device_mesh",
    "fsdp_testing.ranks.pool.worker",
    "fsdp_testing.ranks.ledger.interception",
    "fsdp_testing.base.backends",
    "fsdp_testing.ranks.pool.hygiene",
    "fsdp_testing.ranks.pool.private_store",
    "ctypes",
    "numpy.random",
)
TRAINING = ("torch._dynamo",)
"""Imports of a rank's first optimizer (a second of CPU time), for callers whose ranks all train."""

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
    # Imports of a test's own file, and so of each new rank that imports a function from it.
    "pytest",
    "_pytest",
    "pluggy",
    "iniconfig",
    "packaging",
    "pygments",
)
_NEVER = (
    "torch._inductor.compile_worker",
    "torch.testing._internal",
    "torch.utils.tensorboard",
    "_pytest.pytester",  # optional plugin: pytest rewrites its assertions when loading it, and warns if it is already imported
    "antigravity",
    "this",
)


def to_import_ahead(reported: Iterable[str]) -> list[str]:
    """Return the modules that a rank imported and its successor should import, in order."""
    # Importers start before their imports: in reverse, imports come in small steps, and one module is to blame for a thread.
    return [name for name in reversed(list(reported)) if _allowed(name)]


def _allowed(name: str) -> bool:
    root = name.partition(".")[0]
    familiar = root in _FAMILIES or root in sys.stdlib_module_names
    return familiar and not name.startswith(_NEVER) and "__main__" not in name
