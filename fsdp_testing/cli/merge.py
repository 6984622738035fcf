"""`fsdp-verify merge PART...`: the parts of a run, a certificate, or a campaign of the fuzzer, put together."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from fsdp_testing.cli.options import Command, Subparsers, declare, path_of
from fsdp_testing.cli.outputs import checked_outputs, present
from fsdp_testing.cli.run import add_report_outputs, earlier_report, present_report
from fsdp_testing.errors import InvalidArgument

if TYPE_CHECKING:
    from fsdp_testing.report.terminal import Output

DESCRIPTION = """\
Combine the JSON reports of `fsdp-verify run ... --shard 1/N` to `N/N` into one report with one exit code. Certificates of
`fsdp-verify certify` combine in the same way. To combine campaigns of `fsdp-verify fuzz`, give their --state directories and
a new one with --state: it lists each finding once, and the campaign can continue there. Missing parts, duplicates and parts
of different runs are refused.
"""
EXAMPLE = "fsdp-verify merge part-1.json part-2.json --html report"


def add(commands: Subparsers[Command]) -> Command:
    """Declare the command."""
    command = declare(commands, "merge", "combine the parts of a divided run", DESCRIPTION, example=EXAMPLE)
    command.add_argument(
        "reports",
        nargs="+",
        type=path_of,
        metavar="PART",
        help="a file of `run` or `certify --shard --json`, or a directory of `fuzz --shard --state`",
    )
    command.add_argument(
        "--state", type=path_of, metavar="DIR", help="for campaigns: a new directory for the combined one"
    )
    add_report_outputs(command)
    return command


def execute(options: argparse.Namespace) -> int:
    """Read, merge, print, write."""
    from fsdp_testing.cases.records import RunReport
    from fsdp_testing.report.merging import merged
    from fsdp_testing.report.terminal import open_console

    paths = checked_outputs(options)
    repeated = sorted({str(path) for path in options.reports if options.reports.count(path) > 1})
    if repeated:
        raise InvalidArgument(f"merge: expected each report once, got {', '.join(repeated)} more than once. Drop one.")
    if options.state is not None or all(path.is_dir() for path in options.reports):
        return _campaigns(options, paths, open_console())
    texts = {}
    for path in options.reports:
        try:
            texts[str(path)] = path.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise InvalidArgument(
                f"merge: expected a report, got {str(path)!r} ({error}). Give what `--json` wrote."
            ) from error
    if any(_is_certificate(text, path) for path, text in texts.items()):
        return _certificates(texts, paths, options)
    reports = {path: RunReport.from_json(text, path) for path, text in texts.items()}
    return present_report(merged(reports), options, open_console(), paths, earlier_report(options))


def _is_certificate(text: str, path: str) -> bool:
    from fsdp_testing.base.document import load_json

    data = load_json(text, path)
    return isinstance(data, dict) and data.get("format") == "fsdp_testing/certificate"


def _certificates(texts: dict[str, str], paths: dict[str, Path], options: argparse.Namespace) -> int:
    from fsdp_testing.report.terminal import open_console
    from fsdp_testing.search.certificate.sheet import certificate_sheet
    from fsdp_testing.search.certificate.summary import read_summary
    from fsdp_testing.search.merging import merge_certificates

    unwanted = [
        name
        for name, given in (("--junit", options.junit), ("--compare", options.compare), ("--full", options.full))
        if given
    ]
    if unwanted:
        raise InvalidArgument(f"merge: expected --html or --json for certificates, got {', '.join(unwanted)}. Drop it.")
    summary = merge_certificates({path: read_summary(text, path) for path, text in texts.items()})
    return present(certificate_sheet(summary), open_console(), paths, {"--json": lambda: summary.to_json() + "\n"})


def _campaigns(options: argparse.Namespace, paths: dict[str, Path], console: Output) -> int:
    from fsdp_testing.cases.records import Verdict
    from fsdp_testing.report.sheet import Sheet, numbered
    from fsdp_testing.search.merging import merge_campaigns

    unwanted = [*paths, *(["--full"] if options.full else []), *(["--compare"] if options.compare else [])]
    if options.state is None or unwanted:
        raise InvalidArgument(
            f"merge: expected only --state DIR to merge campaigns of `fuzz`, got {', '.join(unwanted) or 'no --state'}. "
            "Other options are for reports of `run`."
        )
    merged = merge_campaigns(options.reports, options.state)
    for discovery in merged.discoveries:
        console.say(discovery.sentence())
    whole, counts = merged.state, merged.state.counts()
    others = ((Verdict.FAIL, "failed"), (Verdict.UNKNOWN, "without a verdict"))
    text = "".join(f"{numbered(counts[verdict], 'case')} {word}; " for verdict, word in others if counts[verdict])
    text += (
        f"{numbered(counts.total(), 'case')} in {whole.seconds:.1f} s of all parts; "
        f"{numbered(len(merged.discoveries), 'finding')}, found again in other parts {numbered(merged.repeated, 'time')}; "
        f"{numbered(len(whole.unfinished), 'case')} left for the next campaign; state in {options.state}"
    )
    return present(Sheet("Campaign", merged.exit_code, text), console, {}, {})
