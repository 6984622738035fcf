"""What pytest loads when this package is installed: options, a marker, three fixtures, nothing heavy.

A session without tests on ranks imports this and little more. The modules of `fsdp_testing.plugin` that run tests on
ranks are imported when first needed: by an option, a launcher's variables, a file that mentions ranks, a marked test, or
the fixture `worlds`.
"""

from __future__ import annotations

import sys
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from fsdp_testing.base import env

_HINTS = (b"mark.world", b"worlds")
_REFUSAL = pytest.StashKey[str]()
_SEEN = pytest.StashKey[bool]()
_RUNNING = pytest.StashKey[pytest.Item]()

# Option, placeholder of its value, help.
_OPTIONS = (
    (
        "--world-size",
        "N[,N...]",
        "number of ranks if a `world` marker names none; a list gives one test id each (default: 2)",
    ),
    (
        "--dist-backend",
        "NAME",
        "backend if a marker names none: gloo, nccl, fake or a registered one (default: gloo)",
    ),
    ("--rank-timeout", "SECONDS", "deadline if a marker names none; 0 means no deadline (default: 60)"),
    (
        "--isolation",
        "MODE",
        "warm: ranks are kept from test to test; fresh: new ones for every test, whatever its marker says (default: warm)",
    ),
    (
        "--rank-pdb",
        "RANK",
        "debug this rank: on a failure and at breakpoint() it gets the terminal, the others wait, no deadline",
    ),
)
_FLAGS = {
    "--strict-hygiene": "fail a test that leaks state in a rank (default: warn)",
    "--dist-pool": "run torch's multi-process test classes, and those in the style of DeepSpeed's, on the pool",
    "--require-backend": "fail instead of skipping if a backend cannot run on this machine",
}


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options of multi-rank tests."""
    group = parser.getgroup("fsdp-testing", "tests on N ranks (marker `world`)")
    for name, metavar, text in _OPTIONS:
        group.addoption(name, metavar=metavar, default=None, help=text)
    for name, text in _FLAGS.items():
        group.addoption(name, action="store_true", default=False, help=text)
    group.addoption(
        "--check-jobs",
        type=int,
        metavar="N",
        help="checks of parametrize_with_checks judged at a time (default: by processors and memory)",
    )
    parser.addini(
        "world_rank_plugins_off",
        "plugins (names as `pytest --trace-config` shows them) that are not loaded in ranks",
        type="args",
        default=[],
    )


def pytest_configure(config: pytest.Config) -> None:
    """Register the marker; validate our options, if any are given, before collection."""
    config.addinivalue_line(
        "markers",
        "world(size=2, backend='gloo', timeout=60, isolation='warm', rank=None): run this test on `size` ranks; a list "
        "of sizes gives one test id each. `rank` is for the backend 'fake': which rank the one process stands for.",
    )
    given = config.option.dist_pool or any(config.getoption(name) is not None for name, _, _ in _OPTIONS)
    if given or env.get("WORLD_SIZE") is not None:
        from fsdp_testing.plugin.controller import validate

        validate(config)


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> None:
    """Start the fork server when a file seems to have tests on ranks, so that both processes import torch at the same time."""
    if parent.config.option.collectonly:
        return
    try:
        text = module_path.read_bytes()
    except OSError:
        return  # pytest itself will say that the file cannot be read
    if any(hint in text for hint in _HINTS):
        from fsdp_testing.plugin.controller import start_ahead

        start_ahead(parent.config)


# First in both processes: the order of parameters is the order in the id, and plugins are registered differently.
@pytest.hookimpl(tryfirst=True)
def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Give a test one id for each size of a list."""
    if metafunc.definition.get_closest_marker("world") is not None:
        from fsdp_testing.plugin.selection import parametrize_sizes

        parametrize_sizes(metafunc)


