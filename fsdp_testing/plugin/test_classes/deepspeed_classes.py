"""Starts the processes of classes in the style of DeepSpeed's `DistributedTest` on the pool.

DeepSpeed's base class and its copies compute fixtures and the size of the world in the controlling process. They then give
`_launch_daemonic_procs` or `_launch_non_daemonic_procs` the number of processes that must call `_dist_run`. Only these two
are replaced, so `DistributedFixture`, lists of sizes, marks and skips keep the class's code. The name of the file for the
group's `file://` address is passed on unchanged.
"""

from __future__ import annotations

import sys
import unittest
from typing import Any

from fsdp_testing.errors import InvalidArgument
from fsdp_testing.plugin.test_classes.processes import Processes
from fsdp_testing.ranks.pool.channel import dumps
from fsdp_testing.ranks.pool.hygiene import ENDS_WITH_PROCESS
from fsdp_testing.ranks.pool.targets import Target

__tracebackhide__ = True  # pytest shows the caller's frames and the ranks' errors, not these frames

_LAUNCHERS = ("_launch_daemonic_procs", "_launch_non_daemonic_procs")
_NEEDED = (*_LAUNCHERS, "_dist_run", "_dist_destroy")
_IN_RANK = "fsdp_testing.plugin.test_classes.in_rank"


def take_over(cls: type) -> None:
    """Run a class of this style, and those that share its base, on the pool. Repeated calls have no effect.

    Raises:
        InvalidArgument: The class starts its processes in a different way.
    """
    missing = [name for name in _NEEDED if not hasattr(cls, name)]
    if missing:
        raise InvalidArgument(
            f"{cls.__module__}.{cls.__qualname__}: expected a class that starts processes as DeepSpeed's DistributedTest "
            f"does, got one without {', '.join(missing)}. Mark its tests with pytest.mark.world instead, or run it without "
            "--dist-pool."
        )
    for name in _LAUNCHERS:
        owner = next(base for base in cls.__mro__ if name in vars(base))
        if vars(owner)[name] is not _launch:
            setattr(owner, name, _launch)


def _launch(instance: Any, size: int, *arguments: Any) -> None:
    """Call `_dist_run` of the instance in `size` processes of the pool; replaces both launchers."""
    cls = type(instance)
    file = getattr(sys.modules.get(cls.__module__), "__file__", None)
    attributes = {"reuse_dist_env": False, "non_daemonic_procs": False}
    current = getattr(instance, "_current_test", None)
    name = f"{cls.__qualname__}.{getattr(current, '__name__', 'run')}"
    with Processes(size) as processes:
        ended = processes.run(
            f"{_IN_RANK}:run_object",
            Target(cls.__module__, cls.__qualname__, file),
            "_dist_run",
            dumps(((instance, attributes, arguments), {})),
            "_dist_destroy",
            name=name,
            timeout=getattr(instance, "exec_timeout", None),
            lasting=ENDS_WITH_PROCESS,
        )
    reasons = {each.why for each in ended}
    if len(reasons) > 1:
        raise AssertionError(f"{name}: processes disagree: they skipped for {sorted(reasons)}")
    if reasons != {""}:
        raise unittest.SkipTest(reasons.pop())
