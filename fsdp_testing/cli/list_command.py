"""`fsdp-verify list`: implementations, checks, capabilities, models and backends."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from importlib import resources

from fsdp_testing.cases.records import CAPABILITIES
from fsdp_testing.cli.options import Command, Subparsers, declare
from fsdp_testing.errors import HarnessError

KINDS = ("implementations", "checks", "capabilities", "models", "backends")


def add(commands: Subparsers[Command]) -> Command:
    """Declare the command."""
    command = declare(
        commands,
        "list",
        "list implementations, checks, capabilities, models, backends",
        "List the names that the command line takes: names alone, or details of one KIND.",
        example="fsdp-verify list checks",
    )
    command.add_argument("kind", nargs="?", choices=KINDS, metavar="KIND", help=", ".join(KINDS))
    command.add_argument("--all", action="store_true", help="details of every kind")
    return command


def execute(options: argparse.Namespace) -> int:
    """Print the lists as tables."""
    from fsdp_testing.report.sheet import Cell, Row, RowGroup, Sheet, Table
    from fsdp_testing.report.terminal import open_console, print_sheet

    console = open_console()
    at_length = options.all or options.kind
    tables = []
    for kind in [options.kind] if options.kind else KINDS:
        columns, rows_of = (LISTS if at_length else SHORT)[kind]
        rows = tuple(Row(f"  {name}", tuple(map(Cell, cells))) for name, *cells in rows_of())
        tables.append(Table(kind, columns, (RowGroup(rows),)))
    print_sheet(Sheet("", 0, "", lead=tuple(tables)), console)
    if not at_length:
        console.say("`fsdp-verify list KIND` says what each is, `fsdp-verify list --all` of all kinds", style="dim")
    return 0


def _short_implementations() -> Iterator[tuple[str, str]]:
    from fsdp_testing.adapters.registrations import registrations

    yield from ((name, claims[0].origin) for name, claims in sorted(registrations().items()))


def _short(kind: str) -> Iterator[tuple[str, str]]:
    """Yield names in rows; related names share a row. Does not import torch, which takes seconds."""
    names = json.loads((resources.files("fsdp_testing.cli") / "names.json").read_text(encoding="utf-8"))
    if kind == "checks":
        yield from ((suite, ", ".join(checks)) for suite, checks in names["checks"].items())
    else:
        yield "", ", ".join(names[kind] if kind == "models" else CAPABILITIES)


def _short_backends() -> Iterator[tuple[str, str]]:
    from fsdp_testing.base.backends import registered_backends

    yield "", ", ".join(registered_backends())


def _implementations() -> Iterator[tuple[str, ...]]:
    from fsdp_testing.adapters import registry

    for name, claims in sorted(registry.registrations().items()):
        if len(claims) > 1:
            origins = ", ".join(claim.origin for claim in claims)
            yield name, f"registered by several distributions: {origins}", ""
            continue
        try:
            adapter = registry.load(name)
        except HarnessError as error:
            yield name, claims[0].origin, f"cannot be used: {error}"
        else:
            yield name, claims[0].origin, ", ".join(sorted(adapter.capabilities))


def _checks() -> Iterator[tuple[str, ...]]:
    from fsdp_testing.checks.suites import CHECKS

    for check in CHECKS.values():
        profile = "" if check.profile == "default" else f"; {check.profile} profile"
        yield check.name, f"{check.meaning}{profile} ({check.source})", ", ".join(sorted(check.needs))


def _models() -> Iterator[tuple[str, str]]:
    from fsdp_testing.cases.models import MODELS

    yield from ((name, model.summary) for name, model in MODELS.items())


def _backends() -> Iterator[tuple[str, str]]:
    from fsdp_testing.base.backends import backend_named, registered_backends

    for name in registered_backends():
        try:
            backend = backend_named(name)
        except HarnessError as error:
            yield name, f"cannot be used: {error}"
            continue
        reason = backend.unavailable(2)
        yield name, f"unavailable: {reason}" if reason else f"on {backend.device_type}"


Rows = Callable[[], Iterable[tuple[str, ...]]]

LISTS: dict[str, tuple[tuple[str, ...], Rows]] = {
    "implementations": (("registered by", "claims"), _implementations),
    "checks": (("claim", "needs"), _checks),
    "capabilities": (("meaning",), CAPABILITIES.items),
    "models": (("trait",), _models),
    "backends": (("here",), _backends),
}
"""The columns and the rows of each kind's table."""
SHORT: dict[str, tuple[tuple[str, ...], Rows]] = {
    "implementations": (("registered by",), _short_implementations),
    "checks": (("names",), partial(_short, "checks")),
    "capabilities": (("names",), partial(_short, "capabilities")),
    "models": (("names",), partial(_short, "models")),
    "backends": (("names",), _short_backends),
}
"""The same, names alone."""
