"""What does a campaign leave on disk, so that the next one goes on where it ended?

`state.json` (how far it came), `found/` (one folder for each finding), `unjudged/` (cases that could not be judged).
Every file is written as a whole or not at all, so that an interruption at any moment leaves the old or the new content.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from fsdp_testing.base.document import ADDED_LATER, Format, decode, read_text
from fsdp_testing.errors import InvalidRecord
from fsdp_testing.report.files import write_atomically

FORMAT = Format("fsdp_testing/fuzz_state", 3)
_OF_EARLIER_VERSIONS = ("keys", "arcs", "rules", "unsupported")
KNOWN = "known"
"""What became of a case that failed as is known; of all others it is the verdict."""
_FORMER = {"passed": "pass", "suspect": "fail", "leaked": "fail", "unjudged": "unknown"}


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a campaign has come, over all its runs.

    Attributes:
        implementation: Its name.
        campaigns: Runs so far.
        drawn: Cases drawn so far; the next one is drawn from this number.
        run: Cases run.
        seconds: Time spent.
        statuses: Cases by verdict; `known` are those that failed by a known failure.
        known: How many cases failed by each known failure.
        not_investigated: Cases that failed like others, and were not looked at themselves.
        unfinished: Numbers of cases that were drawn and did not run; they come first next time.
        turns: In which run the example of each known failure ran last, the first run being 0.
        shard: `(i, n)`: it draws every n-th case, the i-th first; its own cases are numbered from 0.
        drawn_by: What cases follow from, besides the implementation: seed and options. Empty before version 3.
        known_by: Digest of the known failures that were given; empty in states of earlier versions.
    """

    implementation: str
    campaigns: int = 0
    drawn: int = 0
    run: int = 0
    seconds: float = 0.0
    statuses: Mapping[str, int] = field(default_factory=dict)
    known: Mapping[str, int] = field(default_factory=dict)
    not_investigated: int = 0
    unfinished: tuple[int, ...] = ()
    turns: Mapping[str, int] = field(default_factory=dict)
    shard: tuple[int, int] = (1, 1)
    drawn_by: str = ""
    known_by: str = field(default="", metadata=ADDED_LATER)


def read_progress(path: Path) -> Progress:
    """Read the progress of the campaign in a directory.

    Raises:
        InvalidRecord: The file is not there, damaged, or newer than this version.
    """
    file = path / "state.json"
    text = read_text(file, "the state of a campaign", "Give what `fuzz --state` wrote.")
    body = FORMAT.read(text, str(file))
    progress = decode(
        Progress, {key: value for key, value in body.items() if key not in _OF_EARLIER_VERSIONS}, str(file)
    )
    statuses: Counter[str] = Counter()
    for status, count in progress.statuses.items():
        statuses[_FORMER.get(status, status)] += count
    return replace(progress, statuses=dict(statuses))


class StateDirectory:
    """The folder of one campaign on one implementation."""

    def __init__(self, path: Path, implementation: str) -> None:
        self.path = path
        self._implementation = implementation

    def load(self, shard: tuple[int, int] = (1, 1), drawn_by: str = "") -> Progress:
        """Return the progress of earlier runs, or a fresh one.

        Args:
            shard: Which part the campaign is.
            drawn_by: What its cases follow from; a part cannot go on with others.

        Raises:
            InvalidRecord: The file is damaged, newer than this version, or belongs to another implementation, another part, or
                a part of other cases.
        """
        file = self.path / "state.json"
        if not file.exists():
            return Progress(self._implementation, shard=shard, drawn_by=drawn_by)
        progress = read_progress(self.path)
        if progress.shard != shard or (shard != (1, 1) and progress.drawn_by != drawn_by):
            there = "part {} of {}".format(*progress.shard)
            raise InvalidRecord(
                f"{file}: expected part {shard[0]} of {shard[1]} of the cases by {drawn_by or 'no seed'}, got {there} of those "
                f"by {progress.drawn_by or 'no seed'}. Give another --state directory, or the same options."
            )
        if progress.implementation != self._implementation:
            raise InvalidRecord(
                f"{file}: expected a campaign on {self._implementation!r}, got one on {progress.implementation!r}. "
                "Give another --state directory."
            )
        return progress

    def save(self, progress: Progress) -> None:
        """Write the progress."""
        self.write_files("", [("state.json", FORMAT.write(progress))])

    def found(self) -> list[Path]:
        """Return the folders of what was found."""
        return sorted(path for path in (self.path / "found").glob("*") if path.is_dir())

    def write_files(self, folder: str, files: Iterable[tuple[str, str]]) -> Path:
        """Write files, each as a whole or not at all, and return their folder."""
        for name, text in files:
            write_atomically(self.path / folder / name, text, option="--state")
        return self.path / folder
