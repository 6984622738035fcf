"""Multi-rank pytest plugin, rank pool and conformance harness for data-parallel sharding.

Importing this package imports neither torch nor pytest: names are loaded when first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from fsdp_testing import old_names

if TYPE_CHECKING:
    from fsdp_testing.checks.conformance import run_conformance as run_conformance
    from fsdp_testing.plugin.conformance_checks import parametrize_with_checks as parametrize_with_checks
    from fsdp_testing.plugin.model_checks import parametrize_with_models as parametrize_with_models
    from fsdp_testing.ranks.pool.world import World as World
    from fsdp_testing.ranks.pool.world import current_world as current_world
    from fsdp_testing.ranks.run import run_ranks as run_ranks
    from fsdp_testing.train.feed import batch as batch
    from fsdp_testing.train.function import check_training as check_training
    from fsdp_testing.train.loss import check_loss as check_loss
    from fsdp_testing.train.script import check_script as check_script

_HOMES = {
    "World": "fsdp_testing.ranks.pool.world",
    "current_world": "fsdp_testing.ranks.pool.world",
    "batch": "fsdp_testing.train.feed",
    "check_loss": "fsdp_testing.train.loss",
    "check_script": "fsdp_testing.train.script",
    "check_training": "fsdp_testing.train.function",
    "parametrize_with_checks": "fsdp_testing.plugin.conformance_checks",
    "parametrize_with_models": "fsdp_testing.plugin.model_checks",
    "run_conformance": "fsdp_testing.checks.conformance",
    "run_ranks": "fsdp_testing.ranks.run",
}

__all__ = [
    "World",
    "batch",
    "check_loss",
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


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


old_names.install()
