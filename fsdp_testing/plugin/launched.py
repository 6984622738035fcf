"""A session under a launcher: the first process reports, the others serve ranks to it.

Every process collects, so that each knows whether to serve; a session without tests on ranks is unchanged.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator
from typing import TYPE_CHECKING, Any

import pytest

from fsdp_testing.errors import HarnessError
from fsdp_testing.plugin import pytest_compat

if TYPE_CHECKING:
    from fsdp_testing.base.env import Launch
    from fsdp_testing.plugin.leases import Leases

NAME = "fsdp_testing.launched"


class Launched:
    """Replaces the loop over tests in a serving process, and adds the hosts to the pool in the first process."""

    def __init__(self, config: pytest.Config, launch: Launch, leases: Leases) -> None:
        self._config = config
        self._launch = launch
        self._leases = leases
        self._open = contextlib.ExitStack()

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool | None:
        """Meet the other processes, unless no test will run."""
        if session.config.option.collectonly or session.testsfailed:
            return None
        from fsdp_testing.ranks.pool.serving import gathered, serve

        try:
            if self._launch.rank == 0:
                hosts = self._open.enter_context(gathered(self._launch, self._leases.start()))
                self._write(f"ranks: {hosts.describe()}")
                return None
            self._write("this process serves ranks to process 0, which reports")
            pytest_compat.drop_reports(self._config)
            serve(self._launch, self._leases.start())
        except HarnessError as error:
            raise pytest.UsageError(str(error)) from None
        return True

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, Any, Any]:
        """End the session after the test in which a host vanished, while there is time to report."""
        result = yield
        why = self._leases.start().given_up
        if why:
            item.session.shouldfail = f"no ranks any more: {why}"
        return result

    def pytest_unconfigure(self) -> None:
        """Release the other processes."""
        self._open.close()

    def _write(self, text: str) -> None:
        terminal: Any = self._config.pluginmanager.get_plugin("terminalreporter")
        if terminal is not None:
            terminal.write_line(text)
