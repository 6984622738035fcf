"""The folder of a campaign: `state.json`, and its findings in `found/`.

Each finding has a folder there with the case, a script that does not need fsdp-testing, and a sentence.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Collection, Iterable
from pathlib import Path

from fsdp_testing.checks.findings.discovery import Discovery
from fsdp_testing.checks.findings.script import script_for
from fsdp_testing.errors import InvalidRecord
from fsdp_testing.judging.tags import tokens
from fsdp_testing.report.files import write_atomically

STATE_FILE = "state.json"
SCRIPT = "reproduce.py"
_SCRIPT_SECONDS = 180


def findings_in(folder: Path, expected: Collection[str] = ()) -> list[Path]:
    """Return the folders of a campaign's findings.

    Raises:
        InvalidRecord: One is gone of those that its state names: it would look as if nothing had been found.
    """
    folders = sorted(path for path in (folder / "found").glob("*") if path.is_dir())
    if gone := sorted({*expected} - {path.name for path in folders}):
        raise InvalidRecord(
            f"{folder / STATE_FILE}: expected its findings in {folder / 'found'}, got none named {', '.join(gone)}. "
            "Restore them, or begin again with another --state."
        )
    return folders


def write_files(folder: Path, files: Iterable[tuple[str, str]]) -> None:
    """Write files, each completely or not at all."""
    for name, text in files:
        write_atomically(folder / name, text, option="--state")


def write_discovery(discovery: Discovery, state: Path) -> Path:
    """Write the folder of a finding of the campaign in `state` and return it; `try_script` finds out whether it reproduces."""
    script = script_for(discovery)
    files = [("finding.json", discovery.to_json()), ("case.json", discovery.case.to_json(indent=1))]
    files += [(SCRIPT, script)] if script is not None else []
    files.append(("README.md", _readme(discovery, script is not None)))
    folder = state / "found" / discovery.name
    write_files(folder, files)
    return folder


def _readme(discovery: Discovery, has_script: bool) -> str:
    lines = [f"# {discovery.signature}", "", discovery.sentence(), ""]
    lines += [f"Cause: {discovery.cause}.", ""] if discovery.cause else []
    lines += [f"Program: {', '.join(tokens(discovery.case))}.", ""]
    if not discovery.confirmed:
        lines += ["It failed once, after other cases in the same processes, but passed when run alone.", ""]
    lines += ["Run it again: `fsdp-verify replay finding.json`."]
    if has_script:
        lines += [f"Without fsdp-testing: `python {SCRIPT}`; it exits with 1 if the defect shows."]
    else:
        lines += [
            "There is no script without fsdp-testing: the model, the plan or an operation cannot be written that way."
        ]
    if discovery.account:
        lines += ["", "```", discovery.account.strip(), "```"]
    return "\n".join(lines) + "\n"


def try_script(folder: Path) -> bool | None:
    """Run the script of a finding in a process of its own, write down its output, and return whether it reproduces.

    None where there is no script.
    """
    path = folder / SCRIPT
    if not path.is_file():
        return None
    command = [sys.executable, str(path)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SCRIPT_SECONDS, check=False)
        output, reproduces = (done.stdout + done.stderr).strip(), done.returncode == 1
        # A script that fails for another reason also exits with 1; only the line that it prints counts.
        reproduces = reproduces and bool(done.stdout.strip())
    except subprocess.TimeoutExpired:
        output, reproduces = f"no end after {_SCRIPT_SECONDS} s", False
    verdict = "reproduces" if reproduces else "does not reproduce"
    write_atomically(folder / "script_output.txt", f"{verdict}\n{output}\n", option="--state")
    return reproduces
