"""What is known of each cell? What was said of it when it ran; it lies on disk, so that a run goes on.

`certificate.json` is written as a whole or not at all, so that an interruption at any moment leaves the old or the new one.
That a cell holds is written down as such: what is missing there says nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, KeysView, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from fsdp_testing.base.document import Format, decode, read_text
from fsdp_testing.cases.records import FailureKind
from fsdp_testing.errors import InvalidRecord
from fsdp_testing.judging.signature import Signature
from fsdp_testing.report.files import write_atomically
from fsdp_testing.search.certificate.axes import Cell
from fsdp_testing.search.certificate.cube import Job, digest

FORMAT = Format("fsdp_testing/certificate_state", 2)

HOLDS, FAILS, UNKNOWN = "holds", "fails", "unknown"
"""What may be said of a cell that ran."""
_LETTERS = {"h": HOLDS, "f": FAILS, "u": UNKNOWN}


@dataclass(frozen=True, slots=True)
class Mark:
    """What is said of a cell that ran.

    Attributes:
        status: `HOLDS`, `FAILS` or `UNKNOWN`.
        reason: The first fact that differs; empty where the cell holds.
        looks: Kind, quantity and operation of a failure, else empty.
        confirmed: It failed alike again, alone.
    """

    status: str
    reason: str
    looks: tuple[str, ...] = ()
    confirmed: bool = False

    @property
    def signature(self) -> Signature | None:
        """Return what the failure looks like."""
        return Signature(FailureKind(self.looks[0]), *self.looks[1:]) if self.looks else None


HELD = Mark(HOLDS, "")


@dataclass(frozen=True, slots=True)
class _State:
    """`verdicts`: by number of a job that ran, one letter for each of its cells; `marks`: why a cell does not hold."""

    subject: str
    source: str
    verdicts: Mapping[str, str]
    marks: Mapping[str, Mark]
    seconds: float


class Verdicts:
    """The cells that ran, and what was found.

    Attributes:
        marks: What is said of each of them.
        earlier: How many of them ran in earlier runs; none if those had come to the end.

    Args:
        jobs: All that is to run.
        subject: What is certified; a state of another subject is refused.
        source: Digest of the implementation and of the harness; a state that is not complete is refused if it is of another.
        folder: Where it is kept.

    Raises:
        InvalidRecord: The state there is damaged, of another version, of another subject, or from before a change.
    """

    def __init__(self, jobs: Sequence[Job], subject: str, source: str, folder: Path) -> None:
        self.jobs = jobs
        self.marks: dict[Cell, Mark] = {}
        self.seconds = 0.0
        self._done: set[int] = set()
        self._file = folder / "certificate.json"
        self._source = source
        # The jobs say which cells are claimed, sampled, and of this shard.
        self._subject = f"{subject}, {sum(map(len, jobs))} cells {digest(repr(jobs)):016x}"
        if self._file.exists():
            self._load()
        self.earlier = len(self.ran)

    @property
    def ran(self) -> KeysView[Cell]:
        """Return the cells that ran."""
        return self.marks.keys()

    def _load(self) -> None:
        where = str(self._file)
        text = read_text(
            self._file, "the state of a certificate", "Remove the file, or give another --state directory."
        )
        body = FORMAT.read(text, where)
        if "source" not in body:
            raise InvalidRecord(
                f"{where}: expected what was said of each cell, got a state of an earlier version, which kept only what "
                "fails. Remove it to begin anew."
            )
        state = decode(_State, body, where)
        if state.subject != self._subject:
            raise InvalidRecord(
                f"{where}.subject: expected {self._subject!r}, got {state.subject!r}. "
                "Give another --state directory, or remove that one to begin anew."
            )
        if len(state.verdicts) == len(self.jobs) and "u" not in "".join(state.verdicts.values()):
            return  # what is complete says nothing of an implementation that may have changed since: it is made anew
        if state.source != self._source:
            raise InvalidRecord(
                f"{where}.source: the implementation, or fsdp-testing, has changed since this certificate was begun "
                f"(expected digest {self._source!r}, got {state.source!r}). What ran before says nothing of what it is now. "
                "Remove that directory to begin anew, or give another --state directory."
            )
        self.seconds = state.seconds
        self._take_state(state, where)

    def _take_state(self, state: _State, where: str) -> None:
        names = {cell.name: cell for job in self.jobs for cell in job}
        unknown = sorted(set(state.marks) - set(names))
        if unknown:
            raise InvalidRecord(f"{where}.marks: expected names of cells, got {unknown}. Remove the file.")
        for text, letters in state.verdicts.items():
            number = int(text) if text.isdecimal() else len(self.jobs)
            if number >= len(self.jobs) or len(letters) != len(self.jobs[number]):
                raise InvalidRecord(
                    f"{where}.verdicts: expected numbers of jobs with a letter for each cell, got {text!r}: {letters!r}. "
                    "Remove the file."
                )
            marks = []
            for cell, letter in zip(self.jobs[number], letters, strict=True):
                mark = HELD if letter == "h" else state.marks.get(cell.name)
                if mark is None or mark.status != _LETTERS.get(letter):
                    raise InvalidRecord(
                        f"{where}.marks: expected why {cell.name} {_LETTERS.get(letter, 'does not hold')}, got nothing of "
                        "the kind. Remove the file."
                    )
                marks.append((cell, mark))
            if UNKNOWN not in {mark.status for _, mark in marks}:
                self.take(number, marks)  # what was unknown is asked again

    def save(self) -> None:
        """Write what is known."""
        letter_of = {status: letter for letter, status in _LETTERS.items()}
        said = {
            str(number): "".join(letter_of[self.marks[cell].status] for cell in self.jobs[number])
            for number in sorted(self._done)
        }
        marks = {cell.name: mark for cell, mark in self.marks.items() if mark.status != HOLDS}
        state = _State(self._subject, self._source, said, marks, self.seconds)
        write_atomically(self._file, FORMAT.write(state), option="--state")

    def remaining(self) -> Iterator[int]:
        """Yield the numbers of the jobs that have not run."""
        yield from (number for number in range(len(self.jobs)) if number not in self._done)

    def take(self, number: int, marks: Iterable[tuple[Cell, Mark]]) -> None:
        """Take in what a job gave: what is said of each of its cells. A cell of which nothing is said is unknown."""
        self._done.add(number)
        said = dict(marks)
        self.marks |= {cell: said.get(cell, Mark(UNKNOWN, "nothing was said of it")) for cell in self.jobs[number]}

    def status(self, cell: Cell) -> str:
        """Return what is said of a cell that ran."""
        return self.marks[cell].status

    def counts(self) -> Counter[str]:
        """Return how many of the cells that ran there are of each status."""
        return Counter(mark.status for mark in self.marks.values())

    def failing(self) -> list[Cell]:
        """Return the cells that fail, in an order that does not depend on when they ran."""
        return sorted(cell for cell, mark in self.marks.items() if mark.status == FAILS)
