"""`fsdp-verify run NAME...`: implementations, judged check by check."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fsdp_testing.cli.options import (
    Command,
    Subparsers,
    add_fault,
    add_jobs,
    add_tensor_parallel,
    add_timeout,
    add_world_sizes,
    allowance,
    capacity_here,
    declare,
    part,
    path_of,
)
from fsdp_testing.cli.outputs import add_html, add_json, checked_outputs, present
from fsdp_testing.errors import BackendUnavailable, InvalidArgument

if TYPE_CHECKING:
    from fsdp_testing.cases.records import RunReport
    from fsdp_testing.report.sheet import Section, Sheet
    from fsdp_testing.report.terminal import Output

INTERRUPTED = 130
PLAIN = (2,)
"""World sizes with tensor parallelism, or on backends whose ranks need devices; otherwise each check has its own."""
_BESIDE = "tensor_parallel"
"""Name of the table, inside that of an implementation, that applies with tensor parallelism."""

DESCRIPTION = """\
Compare implementations with a single-process oracle, check by check, and report what holds, what diverges, by how much
against which bound, and how to run it again.

NAME is a registered name (`fsdp-verify list implementations`) or an import string package.module:attribute.
"""
EXAMPLE = "fsdp-verify run torch-fsdp2 --check training --html report"


def add(commands: Subparsers[Command]) -> Command:
    """Declare the command."""
    command = declare(commands, "run", "judge implementations", DESCRIPTION, example=EXAMPLE)
    command.add_argument("names", nargs="*", metavar="NAME", help="implementations")
    command.add_argument("--all", action="store_true", help="every registered implementation")
    what = command.add_argument_group("what is run")
    add_world_sizes(what, "numbers of ranks (default: 2, also 3 where it matters, 4 for hybrid; --pairs 2,3,4)")
    add_tensor_parallel(what)
    what.add_argument("--backend", default="gloo", help="of the ranks: gloo (default), nccl or a registered one")
    what.add_argument(
        "--check",
        action="append",
        default=[],
        metavar="PATTERN",
        help="checks to run, by name, suite or pattern (`training`, `clipping.*`); repeatable",
    )
    what.add_argument(
        "--shard",
        type=part,
        default=(),
        metavar="I/N",
        help="the I-th of N parts of the checks, for `fsdp-verify merge`",
    )
    what.add_argument(
        "--pairs",
        action="store_true",
        help="in place of checks: cases that hold every pair of traits, on 2, 3 and 4 ranks; minutes",
    )
    what.add_argument("--state", type=path_of, metavar="DIR", help="state of --pairs; default: .fsdp-pairs/NAME")
    what.add_argument(
        "--extended", action="store_true", help="with --world-size: hybrid sharding too, if 4 is among them"
    )
    add_fault(what.add_argument, "into the ranks in each run of a case, and judge the result")
    add_timeout(what, 60.0)
    add_jobs(what, "checks")
    what.add_argument(
        "--expected-failures",
        type=path_of,
        metavar="FILE",
        help="TOML: known failures, a table for each NAME that says how and why a check fails, or a list of defects "
        "(docs/exit-codes.md); `shipped` is the list of fsdp-testing itself",
    )
    what.add_argument(
        "--explain",
        type=allowance,
        default=10.0,
        metavar="SECONDS",
        help="time for shortest schedules and causes, per implementation, on an idle machine (default 10; 0: none)",
    )
    add_report_outputs(command)
    return command


def add_report_outputs(command: Command) -> None:
    """Declare the forms of the report."""
    out = command.add_argument_group("output")
    add_html(out)
    add_json(out, "the report")
    out.add_argument("--junit", type=path_of, metavar="FILE", help="write JUnit XML")
    out.add_argument(
        "--compare",
        type=path_of,
        metavar="OLD.json",
        help="an earlier report: show which failures are new or gone, and the first date of the others",
    )
    out.add_argument("--full", action="store_true", help="show every check, and full details of failures")


def execute(options: argparse.Namespace) -> int:
    """Judge, print, write."""
    from fsdp_testing.ranks.pool import default_pool
    from fsdp_testing.report.terminal import open_console

    if options.pairs:
        from fsdp_testing.cli import pairs

        return pairs.execute(options)
    if options.state is not None:
        raise InvalidArgument(f"run: expected --state only with --pairs, got {str(options.state)!r}. Drop it.")
    if options.all and options.names:
        raise InvalidArgument(f"run: expected names or --all, got both ({', '.join(options.names)}). Drop one of them.")
    paths = checked_outputs(options)
    earlier = earlier_report(options)
    default_pool().start()  # torch is imported there and, with the registry, here: at the same time
    from fsdp_testing.adapters import registry
    from fsdp_testing.checks.conformance import select_checks
    from fsdp_testing.checks.suites.run import Where

    # An unknown check ends the run before any rank starts.
    chosen = select_checks(options.check, extended=options.extended or not options.world_size)
    options.world_size = options.world_size or _usual(options)
    largest = max(Where(options.world_size).sizes(*chosen))
    check_backend(options.backend, largest)
    names = registry.names() if options.all else tuple(options.names)
    expected = expectations(options.expected_failures, names, options.tensor_parallel)
    room = capacity_here(largest)
    # Where checks name the sizes, few of them need the largest world.
    options.jobs = room.jobs(options.jobs, None if options.world_size else capacity_here(min(PLAIN)).jobs(None))
    console = open_console()
    part_of = "part {} of {}; ".format(*options.shard) if options.shard else ""
    for name in unknown_tables(options.expected_failures, names):
        whose = f"--expected-failures: [{name}] is not an implementation of this run"
        console.say(f"{whose}, and none is registered under that name", style="bold yellow")
    if options.fault:
        console.say(f"injected into each run of a case: {', '.join(map(str, options.fault))}", style="bold yellow")
    console.say(f"{part_of}checks at a time: {room.said(options.jobs)}")
    report, interrupted = judged(names, expected, options, console)
    # A registered name is the adapter's own; an import string is not.
    own = {name: registry.adapter_of(name).name for name in report.implementations if ":" in name}
    injected = {"faults": ", ".join(map(str, options.fault))} if options.fault else {}
    report = replace(report, own_names=own, environment={**report.environment, **injected})
    if not interrupted:
        return present_report(report, options, console, paths, earlier)
    # A report of half a run must not replace one of a whole run.
    ending = "interrupted: these are the results so far; no file was written"
    sheet = replace(_sheet(report, options), exit_code=INTERRUPTED, conclusion=ending)
    return present(sheet, console, {}, {}, full=options.full)


def _usual(options: argparse.Namespace) -> tuple[int, ...] | None:
    """Return the default world sizes of a run; None for those of each check."""
    return None if options.backend == "gloo" and options.tensor_parallel == 1 else PLAIN


def earlier_report(options: argparse.Namespace) -> RunReport | None:
    """Return the report to compare the new one with, if one is named.

    Raises:
        InvalidArgument: It cannot be read.
    """
    if options.compare is None:
        return None
    from fsdp_testing.base.document import read_text
    from fsdp_testing.cases.records import RunReport

    text = read_text(options.compare, "an earlier report for --compare", "Give what `--json` wrote.")
    return RunReport.from_json(text, str(options.compare))


def present_report(
    report: RunReport,
    options: argparse.Namespace,
    console: Output,
    paths: Mapping[str, Path],
    earlier: RunReport | None = None,
) -> int:
    """Print a report, write it in the requested forms, and return its exit code."""
    from fsdp_testing.report.comparing import comparison, dated
    from fsdp_testing.report.conformance import complete_sheet
    from fsdp_testing.report.junit import junit_text

    report = dated(report, earlier) if earlier else report
    changes = [comparison(report, earlier, str(options.compare))] if earlier else []
    texts = {"--json": lambda: report.to_json(indent=1) + "\n", "--junit": lambda: junit_text(report)}
    sheet = _sheet(report, options, *changes)
    return present(sheet, console, paths, texts, page=lambda: complete_sheet(report, *changes), full=options.full)


def _sheet(report: RunReport, options: argparse.Namespace, *changes: Section) -> Sheet:
    from fsdp_testing.report.conformance import complete_sheet, short_sheet

    return complete_sheet(replace(report, own_names={}), *changes) if options.full else short_sheet(report, *changes)


def check_backend(name: str, size: int) -> None:
    """Refuse a backend that does not exist, or cannot run so many ranks here, once instead of once per check.

    Raises:
        InvalidArgument: No such backend.
        BackendUnavailable: The one reason why it cannot run here.
    """
    from fsdp_testing.base.backends import backend_named

    reason = backend_named(name).unavailable(size)
    if reason:
        raise BackendUnavailable(f"--backend {name}: expected it to run {size} ranks here, got: {reason}")


def expectations(path: Path | None, names: tuple[str, ...], tensor_parallel: int = 1) -> dict[str, dict[str, Any]]:
    """Expected failures of the implementations that are run; tables of others are ignored, unless they name no check.

    With tensor parallelism only the table `[NAME.tensor_parallel]` applies.

    A page that lies beside the list is named by its path, so that it can be opened from here.

    Raises:
        InvalidArgument: The file cannot be read, or is not of the form that the help text shows.
    """
    from fsdp_testing.checks.suites import CHECKS

    if path is None:
        return {}
    own, beside = tables(_document(path))
    listed = [*own.items(), *beside.items()]
    wrong = [f"[{name}]" for name, table in listed if not isinstance(table, dict)]
    # For the implementations of this run the judge reports these errors, together with all others.
    others = [(name, table) for name, table in listed if name not in names and isinstance(table, dict)]
    wrong += [f"[{name}] {check}" for name, table in others for check in table if check not in CHECKS]
    if wrong:
        raise InvalidArgument(
            f"--expected-failures: expected one table for each implementation, of checks with their entries, got "
            f'{", ".join(wrong)} in {str(path)!r}. Write [NAME] and `"check" = {{ reason = ..., kind = ... }}`; '
            "a run without the list prints the entries."
        )

    def from_here(entry: Any) -> Any:
        if isinstance(entry, list):
            return [from_here(item) for item in entry]
        if not isinstance(entry, dict) or not isinstance(entry.get("page"), str):
            return entry
        page = path.parent / entry["page"]
        return {**entry, "page": str(page)} if page.is_file() else entry

    return {
        name: {check: from_here(entry) for check, entry in table.items()}
        for name, table in (beside if tensor_parallel > 1 else own).items()
        if name in names
    }


def unknown_tables(path: Path | None, names: tuple[str, ...]) -> list[str]:
    """Tables of expected failures for implementations that are neither part of this run nor registered here.

    An import string may belong to another run.
    """
    from fsdp_testing.adapters import registry

    document = _document(path) if path is not None else {}
    return [name for name in document if name not in (*names, *registry.names()) and ":" not in name]


def _document(path: Path) -> dict[str, Any]:
    """The entries of a file by check, or those that follow from its list of defects."""
    from fsdp_testing.base.document import load_toml, read_text
    from fsdp_testing.checks.findings.known import is_list, read_list, shipped_text, tables_of

    shipped = path == Path("shipped") and not path.exists()
    text = shipped_text() if shipped else read_text(path, "a TOML file for --expected-failures", "Give another file.")
    document = load_toml(text, f"--expected-failures: {path}")
    return tables_of(read_list(document, str(path))) if is_list(document) else document


def tables(document: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the tables of expected failures by implementation: without tensor parallelism, and with it."""
    own, beside = dict(document), {}
    for name, table in document.items():
        if isinstance(table, dict) and _BESIDE in table:
            own[name] = {check: entry for check, entry in table.items() if check != _BESIDE}
            beside[name] = table[_BESIDE]
    return own, beside


