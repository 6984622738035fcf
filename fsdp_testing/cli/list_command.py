"""`fsdp-verify list`: implementations, checks, capabilities, models and backends."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Iterator

from fsdp_testing.cases.records import CAPABILITIES
from fsdp_testing.cli.options import Command, Subparsers, declare
from fsdp_testing.errors import HarnessError

KINDS = ("implementations", "checks", "capabilities", "models", "backends")


def add(commands: Subparsers[Command]) -> Command:
    """Declare the command."""
    command = declare(
        commands,
        "list",
        "implementations, checks, capabilities, models, backends",
        "List what can be named on the command line: names alone, or all that is known of one KIND.",
    )
    command.add_argument("kind", nargs="?", choices=KINDS, metavar="KIND", help=", ".join(KINDS))
    command.add_argument("--all", action="store_true", help="all that is known of every kind")
    return command


def execute(options: argparse.Namespace) -> int:
    """Print the lists."""
    from rich.table import Table
    from rich.text import Text

    from fsdp_testing.report.terminal import open_console

    console = open_console()
    at_length = options.all or options.kind
    for kind in [options.kind] if options.kind else KINDS:
        console.print(Text(kind, style="bold"))
        table = Table.grid(padding=(0, 2))
        table.add_column(no_wrap=True)
        table.add_column(overflow="fold")
        for name, account in LISTS[kind]() if at_length else _names(kind):
            table.add_row(Text(f"  {name}"), Text(account))
        console.print(table)
    if not at_length:
        console.say("`fsdp-verify list KIND` says what each is, `fsdp-verify list --all` of all kinds", style="dim")
    return 0


def _names(kind: str) -> Iterator[tuple[str, str]]:
    """Names that belong together in one line: checks by suite; of implementations and backends what is account of them."""
    from fsdp_testing.report.summary import suite_of

    listed = list(LISTS[kind]())
    if kind == "implementations":
        yield from ((name, account.partition("; claims ")[0]) for name, account in listed)
    elif kind == "checks":
        suites: dict[str, list[str]] = {}
        for name, _ in listed:
            suites.setdefault(suite_of(name), []).append(name.partition(".")[2])
        yield from ((suite, ", ".join(names)) for suite, names in suites.items())
    elif kind == "backends":
        yield from listed
    else:
        yield "", ", ".join(name for name, _ in listed)


def _implementations() -> Iterator[tuple[str, str]]:
    from fsdp_testing.adapters import registry

    for name, claims in sorted(registry.registrations().items()):
        if len(claims) > 1:
            origins = ", ".join(claim.origin for claim in claims)
            yield name, f"registered by several distributions: {origins}"
            continue
        try:
            adapter = registry.load(name)
        except HarnessError as error:
            yield name, f"cannot be used: {error}"
        else:
            yield name, f"{claims[0].origin}; claims {', '.join(sorted(adapter.capabilities))}"


def _checks() -> Iterator[tuple[str, str]]:
    from fsdp_testing.checks.suites import CHECKS

    for check in CHECKS.values():
        needs = f"; needs {', '.join(sorted(check.needs))}" if check.needs else ""
        profile = "" if check.profile == "default" else f"; {check.profile} profile"
        yield check.name, f"{check.meaning}{needs}{profile} ({check.source})"


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


LISTS: dict[str, Callable[[], Iterable[tuple[str, str]]]] = {
    "implementations": _implementations,
    "checks": _checks,
    "capabilities": CAPABILITIES.items,
    "models": _models,
    "backends": _backends,
}
