"""The pytest process that users start: it chooses tests on ranks, starts the ranks, and runs the protocol.

The plugin's entry calls it when first needed. The parts registered here live as long as the session.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import pytest

from fsdp_testing.base import env
from fsdp_testing.errors import InvalidArgument
from fsdp_testing.plugin import dist_pool
from fsdp_testing.plugin.other_plugins import TimeLimits, warn_of_reruns
from fsdp_testing.plugin.rank_debugger import debugged_rank
from fsdp_testing.plugin.selection import defaults_of, refusal_to_draw, world_request
from fsdp_testing.ranks.pool.controller import platform_refusal
from fsdp_testing.ranks.pool.world import inside_rank

if TYPE_CHECKING:
    from fsdp_testing.plugin.protocol import Protocol


def validate(config: pytest.Config) -> None:
    """Check this plugin's options, and that no other plugin also uses the launcher's processes.

    Raises:
        pytest.UsageError: Lists every wrong option.
    """
    try:
        defaults_of(config)
        debugged_rank(config)
        if config.option.dist_pool:
            dist_pool.check()
        workers = getattr(config.option, "numprocesses", None)
        if workers and env.launched() is not None and not inside_rank():
            raise InvalidArgument(
                f"pytest-xdist: expected no -n under a launcher, got -n {workers}. Its processes make the ranks; run either."
            )
    except InvalidArgument as error:
        raise pytest.UsageError(str(error)) from None


def protocol_of(config: pytest.Config) -> Protocol:
    """Return the part of this session that runs tests on ranks; the first call makes it.

    Raises:
        InvalidArgument: The options contradict each other.
    """
    made: Any = config.pluginmanager.get_plugin("fsdp_testing.protocol")
    if made is None:
        from fsdp_testing.plugin.protocol import Protocol, Sweep

        made = Protocol(config)
        config.pluginmanager.register(made, "fsdp_testing.protocol")
        config.pluginmanager.register(Sweep(made.leases), "fsdp_testing.sweep")
        config.pluginmanager.register(TimeLimits(), "fsdp_testing.time_limits")
        launch = None if inside_rank() else env.launched()
        if launch is not None and launch.world_size > 1:
            from fsdp_testing.plugin.launched import NAME, Launched

            config.pluginmanager.register(Launched(config, launch, made.leases), NAME)
    return made


def start_ahead(config: pytest.Config) -> None:
    """Start the fork server, without waiting, if this process will have ranks."""
    if platform_refusal() is None:
        protocol = protocol_of(config)
        if not config.option.collectonly:
            protocol.leases.start()


def select(config: pytest.Config, marked: Sequence[pytest.Item]) -> dict[pytest.Item, str]:
    """Have each marked item run on its world.

    Returns:
        The reason for each item that cannot run.

    Raises:
        pytest.UsageError: Markers are wrong; lists every offence.
    """
    refused: dict[pytest.Item, str] = {}
    problems: list[str] = []
    no_ranks = platform_refusal()
    protocol: Any = protocol_of(config) if no_ranks is None else None
    for item in marked:
        try:
            request = world_request(item)
        except InvalidArgument as error:
            problems.append(str(error))
            continue
        refusal = no_ranks or refusal_to_draw(item)
        if refusal is not None:
            refused[item] = f"{item.nodeid}: marker world: {refusal}"
        else:
            protocol.take(item, request)
    if problems:
        raise pytest.UsageError(*problems)
    warn_of_reruns(config, marked)
    return refused
