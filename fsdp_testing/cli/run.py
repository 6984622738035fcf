"""`fsdp-verify run NAME...`: which claims of these implementations hold?"""

from __future__ import annotations

import argparse
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fsdp_testing import env
from fsdp_testing.cli.options import Subparsers, add_timeout, add_world_sizes, allowance
from fsdp_testing.errors import BackendUnavailable, InvalidArgument

if TYPE_CHECKING:
    from rich.console import Console

    from fsdp_testing.conformance import RunListener
    from fsdp_testing.records import CheckResult, RunReport

INTERRUPTED = 130

DESCRIPTION = """\
Compare implementations with a single-process oracle, check by check, and report what holds, what diverges, by how much
against which bound, and how to run it again.

NAME is a registered name (`fsdp-verify list implementations`) or an import string package.module:attribute.
"""


def add(commands: Subparsers[argparse.ArgumentParser]) -> argparse.ArgumentParser:
    """Declare the command."""
    command = commands.add_parser(
        "run",
        help="judge implementations",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    command.add_argument("names", nargs="*", metavar="NAME", help="implementations")
    command.add_argument("--all", action="store_true", help="every registered implementation")
    what = command.add_argument_group("what is run")
    add_world_sizes(what)
    what.add_argument("--backend", default="gloo", help="of the ranks: gloo (default), nccl or a registered one")
    what.add_argument(
        "--check",
        action="append",
        default=[],
        metavar="PATTERN",
        help="checks to run, by name, suite or pattern (`training`, `clipping.*`); repeatable",
    )
    what.add_argument("--extended", action="store_true", help="the extended profile too: more cases, more time")
    add_timeout(what, 60.0)
    what.add_argument(
        "--expected-failures",
        type=Path,
        metavar="FILE",
        help='TOML: one table per NAME, `"check" = "reason"` for each failure that is known',
    )
    what.add_argument(
        "--explain",
        type=allowance,
        default=10.0,
        metavar="SECONDS",
        help="spent on the failures of each implementation, to find the shortest schedules (default 10; 0: none)",
    )
    out = command.add_argument_group("what is written")
    out.add_argument("--html", type=Path, metavar="DIR", help="write DIR/index.html")
    out.add_argument("--json", type=Path, metavar="FILE", help="write the report as one JSON document")
    out.add_argument("--junit", type=Path, metavar="FILE", help="write JUnit XML")
    out.add_argument("--full", action="store_true", help="show complete tracebacks and every failing case")
    return command


def execute(options: argparse.Namespace) -> int:
    """Judge, print, write."""
    from fsdp_testing.report import report_exit_code
    from fsdp_testing.report.terminal import open_console, print_report

    refuse_torchrun()
    look_at_outputs(options)
    check_backend(options.backend, max(options.world_size))
    names = named(options)
    expected = expectations(options.expected_failures, names)
    console = open_console()
    report, interrupted = judged(names, expected, options, console)
    print_report(report, console, full=options.full)
    if interrupted:
        # A report of half a run must not replace one of a whole run.
        console.print("interrupted: this is what was known by then; no file was written", style="bold red")
        return INTERRUPTED
    write_outputs(report, options, console)
    return report_exit_code(report)


def refuse_torchrun() -> None:
    """Say plainly that ranks started by torchrun are not used yet, before each of them starts ranks of its own."""
    if env.torchrun() is not None:
        raise InvalidArgument(
            "run: expected a process of its own, got one of torchrun's (RANK and WORLD_SIZE are set). "
            "Start it without torchrun: ranks of a world are started by this command."
        )


def check_backend(name: str, size: int) -> None:
    """Refuse a backend that is not there, or cannot run so many ranks here, once instead of once per check.

    Raises:
        InvalidArgument: No such backend.
        BackendUnavailable: The one reason why it cannot run here.
    """
    from fsdp_testing.backends import backend_named

    reason = backend_named(name).unavailable(size)
    if reason:
        raise BackendUnavailable(f"--backend {name}: expected it to run {size} ranks here, got: {reason}")


def named(options: argparse.Namespace) -> tuple[str, ...]:
    """Return the implementations that are asked for."""
    from fsdp_testing.implementations import registry

    if options.all and options.names:
        raise InvalidArgument(f"run: expected names or --all, got both ({', '.join(options.names)}). Drop one of them.")
    return registry.names() if options.all else tuple(options.names)


def expectations(path: Path | None, names: tuple[str, ...]) -> dict[str, dict[str, str]]:
    """Expected failures of the implementations that are run; tables of others are left alone.

    Raises:
        InvalidArgument: The file cannot be read, or is not of the form that the help text shows.
    """
    if path is None:
        return {}
    try:
        document: dict[str, Any] = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InvalidArgument(
            f"--expected-failures: expected a TOML file, got {str(path)!r} ({error}). Mend it."
        ) from error
    wrong = [
        name
        for name, table in document.items()
        if not isinstance(table, dict) or not all(isinstance(reason, str) for reason in table.values())
    ]
    if wrong:
        raise InvalidArgument(
            f'--expected-failures: expected one table of `"check" = "reason"` per implementation, got {wrong} '
            f"in {str(path)!r}. Write [{wrong[0]}] and one line for each check."
        )
    return {name: document[name] for name in names if name in document}


def judged(
    names: tuple[str, ...], expected: dict[str, dict[str, str]], options: argparse.Namespace, console: Console
) -> tuple[RunReport, bool]:
    """Return the report, and whether the user interrupted the run before it was complete."""
    from fsdp_testing.conformance import environment, run_conformance
    from fsdp_testing.judging.case_runner import CaseRunner
    from fsdp_testing.records import RunReport
    from fsdp_testing.report.progress import ProgressListener

    with ProgressListener(console) as progress:
        seen = Recording(progress)
        try:
            report = run_conformance(
                *names,
                world_sizes=options.world_size,
                backend=options.backend,
                checks=tuple(options.check),
                expected_failures=expected,
                extended=options.extended,
                explain=options.explain,
                portraits=options.html is not None,
                listener=seen,
                runner=CaseRunner(timeout=options.timeout),
            )
        except KeyboardInterrupt:
            if not seen.results:
                raise
            return RunReport(tuple(seen.results), names, environment(), options.world_size, options.backend), True
    return report, False


class Recording:
    """Keeps the results that a run has reported, for the case that it does not come to its end."""

    def __init__(self, listener: RunListener) -> None:
        self.results: list[CheckResult] = []
        self._listener = listener

    def planned(self, total: int) -> None:
        """Pass it on."""
        self._listener.planned(total)

    def started(self, implementation: str, check: str) -> None:
        """Pass it on."""
        self._listener.started(implementation, check)

    def finished(self, result: CheckResult) -> None:
        """Keep it and pass it on."""
        self.results.append(result)
        self._listener.finished(result)


def look_at_outputs(options: argparse.Namespace) -> None:
    """Refuse before the run what could not be written after it."""
    from fsdp_testing.report import check_writable

    if options.html is not None:
        check_writable(options.html / "index.html", "--html")
    for option in ("json", "junit"):
        path = getattr(options, option)
        if path is not None:
            check_writable(path, f"--{option}")


def write_outputs(report: RunReport, options: argparse.Namespace, console: Console) -> None:
    """Write every file that was asked for and say where it is."""
    from fsdp_testing.report import write_html, write_json, write_junit

    written: list[Path] = []
    if options.html is not None:
        written.append(write_html(report, options.html))
    if options.json is not None:
        write_json(report, options.json)
        written.append(options.json)
    if options.junit is not None:
        write_junit(report, options.junit)
        written.append(options.junit)
    for path in written:
        console.print(f"written: {path}", markup=False, soft_wrap=True)