def judged(
    names: tuple[str, ...], expected: dict[str, dict[str, Any]], options: argparse.Namespace, console: Output
) -> tuple[RunReport, bool]:
    """Return the report, and whether the user interrupted the run before it was complete."""
    from fsdp_testing.cases.records import RunReport
    from fsdp_testing.checks.conformance import environment, run_conformance
    from fsdp_testing.judging.case_runner import CaseRunner
    from fsdp_testing.report.progress import ProgressListener

    with ProgressListener(console) as progress:
        try:
            report = run_conformance(
                *names,
                world_sizes=options.world_size,
                tensor_parallel=options.tensor_parallel,
                backend=options.backend,
                checks=tuple(options.check),
                expected_failures=expected,
                shard=options.shard,
                extended=options.extended,
                # An injected failure has no other cause.
                explain=0.0 if options.fault else options.explain,
                portraits=options.html is not None,
                listener=progress,
                runner=CaseRunner(timeout=options.timeout, faults=options.fault),
                jobs=options.jobs,
            )
        except KeyboardInterrupt:
            if not progress.results:
                raise
            results = tuple(progress.results)
            sizes = tuple(sorted({case.world_size for result in results for case in result.cases}))
            known = RunReport(results, names, environment(), sizes, options.backend)
            return replace(known, tensor_parallel=options.tensor_parallel), True
    return report, False
