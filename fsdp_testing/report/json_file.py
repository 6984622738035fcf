"""How does a report become a file that programs read, and come back?"""

from __future__ import annotations

from pathlib import Path

from fsdp_testing.errors import InvalidRecord
from fsdp_testing.records import RunReport
from fsdp_testing.report.files import write_atomically


def write_json(report: RunReport, path: Path) -> None:
    """Write the report as one JSON document (format `fsdp_testing/report`).

    Raises:
        InvalidArgument: The file cannot be written.
    """
    write_atomically(path, report.to_json(indent=1) + "\n", option="--json")


def read_json(path: Path) -> RunReport:
    """Read what `write_json` wrote.

    Raises:
        InvalidRecord: The file is missing, damaged, or newer than this version.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRecord(f"{path}: expected a report, got {error}. Give a file that --json wrote.") from error
    return RunReport.from_json(text, where=str(path))
