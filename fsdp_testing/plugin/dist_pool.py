"""`--dist-pool`: existing test classes start their processes on the pool, which notices every death."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any

import pytest

from fsdp_testing.base import env
from fsdp_testing.errors import InvalidArgument
from fsdp_testing.plugin.leases import coverage_settings
from fsdp_testing.plugin.selection import defaults_of
from fsdp_testing.ranks.pool.controller import platform_refusal


def check() -> None:
    """Refuse the option if the pool cannot serve.

    Raises:
        InvalidArgument: Under a launcher, or on a system without fork.
    """
    if env.launched() is not None:
        raise InvalidArgument(
            "--dist-pool: expected to start processes, got those of a launcher, which are the ranks "
            "already. Drop --dist-pool, or start pytest without the launcher."
        )
    refusal = platform_refusal()
    if refusal is not None:
        raise InvalidArgument(f"--dist-pool: {refusal}")


def take_over(config: pytest.Config, items: Sequence[pytest.Item]) -> None:
    """Replace how the collected items' classes start processes.

    Raises:
        pytest.UsageError: Lists the classes that start processes in a way that cannot be replaced.
    """
    from fsdp_testing.plugin.test_classes import deepspeed_classes, processes, torch_classes

    processes.settings.strict = config.option.strict_hygiene
    processes.settings.timeout = defaults_of(config).timeout if config.option.rank_timeout is not None else None
    processes.own_pool.coverage = coverage_settings()
    problems: list[str] = []
    if torch_classes.loaded():
        torch_classes.take_over()
    classes: list[Any] = [getattr(item, "cls", None) for item in items]
    styled = dict.fromkeys(cls for cls in classes if getattr(cls, "is_dist_test", False))
    for cls in styled:
        try:
            deepspeed_classes.take_over(cls)
        except InvalidArgument as error:
            problems.append(str(error))
    if problems:
        raise pytest.UsageError(*problems)
    if not config.option.collectonly and (styled or torch_classes.loaded()):
        processes.own_pool.get().start()
    config.pluginmanager.register(_NoMissedDeath(), "fsdp_testing.dist_pool")


def end() -> None:
    """End the pool of test classes; coverage of its processes is on disk afterwards."""
    from fsdp_testing.plugin.test_classes.processes import own_pool

    own_pool.close()


class _NoMissedDeath:
    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_makereport(self, call: pytest.CallInfo[Any]) -> Generator[None, Any, Any]:
        """Fail a test if one of its processes died or hung, even if it is marked `xfail`."""
        from fsdp_testing.plugin.worlds import failed_if_lost

        report = yield
        return failed_if_lost(report, call.excinfo.value) if call.excinfo is not None else report
