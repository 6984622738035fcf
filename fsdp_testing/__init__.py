"""Multi-rank pytest plugin, rank pool and conformance harness for data-parallel sharding.

Importing this package imports neither torch nor pytest: names are loaded when first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fsdp_testing.conformance import run_conformance as run_conformance
    from fsdp_testing.pool.world import World as World
    from fsdp_testing.pool.world import current_world as current_world
    from fsdp_testing.pytest_plugin.conformance_checks import parametrize_with_checks as parametrize_with_checks
    from fsdp_testing.pytest_plugin.model_checks import parametrize_with_models as parametrize_with_models
    from fsdp_testing.run import run_ranks as run_ranks
    from fsdp_testing.script_check import batch as batch
    from fsdp_testing.script_check import check_script as check_script
    from fsdp_testing.training_check import check_training as check_training

_HOMES = {
    "World": "fsdp_testing.pool.world",
    "current_world": "fsdp_testing.pool.world",
    "batch": "fsdp_testing.script_check.feeding",
    "check_script": "fsdp_testing.script_check",
    "check_training": "fsdp_testing.training_check",
    "parametrize_with_checks": "fsdp_testing.pytest_plugin.conformance_checks",
    "parametrize_with_models": "fsdp_testing.pytest_plugin.model_checks",
    "run_conformance": "fsdp_testing.conformance",
    "run_ranks": "fsdp_testing.run",
}

__all__ = [
    "World",
    "batch",
    "check_script",
    "check_training",
    "current_world",
    "parametrize_with_checks",
    "parametrize_with_models",
    "run_conformance",
    "run_ranks",
]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(home), name)
