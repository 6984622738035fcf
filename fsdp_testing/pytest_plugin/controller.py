"""What does the pytest process that users start do? Collect as ever, send marked tests to ranks, report one result.

This module registers the parts; they live as long as the session.
"""

from __future__ import annotations

from typing import Any

import pytest

from fsdp_testing import env
from fsdp_testing.errors import InvalidArgument
from fsdp_testing.pool.world import inside_rank
from fsdp_testing.pytest_plugin.attached import NAME as ATTACHED
from fsdp_testing.pytest_plugin.attached import Attached
from fsdp_testing.pytest_plugin.selection import SIZE_FIXTURE, defaults_of, parametrize_sizes, world_request


def pytest_configure(config: pytest.Config) -> None:
    """Validate the options; make the part that runs tests."""
    from fsdp_testing.pytest_plugin.protocol import Protocol, Sweep

    try:
        defaults_of(config)
        _attach(config)
        protocol = Protocol(config)
    except InvalidArgument as error:
        raise pytest.UsageError(str(error)) from None
    config.pluginmanager.register(protocol, "fsdp_testing.protocol")
    config.pluginmanager.register(Sweep(protocol.leases), "fsdp_testing.sweep")


def _attach(config: pytest.Config) -> None:
    """Under torchrun its processes are the world: worlds of our own would be made once in each of them."""
    launch = None if inside_rank() else env.torchrun()
    if launch is None:
        return
    if getattr(config.option, "numprocesses", None):
        raise InvalidArgument(
            f"pytest-xdist: expected no -n under torchrun, got -n {config.option.numprocesses}. The processes of "
            "torchrun are the ranks; run either."
        )
    config.pluginmanager.register(Attached(config, launch), ATTACHED)


# First in both processes: the order of parameters is the order in the id, and plugins are registered differently.
@pytest.hookimpl(tryfirst=True)
def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """One test id for each size of a list."""
    parametrize_sizes(metafunc)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Find out which items run on ranks; wrong markers end the session with every offence listed."""
    protocol: Any = config.pluginmanager.get_plugin("fsdp_testing.protocol")
    attached: Any = config.pluginmanager.get_plugin(ATTACHED)
    problems: list[str] = []
    for item in items:
        try:
            request = world_request(item)
        except InvalidArgument as error:
            problems.append(str(error))
            continue
        if request is not None:
            # The fake backend is one process anywhere.
            (protocol if attached is None or request.backend == "fake" else attached).take(item, request)
    if problems:
        raise pytest.UsageError(*problems)


@pytest.fixture(name=SIZE_FIXTURE)
def _size(request: pytest.FixtureRequest) -> Any:
    """Carries the size that a list in the marker made part of the test's id."""
    return getattr(request, "param", None)


@pytest.fixture
def world(request: pytest.FixtureRequest) -> Any:
    """In a test marked `world`: this rank's view of its world. Here, in the controlling process, an error.

    Under torchrun this process is a rank.
    """
    attached: Any = request.config.pluginmanager.get_plugin(ATTACHED)
    found = attached.world_of(request.node) if attached is not None else None
    if found is not None:
        return found
    pytest.fail(
        f"{request.node.nodeid}: fixture world: expected a test on ranks, got one without the `world` marker. "
        "Mark it: @pytest.mark.world(2).",
        pytrace=False,
    )


@pytest.fixture
def worlds(request: pytest.FixtureRequest) -> Any:
    """Run functions on ranks from a test of the controlling process: `worlds(size=2).run(function, *args)`."""
    from fsdp_testing.pytest_plugin.worlds import Worlds

    protocol: Any = request.config.pluginmanager.get_plugin("fsdp_testing.protocol")
    return Worlds(request, protocol.leases)