def pytest_itemcollected(item: pytest.Item) -> None:
    """Let `-k world3` select tests on 3 ranks, since `-k` cannot match the `=` of an id such as `[world=3]`."""
    if item.get_closest_marker("world") is not None:
        from fsdp_testing.plugin.selection import size_words

        item.extra_keyword_matches.update(size_words(item))


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Find the items that run on ranks, and the ones that cannot."""
    marked = [item for item in items if item.get_closest_marker("world") is not None]
    for item in marked:
        item.stash[_SEEN] = True
    if marked:
        from fsdp_testing.plugin.controller import select

        for item, sentence in select(config, marked).items():
            item.stash[_REFUSAL] = sentence
    if config.option.dist_pool:
        from fsdp_testing.plugin import dist_pool

        dist_pool.take_over(config, items)
    # If a test has a check, the module that makes checks has been imported.
    checks = "fsdp_testing.plugin.conformance_checks" in sys.modules and _checks_go_side_by_side(config, items)
    if any("worlds" in getattr(item, "fixturenames", ()) for item in items) or (checks and env.launched() is not None):
        from fsdp_testing.plugin.controller import start_ahead

        start_ahead(config)


def _checks_go_side_by_side(config: pytest.Config, items: list[pytest.Item]) -> bool:
    """Have the checks of `parametrize_with_checks` judged in parallel; return whether there are any."""
    from fsdp_testing.plugin.checks_ahead import NAME, ChecksAhead, check_of

    there = any(check_of(item) is not None for item in items)
    # Workers of pytest-xdist share the tests of one function, and already run in parallel.
    if there and env.get("PYTEST_XDIST_WORKER") is None and not config.pluginmanager.hasplugin(NAME):
        config.pluginmanager.register(ChecksAhead(config.option.check_jobs), NAME)
    return there


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> None:
    """Note the running item for `worlds`, which lives as long as the session."""
    item.config.stash[_RUNNING] = item


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Fail a marked test that cannot run on ranks and say why; in this process it could pass without any rank."""
    if _REFUSAL in item.stash:
        pytest.fail(item.stash[_REFUSAL], pytrace=False)
    if item.get_closest_marker("world") is not None and _SEEN not in item.stash:
        pytest.fail(
            f"{item.nodeid}: marker world: expected it when pytest_collection_modifyitems of this plugin runs, got it later. "
            "Mark the test in its file, or in a hook without `trylast` and without a wrapper.",
            pytrace=False,
        )


@pytest.hookimpl(wrapper=True, trylast=True)
def pytest_runtestloop(session: pytest.Session) -> Generator[None, Any, Any]:
    """End the ranks inside of pytest-cov's own wrapper, which combines the data they save."""
    try:
        return (yield)
    finally:
        sweep: Any = session.config.pluginmanager.get_plugin("fsdp_testing.sweep")
        if sweep is not None:
            sweep.end()
        if session.config.option.dist_pool:
            from fsdp_testing.plugin import dist_pool

            dist_pool.end()


@pytest.fixture(name="fsdp_world_size")
def _size(request: pytest.FixtureRequest) -> Any:
    """Carries the size from a marker's list into the test's id."""
    return getattr(request, "param", None)


@pytest.fixture
def world(request: pytest.FixtureRequest) -> Any:
    """In a test marked `world`: this rank's view of its world. Here, in the controlling process, an error."""
    pytest.fail(
        f"{request.node.nodeid}: fixture world: expected a test on ranks, got one without the `world` marker. "
        "Mark it: @pytest.mark.world(2).",
        pytrace=False,
    )


@pytest.fixture(scope="session")
def worlds(request: pytest.FixtureRequest) -> Any:
    """Run functions on ranks from a test of the controlling process: `worlds(size=2).run(function, *args)`."""
    from fsdp_testing.plugin.controller import protocol_of
    from fsdp_testing.ranks.pool.controller import platform_refusal

    refusal = platform_refusal()
    if refusal is not None:
        pytest.fail(f"fixture worlds: {refusal}", pytrace=False)
    from fsdp_testing.plugin.worlds import Worlds

    return Worlds(request.session, protocol_of(request.config).leases, lambda: request.config.stash[_RUNNING])
