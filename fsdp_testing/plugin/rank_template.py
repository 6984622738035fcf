"""A pytest session that the fork server makes once, and that every new rank inherits.

Starting pytest is about a third of what a test in new processes costs; a fork has it for nothing (eight tests on two new
ranks each: 6.5 s of processor time with it, 7.3 s without; one test alone costs the same either way). The session made
ahead holds only pytest's own plugins: the rank imports the user's modules (conftest files, plugins), since the fork
server runs no code that might compute or start threads. A rank with a different session, or whose fork server could
not make one, makes its own by the same function.
"""

from __future__ import annotations

import base64
import importlib
import os
import pickle
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from fsdp_testing.base import env
from fsdp_testing.plugin import pytest_compat
from fsdp_testing.plugin.records import SessionSpec


class Started:
    """A configured session that has not yet loaded any of the user's code."""

    def __init__(self, spec: SessionSpec) -> None:
        self.spec = spec
        with warnings.catch_warnings():
            self.config = _configured(spec)
            pytest_compat.attach_log_handlers_once(self.config)
            pytest_compat.name_current_test_in_place(self.config)
            self.session = pytest_compat.configured_session(self.config)
            self.config.hook.pytest_sessionstart(session=self.session)
            self._filters = list(warnings.filters)

    @contextmanager
    def filters(self) -> Iterator[None]:
        """Use pytest's warning filters while its session works in this process.

        pytest sets them once for the whole process. A rank also serves callers without pytest, which get the same filters on
        every rank, whatever ran there before.
        """
        with warnings.catch_warnings():
            warnings.simplefilter("default")  # the module notices only changes made through its functions
            warnings.filters[:] = self._filters  # type: ignore[index]  # typeshed calls the list a Sequence
            yield

    def load_users_code(self) -> None:
        """Import and register the controller's plugins, then the first conftest files."""
        manager = self.config.pluginmanager
        present = manager.get_plugins()
        for name, module in self.spec.plugins:
            if not manager.has_plugin(name) and not manager.is_blocked(name):
                plugin = importlib.import_module(module)
                if not manager.is_registered(plugin):
                    manager.register(plugin, name)
        pytest_compat.load_first_conftests(self.config, self.spec.paths)
        start = manager.subset_hook_caller("pytest_sessionstart", remove_plugins=present)
        start(session=self.session)


def _configured(spec: SessionSpec) -> pytest.Config:
    """Return a parsed configuration equal to the controller's, with pytest's own plugins."""
    options = dict(spec.options)
    # Name a file, or pytest looks for one around the paths; the controller found none.
    options.update(inifilename=spec.inifile or os.devnull, rootdir=spec.root, plugins=[], basetemp=None)
    args = [argument for name in spec.blocked for argument in ("-p", f"no:{name}")]
    # Neither entry points nor variables: the controller has named what it loaded.
    quiet = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_ADDOPTS": None, "PYTEST_PLUGINS": None}
    with env.temporary(quiet):
        config = pytest_compat.parsed_config(options, [*args, spec.empty])
    known = set(config.getini("markers"))
    for line in spec.markers:
        if line not in known:
            config.addinivalue_line("markers", line)
    return config


_ahead: dict[bytes, Started] = {}


def encode(spec: bytes) -> str:
    """Return a serialised description as text."""
    return base64.b64encode(spec).decode("ascii")


def prepare(text: str) -> None:
    """Make the session of the description `text`; called in the fork server before its first fork."""
    spec = base64.b64decode(text)
    _ahead[spec] = Started(pickle.loads(spec))


def take(spec: bytes) -> Started:
    """Return the session made ahead, or a new one."""
    made = _ahead.pop(spec, None)
    return Started(pickle.loads(spec)) if made is None else made
