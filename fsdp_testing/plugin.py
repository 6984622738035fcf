"""What does pytest load when this package is installed? This module: options and a marker, nothing heavy.

It imports neither torch nor pytest nor the pool, so that a project that merely has the package in its environment pays
nothing for it. The work is in `fsdp_testing.pytest_plugin`, loaded by name when pytest is configured.
"""

from __future__ import annotations

from typing import Any

_CONTROLLER = "fsdp_testing.pytest_plugin.controller"


def pytest_addoption(parser: Any) -> None:
    """Add the options of multi-rank tests."""
    group = parser.getgroup("fsdp-testing", "tests on N ranks (marker `world`)")
    group.addoption(
        "--world-size",
        metavar="N[,N...]",
        default=None,
        help="ranks for tests whose `world` marker names no size; several give one test id each (default: 2)",
    )
    group.addoption(
        "--dist-backend",
        metavar="NAME",
        default=None,
        help="backend for tests whose `world` marker names none: gloo, nccl, fake or a registered one (default: gloo)",
    )
    group.addoption(
        "--rank-timeout",
        metavar="SECONDS",
        default=None,
        help="deadline for tests whose `world` marker names none; 0 means no deadline (default: 60)",
    )
    group.addoption(
        "--isolation",
        metavar="MODE",
        default=None,
        help="warm: ranks and group are kept from test to test; fresh: new processes and a new group for every test, "
        "also for tests whose marker says warm (default: warm)",
    )
    group.addoption(
        "--strict-hygiene",
        action="store_true",
        default=False,
        help="fail a test that leaves something behind in a rank (default: warn)",
    )
    group.addoption(
        "--rank-pdb",
        metavar="RANK",
        default=None,
        help="debug this rank: on a failure and at breakpoint() it gets the terminal, the others wait, no deadline",
    )
    group.addoption(
        "--require-backend",
        action="store_true",
        default=False,
        help="fail instead of skipping where a backend cannot run on this machine",
    )
    parser.addini(
        "world_rank_plugins_off",
        "plugins (names as `pytest --trace-config` shows them) that are not loaded in ranks",
        type="args",
        default=[],
    )


def pytest_configure(config: Any) -> None:
    """Register the marker and the part that runs tests on ranks."""
    config.addinivalue_line(
        "markers",
        "world(size=2, backend='gloo', timeout=60, isolation='warm', rank=None): run this test on `size` ranks; a list "
        "of sizes gives one test id each. `rank` is for the backend 'fake': which rank the one process stands for.",
    )
    config.pluginmanager.import_plugin(_CONTROLLER)
