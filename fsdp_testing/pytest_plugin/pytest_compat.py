"""Which private names of pytest does the plugin need? These, used in this file alone.

Ranks run pytest's own sessions without `pytest.main`, item by item and file by file, for which pytest has no public way.
Each function says what it does that pytest does not offer. `tox -e oldest-pytest` runs the plugin's tests on the oldest
release that `pyproject.toml` admits, the other environments on the newest.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest


def parsed_config(options: Mapping[str, Any], args: Sequence[str]) -> pytest.Config:
    """Return a configuration of `options` and command-line `args`, not yet configured."""
    return pytest.Config.fromdictargs(dict(options), list(args))


class _PlainWriter:
    """Stands for the terminal, which ranks do not have: the first releases colour compared values through it."""

    def _highlight(self, source: str, lexer: str = "python") -> str:
        del lexer
        return source


def configured_session(config: pytest.Config) -> Any:
    """Configure pytest's plugins and return a session on which none of the start hooks has run."""
    setattr(config, "get_terminal_writer", _PlainWriter)  # noqa: B010 - a method, which mypy lets nobody assign
    session: Any = pytest.Session.from_config(config)
    config._do_configure()
    session.exitstatus = 0
    return session


def unconfigure(config: pytest.Config) -> None:
    """End what `configured_session` began."""
    config._ensure_unconfigure()


def load_first_conftests(config: pytest.Config, paths: Sequence[str]) -> None:
    """Load the conftest files that belong to the arguments `paths`, in a session that is configured already."""
    manager: Any = config.pluginmanager
    config.known_args_namespace.file_or_dir = list(paths)
    # pytest's own part of the hook: the others have had it, and capturing must not start twice.
    others = [plugin for plugin in manager.get_plugins() if plugin is not config]
    load = manager.subset_hook_caller("pytest_load_initial_conftests", remove_plugins=others)
    # Only these conftest files may declare pytest_plugins; pytest takes any that comes after configuring for a later one.
    manager._configured = False
    try:
        load(early_config=config, args=list(paths), parser=config._parser)
    finally:
        manager._configured = True


class _Waiting(dict[Path, object]):
    """Conftest modules by directory; each is taken out when its directory is collected, and only then."""

    def clear(self) -> None:
        """Keep the rest: here collecting does not end with the first file."""


def remember_conftests(session: Any) -> None:
    """Let pytest find the fixtures of directories that are collected later.

    Since 9.1 it reads the fixtures of conftest files that were loaded first when their directories are collected, and
    forgets those of other directories as soon as one collection ends; a rank collects file by file.
    """
    manager = session._fixturemanager
    if hasattr(manager, "_pending_conftests"):
        manager._pending_conftests = _Waiting(manager._pending_conftests)


def end_fixtures(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """End the fixtures of `item` that `nextitem` does not share, as its teardown would, but later than that.

    No private name, but private knowledge: who ends fixtures, and who sets hooks of the interpreter around every phase of
    a test (before 8.4), which fixtures of longer life have seen since they were set up.
    """
    manager = item.config.pluginmanager
    parts = [manager.get_plugin(name) for name in ("runner", "unraisableexception", "threadexception")]
    others = [plugin for plugin in manager.get_plugins() if plugin not in parts]
    manager.subset_hook_caller("pytest_runtest_teardown", remove_plugins=others)(item=item, nextitem=nextitem)


def new_directory(config: pytest.Config, prefix: str) -> Path:
    """Make a directory in pytest's base for temporary files, for which pytest gives its factory to fixtures only."""
    factory: pytest.TempPathFactory = config._tmp_path_factory  # type: ignore[attr-defined]  # set by pytest's tmpdir plugin
    return factory.mktemp(prefix, numbered=True)


def draws_alike_everywhere(function: Callable[..., Any]) -> bool:
    """Return whether a Hypothesis test is derandomized; Hypothesis promises no name for it, so without it: no."""
    settings = getattr(function, "_hypothesis_internal_use_settings", None)
    return bool(getattr(settings, "derandomize", False))


def drop_reports(config: pytest.Config) -> None:
    """Have this process write no report: another one with the same arguments writes the same files."""
    for plugin in config.pluginmanager.get_plugins():
        if type(plugin).__name__ == "LogXML":
            setattr(plugin, "logfile", os.devnull)  # noqa: B010 - of a private class
    for name in ("lfplugin", "nfplugin", "stepwiseplugin"):
        if config.pluginmanager.has_plugin(name):
            config.pluginmanager.unregister(name=name)
