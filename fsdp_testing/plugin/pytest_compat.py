"""The private names of pytest that the plugin needs, used in this file alone.

Ranks run pytest's own sessions without `pytest.main`, item by item and file by file, for which pytest has no public way.
Each function says what it does that pytest does not offer. `tox -e oldest-pytest` runs the plugin's tests on the oldest
release that `pyproject.toml` admits, the other environments on the newest.
"""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import pytest

from fsdp_testing.base import env


def parsed_config(options: Mapping[str, Any], args: Sequence[str]) -> pytest.Config:
    """Return a configuration of `options` and command-line `args`, not yet configured."""
    return pytest.Config.fromdictargs(dict(options), list(args))


class _PlainWriter:
    """Stands for the terminal, which ranks do not have: early releases colour compared values through it."""

    def _highlight(self, source: str, lexer: str = "python") -> str:
        del lexer
        return source


def configured_session(config: pytest.Config) -> Any:
    """Configure pytest's plugins and return a session on which none of the start hooks has run."""
    setattr(config, "get_terminal_writer", _PlainWriter)  # noqa: B010 - a method, which mypy does not let code assign
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
    # pytest's own part of the hook: other plugins have run theirs, and capturing must not start twice.
    others = [plugin for plugin in manager.get_plugins() if plugin is not config]
    load = manager.subset_hook_caller("pytest_load_initial_conftests", remove_plugins=others)
    # Only these conftest files may declare pytest_plugins; pytest takes any file loaded after configuring for a later one.
    manager._configured = False
    try:
        load(early_config=config, args=list(paths), parser=config._parser)
    finally:
        manager._configured = True


def attach_log_handlers_once(config: pytest.Config) -> None:
    """In this process, for good, let pytest's log capture reach loggers that do not propagate, through one lasting handler.

    Since 9.1 pytest adds two handlers to each of them in each phase of a test. torch has some forty, and every rank pays
    for each of its tests: a quarter of what a small test costs.
    """
    module: Any = config.pluginmanager.get_plugin("logging")
    original: Any = getattr(module, "catching_logs", None)
    if not hasattr(original, "attached_loggers") or issubclass(original, _Capture):
        return

    class CatchingLogs(_Capture, original):  # type: ignore[misc]  # a class known at run time only
        __slots__ = ()

    module.catching_logs = CatchingLogs


class _Relay(logging.Handler):
    """Passes the records of a logger that does not propagate to the current capture handlers."""

    capturing: ClassVar[list[logging.Handler]] = []
    of: ClassVar[dict[logging.Logger, _Relay]] = {}

    def __init__(self, logger: logging.Logger) -> None:
        super().__init__()
        self._logger = logger

    def handle(
        self, record: logging.LogRecord
    ) -> bool:  # not emit: each of the others has a lock and filters of its own
        for handler in () if self._logger.propagate else self.capturing:
            if record.levelno >= handler.level:
                handler.handle(record)
        return True


class _Capture:
    """Enters and leaves as pytest's own class does, except for loggers that a relay serves."""

    __slots__ = ()  # its attributes are those of pytest's class

    def __enter__(self: Any) -> logging.Handler:
        root = logging.root
        if not _Relay.capturing:
            known: list[Any] = list(root.manager.loggerDict.values())
            for logger in [one for one in known if type(one) is not logging.PlaceHolder and not one.propagate]:
                relay = _Relay.of.get(logger) or _Relay.of.setdefault(logger, _Relay(logger))
                if relay not in logger.handlers:
                    logger.addHandler(relay)
        if self.level is not None:
            self.handler.setLevel(self.level)
            self.orig_level = root.level
            root.setLevel(min(self.orig_level, self.level))
        root.addHandler(self.handler)
        _Relay.capturing.append(self.handler)
        return self.handler

    def __exit__(self: Any, *exception: object) -> None:
        if self.level is not None:
            logging.root.setLevel(self.orig_level)
        logging.root.removeHandler(self.handler)
        _Relay.capturing.remove(self.handler)


class _Waiting(dict[Path, object]):
    """Conftest modules by directory; each is taken out when its directory is collected, and only then."""

    def clear(self) -> None:
        """Keep the rest: in a rank collection does not end with the first file."""


def remember_conftests(session: Any) -> None:
    """Let pytest find the fixtures of directories that are collected later.

    Since 9.1 it reads the fixtures of conftest files that were loaded first when their directories are collected, and
    forgets those of other directories as soon as one collection ends; a rank collects file by file.
    """
    manager = session._fixturemanager
    if hasattr(manager, "_pending_conftests"):
        manager._pending_conftests = _Waiting(manager._pending_conftests)


def end_fixtures(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """End the fixtures of `item` that `nextitem` does not share, as its teardown would, but later.

    No private name, but private knowledge: which plugin ends fixtures, and which one sets hooks of the interpreter around
    every phase of a test (before 8.4), which longer-lived fixtures have seen since their setup.
    """
    manager = item.config.pluginmanager
    parts = [manager.get_plugin(name) for name in ("runner", "unraisableexception", "threadexception")]
    others = [plugin for plugin in manager.get_plugins() if plugin not in parts]
    manager.subset_hook_caller("pytest_runtest_teardown", remove_plugins=others)(item=item, nextitem=nextitem)


@contextmanager
def own_notes(item: pytest.Item, location: tuple[str, int | None, str] | None) -> Iterator[None]:
    """Run an item without keeping the run's data in it: items live as long as the session, and so would the data of every test.

    The item gets its `location` from the controller, instead of reading it from code objects and files.
    It is assigned, not put into the item's dictionary: Python allocates some hundred bytes on the first access to that.
    """
    storage = item.stash._storage
    before = dict(storage)
    if location is not None:
        item.location = location
    try:
        yield
    finally:
        storage.clear()
        storage.update(before)
        if location is not None:
            del item.location


def name_current_test_in_place(config: pytest.Config) -> None:
    """In this process, for good, let pytest set `PYTEST_CURRENT_TEST` to the running test without leaking a copy of each text."""
    module: Any = config.pluginmanager.get_plugin("runner")

    def update(item: pytest.Item, when: str | None) -> None:
        text = None if when is None else f"{item.nodeid} ({when})".replace("\x00", "(null)")
        env.set_in_place("PYTEST_CURRENT_TEST", text)

    module._update_current_test_var = update


def new_directory(config: pytest.Config, prefix: str) -> Path:
    """Make a directory in pytest's base for temporary files, for which pytest gives its factory to fixtures only."""
    factory: pytest.TempPathFactory | None = getattr(config, "_tmp_path_factory", None)
    if factory is not None:
        return factory.mktemp(prefix, numbered=True)
    made = Path(tempfile.mkdtemp(prefix=prefix))  # under `-p no:tmpdir`
    config.add_cleanup(partial(shutil.rmtree, made, ignore_errors=True))
    return made


def draws_alike_everywhere(function: Callable[..., Any]) -> bool:
    """Return whether a Hypothesis test is derandomized; Hypothesis promises no name for it, so without it: no."""
    settings = getattr(function, "_hypothesis_internal_use_settings", None)
    return bool(getattr(settings, "derandomize", False))


def drop_reports(config: pytest.Config) -> None:
    """Keep this process from writing reports: another one with the same arguments writes the same files."""
    for plugin in config.pluginmanager.get_plugins():
        if type(plugin).__name__ == "LogXML":
            setattr(plugin, "logfile", os.devnull)  # noqa: B010 - of a private class
    for name in ("lfplugin", "nfplugin", "stepwiseplugin"):
        if config.pluginmanager.has_plugin(name):
            config.pluginmanager.unregister(name=name)
