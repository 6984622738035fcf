"""What is known of each cell? A cell that ran and has no mark holds; what is known lies on disk, so that a run goes on.

`certificate.json` is written as a whole or not at all, so that an interruption at any moment leaves the old or the new one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from fsdp_testing.certificate.axes import Cell
from fsdp_testing.certificate.cube import Job, digest, representative
from fsdp_testing.errors import InvalidRecord
from fsdp_testing.judging.signature import Signature
from fsdp_testing.records import FailureKind
from fsdp_testing.records.document import Format, decode, read_text
from fsdp_testing.report.files import write_atomically

FORMAT = Format("fsdp_testing/certificate_state", 1)

HOLDS, FAILS, REFUSED, UNKNOWN = "holds", "fails", "refused", "unknown"
"""What may be said of a cell that ran; `refused`: the implementation says itself that it does not support it."""


@dataclass(frozen=True, slots=True)
class Mark:
    """Why a cell does not hold.

    Attributes:
        status: `FAILS`, `REFUSED` or `UNKNOWN`.
        reason: The first fact that differs.
        looks: Kind, quantity and operation of a failure, else empty.
    """

    status: str
    reason: str
    looks: tuple[str, ...] = ()

    @property
    def signature(self) -> Signature | None:
        """Return what the failure looks like."""
        return Signature(FailureKind(self.looks[0]), *self.looks[1:]) if self.looks else None


@dataclass(frozen=True, slots=True)
class _State:
    subject: str
    done: tuple[int, ...] = ()
    marks: Mapping[str, Mark] = field(default_factory=dict)
    seconds: float = 0.0


class Verdicts:
    """The cells that ran, and what was found.

    Attributes:
        earlier: How many of them ran in earlier runs; none if those had come to the end.

    Args:
        jobs: All that is to run.
        subject: What is certified; a state of another subject is refused.
        folder: Where it is kept.

    Raises:
        InvalidRecord: The state there is damaged, newer, or of another subject.
    """

    def __init__(self, jobs: Sequence[Job], subject: str, folder: Path) -> None:
        self.jobs = jobs
        self.marks: dict[Cell, Mark] = {}
        self.ran: set[Cell] = set()
        self.seconds = 0.0
        self._done: set[int] = set()
        self._file = folder / "certificate.json"
        # The jobs say which cells are claimed, sampled, and of this shard.
        self._subject = f"{subject}, {sum(map(len, jobs))} cells {digest(repr(jobs)):016x}"
        if self._file.exists():
            self._load()
        if len(self._done) == len(jobs):
            # What is complete says nothing of an implementation that may have changed since: it is made anew.
            self._done, self.ran, self.marks, self.seconds = set(), set(), {}, 0.0
        self.earlier = len(self.ran)

    def _load(self) -> None:
        where = str(self._file)
        text = read_text(
            self._file, "the state of a certificate", "Remove the file, or give another --state directory."
        )
        state = decode(_State, FORMAT.read(text, where), where)
        if state.subject != self._subject:
            raise InvalidRecord(
                f"{where}.subject: expected {self._subject!r}, got {state.subject!r}. "
                "Give another --state directory, or remove that one to begin anew."
            )
        if any(not 0 <= number < len(self.jobs) for number in state.done):
            raise InvalidRecord(f"{where}.done: expected numbers below {len(self.jobs)}, got others. Remove the file.")
        unknown = sorted(set(state.marks) - {cell.name for job in self.jobs for cell in job})
        if unknown:
            raise InvalidRecord(f"{where}.marks: expected names of cells, got {unknown}. Remove the file.")
        self.seconds = state.seconds
        for number in state.done:
            known = [(cell, state.marks.get(cell.name)) for cell in self.jobs[number]]
            if not any(mark is not None and mark.status == UNKNOWN for _, mark in known):
                self.take(number, known)  # what was unknown is asked again

    def save(self) -> None:
        """Write what is known."""
        marks = {cell.name: mark for cell, mark in self.marks.items()}
        state = _State(self._subject, tuple(sorted(self._done)), marks, self.seconds)
        write_atomically(self._file, FORMAT.write(state), option="--state")

    def remaining(self) -> Iterator[int]:
        """Yield the numbers of the jobs that have not run."""
        yield from (number for number in range(len(self.jobs)) if number not in self._done)

    def take(self, number: int, marks: Iterable[tuple[Cell, Mark | None]]) -> None:
        """Take in what a job gave: for each of its cells why it does not hold, or None."""
        self._done.add(number)
        self.ran.update(self.jobs[number])
        self.marks |= {cell: mark for cell, mark in marks if mark is not None}

    def status(self, cell: Cell) -> str:
        """Return what is said of a cell that ran."""
        mark = self.marks.get(cell)
        return HOLDS if mark is None else mark.status

    def counts(self) -> Counter[str]:
        """Return how many of the cells that ran there are of each status."""
        counts = Counter(mark.status for mark in self.marks.values())
        counts[HOLDS] = len(self.ran) - len(self.marks)
        return counts

    def failing(self) -> list[Cell]:
        """Return the cells that fail, in an order that does not depend on when they ran."""
        return sorted(cell for cell, mark in self.marks.items() if mark.status == FAILS)

    def symmetric_pairs(self) -> list[tuple[Cell, Cell]]:
        """Return the cells that ran beside their representative, with it."""
        pairs = [(cell, representative(cell)) for cell in self.ran]
        return sorted((cell, other) for cell, other in pairs if cell != other and other in self.ran)

    def unequal_pairs(self) -> list[tuple[Cell, Cell]]:
        """Return those of these pairs of which only one holds, fails, or is refused: there the symmetry is wrong."""
        return [pair for pair in self.symmetric_pairs() if self.status(pair[0]) != self.status(pair[1])]
