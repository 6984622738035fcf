"""What does pytest load when this package is installed? This module: options and a marker, nothing heavy.

It imports neither torch nor pytest nor the pool, so that a project that merely has the package in its environment pays
nothing for it. The work is in `fsdp_testing.pytest_plugin`, loaded by name when pytest is configured.
"""

from __future__ import annotations

from typing import Any

_CONTROLLER = "fsdp_testing.pytest_plugin.controller"


_OPTIONS: tuple[tuple[str, str, str], ...] = (
    (
        "--world-size",
        "N[,N...]",
        "ranks for tests whose `world` marker names no size; several give one test id each (default: 2)",
    ),
    (
        "--dist-backend",
        "NAME",
        "backend for tests whose `world` marker names none: gloo, nccl, fake or a registered one (default: gloo)",
    ),
    (
        "--rank-timeout",
        "SECONDS",
        "deadline for tests whose `world` marker names none; 0 means no deadline (default: 60)",
    ),
    (
        "--isolation",
        "MODE",
        (
            "warm: ranks and group are kept from test to test; fresh: new processes and a new group for every test, also "
            "for tests whose marker says warm (default: warm)"
        ),
    ),
    (
        "--rank-pdb",
        "RANK",
        "debug this rank: on a failure and at breakpoint() it gets the terminal, the others wait, no deadline",
    ),
)
_FLAGS: tuple[tuple[str, str], ...] = (
    ("--strict-hygiene", "fail a test that leaves something behind in a rank (default: warn)"),
    ("--require-backend", "fail instead of skipping where a backend cannot run on this machine"),
)


def pytest_addoption(parser: Any) -> None:
    """Add the options of multi-rank tests."""
    group = parser.getgroup("fsdp-testing", "tests on N ranks (marker `world`)")
    for name, metavar, text in _OPTIONS:
        group.addoption(name, metavar=metavar, default=None, help=text)
    for name, text in _FLAGS:
        group.addoption(name, action="store_true", default=False, help=text)
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
