"""The end of every command: print its sheet, write and name its files, and give the exit code in the last line."""

from __future__ import annotations

import argparse
import io
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from fsdp_testing.base import extras
from fsdp_testing.cli.options import path_of
from fsdp_testing.errors import InvalidArgument

if TYPE_CHECKING:
    from fsdp_testing.report.sheet import Sheet
    from fsdp_testing.report.terminal import Output

_SUMMARY_LENGTH = 500_000
"""GitHub does not show a step summary above 1 MiB."""


def add_html(group: argparse._ActionsContainer) -> argparse.Action:
    """Declare `--html`."""
    text = "write DIR/index.html, or a file that ends in .html"
    return group.add_argument("--html", type=path_of, metavar="DIR", help=text)


def add_json(group: argparse._ActionsContainer, what: str) -> argparse.Action:
    """Declare `--json`, which writes `what`."""
    return group.add_argument("--json", type=path_of, metavar="FILE", help=f"write {what} as one JSON document")


def checked_outputs(options: argparse.Namespace) -> dict[str, Path]:
    """Return the requested files, by option, before anything runs.

    Raises:
        InvalidArgument: One could not be written afterwards.
        MissingExtra: A page was requested, but the extra that writes pages is not installed.
    """
    from fsdp_testing.report.files import check_writable

    named = {f"--{name}": getattr(options, name, None) for name in ("html", "json", "junit")}
    paths = {option: path for option, path in named.items() if path is not None}
    page = paths.get("--html")
    if page is not None:
        with extras.needed("jinja2"):
            pass
    if page is not None and (page.suffix != ".html" or page.is_dir()):
        paths["--html"] = page / "index.html"
    for option, path in paths.items():
        check_writable(path, option)
    same = [
        option
        for option, path in paths.items()
        if [each.resolve() for each in paths.values()].count(path.resolve()) > 1
    ]
    if same:
        raise InvalidArgument(
            f"{' and '.join(same)}: expected a file for each, got {str(paths[same[0]])!r} for {len(same)}. "
            "Give them different names."
        )
    return paths


def present(
    sheet: Sheet,
    console: Output,
    paths: Mapping[str, Path],
    texts: Mapping[str, Callable[[], str]],
    *,
    page: Callable[[], Sheet] | None = None,
    full: bool = False,
) -> int:
    """Print a result, write it in the requested forms, and return its exit code, which is in the last line.

    Args:
        sheet: What is printed.
        console: The console to write to.
        paths: The files, by option.
        texts: What is written, by option; `--html` writes a sheet as a page.
        page: Gives the sheet of the page, if it is not `sheet`.
        full: Print complete accounts.
    """
    from fsdp_testing.report.files import write_atomically
    from fsdp_testing.report.terminal import print_sheet, say_ending

    print_sheet(sheet, console, full=full)
    unwritten = []
    for option, path in paths.items():
        try:
            write_atomically(path, _page(page() if page else sheet) if option == "--html" else texts[option](), option)
        except InvalidArgument as error:
            unwritten.append(str(error))  # the others may lie on another disk
        else:
            console.say(f"written: {path}")
    if unwritten:
        raise InvalidArgument(" ".join(unwritten))
    _add_to_job_summary(sheet, console)
    say_ending(sheet, console)
    return sheet.exit_code


def _add_to_job_summary(sheet: Sheet, console: Output) -> None:
    """Append the printed text to the page of a GitHub job; no verdict depends on whether this can be written."""
    from fsdp_testing.base import env
    from fsdp_testing.report.terminal import LOG_WIDTH, Output, print_sheet

    path = env.get("GITHUB_STEP_SUMMARY")
    if not path:
        return
    text = io.StringIO()
    print_sheet(sheet, Output(file=text, highlight=False, width=LOG_WIDTH))
    # A message may contain a fence: the page's fence must be longer.
    fence = "`" * (1 + max(2, *map(len, re.findall("`+", f"`{text.getvalue()}"))))
    table = text.getvalue()[:_SUMMARY_LENGTH]
    try:
        with Path(path).open("a", encoding="utf-8", errors="backslashreplace") as file:
            file.write(f"### {sheet.subject or sheet.title}\n\n{sheet.ending}\n\n{fence}text\n{table}\n{fence}\n\n")
    except OSError as error:
        console.say(f"not written: GITHUB_STEP_SUMMARY, {error}")


def _page(sheet: Sheet) -> str:
    from fsdp_testing.report.html import html_text

    return html_text(sheet)
