"""Multi-rank pytest plugin, rank pool and conformance harness for data-parallel sharding.

Importing this package imports neither torch nor pytest: names are loaded when first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fsdp_testing.pool.world import World as World
    from fsdp_testing.pool.world import current_world as current_world
    from fsdp_testing.run import run_ranks as run_ranks

_HOMES = {
    "World": "fsdp_testing.pool.world",
    "current_world": "fsdp_testing.pool.world",
    "run_ranks": "fsdp_testing.run",
}

__all__ = ["World", "current_world", "run_ranks"]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(home), name)
