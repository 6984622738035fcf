"""What a rank needs to start the controller's pytest session again; made once from the controller's config."""

from __future__ import annotations

import os
import types
from pathlib import Path
from typing import Any

import pytest

from fsdp_testing.plugin.records import SessionSpec

# Plugins that make no sense in a rank, by name as registered, and why.
NOT_IN_RANKS = {
    "terminal": "a rank has no terminal",
    "terminalprogress": "a rank has no terminal",
    "cacheprovider": "the controller alone knows which tests failed last",
    "stepwise": "as above",
    "pastebin": "reports are the controller's",
    "junitxml_report": "reports are the controller's",
    "setuponly": "shows fixtures in the terminal",
    "setupplan": "shows fixtures in the terminal",
    "faulthandler": "the pool takes the stacks of ranks",
    "fsdp_testing": "the rank has its own half of this plugin",
    "xdist": "a rank distributes nothing",
    "xdist.looponfail": "a rank distributes nothing",
    "pytest_cov": "the pool measures ranks when the controller is measured",
    "timeout": "the pool watches the deadline; pytest-timeout would measure the controller's and the rank's time",
    "rerunfailures": "reruns are the controller's",
    "html": "reports are the controller's",
    "json-report": "reports are the controller's",
    "metadata": "reports are the controller's",
    "sugar": "a rank has no terminal",
    "instafail": "a rank has no terminal",
    "benchmark": "times in ranks include waiting for one another",
}

# Options that would make a rank select tests, write files or read the terminal.
_NEUTRAL: dict[str, Any] = {
    "capture": "no",
    "usepdb": False,
    "trace": False,
    "keyword": "",
    "markexpr": "",
    "deselect": None,
    "maxfail": 0,
    "collectonly": False,
    "setuponly": False,
    "setupshow": False,
    "setupplan": False,
    "pyargs": False,
    "keepduplicates": False,
    "xmlpath": None,
    "durations": None,
    "debug": None,
    "log_file": os.devnull,
    "reportchars": "",
    "continue_on_collection_errors": False,
    "numprocesses": None,
    "dist": "no",
}


def session_spec(config: pytest.Config, empty: str) -> SessionSpec:
    """Describe `config` for ranks; `empty` is an empty directory."""
    off = {*NOT_IN_RANKS, *config.getini("world_rank_plugins_off")}
    options = {name: value for name, value in vars(config.option).items() if _is_plain(value)}
    options = {name: str(value) if isinstance(value, Path) else value for name, value in options.items()}
    options.update(_NEUTRAL)
    if options.get("confcutdir") is None:
        options["confcutdir"] = str(config.rootpath if config.inipath is None else config.inipath.parent)
    # argparse warns about positional arguments that are there before it parses.
    options.pop("file_or_dir", None)
    plugins, blocked = _plugins(config, off)
    given = [config.invocation_params.dir / arg.partition("::")[0].partition("[")[0] for arg in config.args]
    return SessionSpec(
        root=str(config.rootpath),
        inifile=None if config.inipath is None else str(config.inipath),
        directory=str(config.invocation_params.dir),
        paths=tuple(str(path) if path.exists() else str(config.rootpath) for path in given),
        options=options,
        plugins=plugins,
        blocked=blocked,
        markers=tuple(config.getini("markers")),
        empty=empty,
    )


def _plugins(config: pytest.Config, off: set[str]) -> tuple[tuple[tuple[str, str], ...], tuple[str, ...]]:
    loaded: list[tuple[str, str]] = []
    blocked = dict.fromkeys(name for name in NOT_IN_RANKS if name != "fsdp_testing")
    for name, plugin in config.pluginmanager.list_name_plugin():
        if plugin is None:
            blocked[name.removeprefix("pytest_")] = None
        elif isinstance(plugin, types.ModuleType) and _belongs_in_ranks(name, plugin, off):
            loaded.append((name, plugin.__name__))
    return tuple(loaded), tuple(blocked)


def _belongs_in_ranks(name: str, plugin: types.ModuleType, off: set[str]) -> bool:
    module = plugin.__name__
    if name in off or module in off or module.startswith(("_pytest.", "fsdp_testing.")):
        return False
    # the rank loads conftest files itself, at their place in the tree.
    return Path(getattr(plugin, "__file__", None) or "").name != "conftest.py"


def _is_plain(value: Any) -> bool:
    if value is None or isinstance(value, bool | int | float | str | Path):
        return True
    if isinstance(value, list | tuple | set):
        return all(_is_plain(entry) for entry in value)
    if isinstance(value, dict):
        return all(_is_plain(entry) for pair in value.items() for entry in pair)
    return False
