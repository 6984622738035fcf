"""The numbers of an exchange of checkpoints, computed once for terminal, page and JSON; and its sheet of who loads what."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from fsdp_testing.base.document import ADDED_LATER, Format, decode
from fsdp_testing.cases.records import Verdict, exit_code
from fsdp_testing.report.drawings.squares import cube_picture
from fsdp_testing.report.sheet import (
    Article,
    Cell,
    Line,
    Picture,
    Row,
    RowGroup,
    Section,
    Sheet,
    Table,
    bulleted,
)
from fsdp_testing.search.checkpoints.exchange import Result

FORMAT = Format("fsdp_testing/checkpoints", 2)
SAVED = "saved"
"""Column of the results of saving."""
MARKS = {"X": "one fails", "?": "one is unknown", "r": "one is refused: an error on every rank", "=": "all equal"}
"""The marks of a table cell: the first that applies to a state in it."""


@dataclass(frozen=True, slots=True)
class Cause:
    """Results that do not hold for one reason.

    Attributes:
        mark: One of `MARKS`.
        reason: The first entry that differs, or what was raised.
        count: How many there are.
        example: Saver, loader, subject and way of the first one.
    """

    mark: str
    reason: str
    count: int
    example: str


@dataclass(frozen=True, slots=True)
class Summary:
    """A table of checkpoints.

    Attributes:
        environment: Versions.
        places: Implementations and layouts, in the order of rows and columns.
        results: Everything that was saved, and everything that was loaded.
        seconds: How long it took.
        not_asked: What was not tested on an implementation, and why, a sentence each.
    """

    environment: Mapping[str, str]
    places: tuple[str, ...]
    results: tuple[Result, ...]
    seconds: float
    not_asked: tuple[str, ...] = field(default=(), metadata=ADDED_LATER)

    @property
    def loaded(self) -> list[Result]:
        """Return the results of loading."""
        return [result for result in self.results if result.loader]

    @property
    def exit_code(self) -> int:
        """Return 1 if anything fails, 3 if anything is unknown or nothing holds, else 0."""
        code = exit_code(result.verdict for result in self.results)
        return code if any(result.verdict is Verdict.PASS for result in self.loaded) else code or 3

    def conclusion(self) -> str:
        marks = [result.mark for result in self.loaded]
        others = [("X", "fail"), ("r", "end with an error on every rank"), ("?", "are unknown")]
        text = f"{marks.count('='):,} of {len(marks):,} loaded states are equal to what was saved, and train on equally"
        return text + "".join(f"; {marks.count(mark):,} {verb}" for mark, verb in others if mark in marks)

    def cells(self) -> dict[str, dict[str, list[Result]]]:
        """Return saver -> loader (and `SAVED`) -> results."""
        cells: dict[str, dict[str, list[Result]]] = {place: {} for place in self.places}
        for result in self.results:
            cells[result.saver].setdefault(result.loader or SAVED, []).append(result)
        return cells

    def by_implementation(self) -> dict[str, dict[str, list[Result]]]:
        """Return the same for implementations, all layouts together."""
        table: dict[str, dict[str, list[Result]]] = {}
        for saver, loaders in self.cells().items():
            row = table.setdefault(saver.split()[0], {})
            for loader, results in loaders.items():
                row.setdefault(loader.split()[0], []).extend(results)
        return table

    def causes(self) -> list[Cause]:
        """Return the reasons why states do not hold: failures first, frequent ones first; layouts are not distinguished."""
        groups: dict[tuple[str, str, str, str], list[Result]] = {}
        for result in self.results:
            if result.verdict is not Verdict.PASS:
                who = f"{result.saver.split()[0]} -> {result.loader.split()[0] if result.loader else SAVED}"
                groups.setdefault((result.mark, result.reason, who, result.subject), []).append(result)
        causes = [Cause(*key[:2], len(same), _example(same[0])) for key, same in groups.items()]
        return sorted(causes, key=lambda cause: (list(MARKS).index(cause.mark), -cause.count))

    def to_json(self) -> str:
        return FORMAT.write(self, indent=1)

    @staticmethod
    def from_json(text: str, where: str) -> Summary:
        """Return what `to_json` wrote; `where` it comes from is for messages.

        Raises:
            InvalidRecord: The text is something else, or damaged.
        """
        return decode(Summary, FORMAT.read(text, where))


def _example(result: Result) -> str:
    loaded = f" -> {result.loader}" if result.loader else ", saved"
    return f"{result.saver}{loaded} ({result.subject}; {result.way})"


def worst(results: Sequence[Result]) -> str:
    """Return the letter that a cell shows."""
    marks = {result.mark for result in results}
    return next(mark for mark in MARKS if mark in marks)


CAUSES_AT_SIGHT = 12
SHADES = {"X": "fail", "?": "unknown", "r": "refused", "=": "pass"}
"""The drawing's word for a state, by its mark."""
KINDS = {"X": "fail", "?": "unknown", "r": "expected_failure", "=": ""}
WORDS = {"X": "fails", "?": "unknown", "r": "refused: an error on every rank"}
CAPTION = (
    "A row for each implementation and layout that saved, a column with the same number for each that loaded. A square is "
    "green where every state is equal to the bit and trains on equally, red where all fail, pale with an edge where some "
    "do, grey where an error says so, violet where something is unknown."
)


def checkpoints_sheet(summary: Summary) -> Sheet:
    """Return the sheet of who loads what."""
    names = list(dict.fromkeys(place.split()[0] for place in summary.places))
    totals = _table("states that hold", summary.by_implementation(), [SAVED, *names])
    reasons: dict[tuple[str, str], list[Cause]] = {}
    for cause in summary.causes():
        reasons.setdefault((cause.mark, cause.reason), []).append(cause)
    why = tuple(_article(reason, causes) for (_, reason), causes in reasons.items())
    skipped = tuple(map(Line, summary.not_asked))
    note = "each reason once, with the first state of each pair"
    return Sheet(
        title="Checkpoints",
        exit_code=summary.exit_code,
        conclusion=summary.conclusion(),
        lead=(totals,) if len(summary.places) > len(names) else (),
        sections=(
            Section("Who loads what", (_picture(summary),), anchor="who"),
            *(
                [Section("Not claimed, and not asked", skipped, anchor="not-asked", kind="not_claimed")]
                if skipped
                else []
            ),
            *([Section("Why not", why, note, "why", kind="fail", at_sight=CAUSES_AT_SIGHT)] if why else []),
        ),
        subject="Saved by one, loaded by another",
        environment=summary.environment,
    )


def _article(reason: str, causes: Sequence[Cause]) -> Article:
    mark = causes[0].mark
    examples = bulleted(f"{mark} {cause.count:,} x: {cause.example}" for cause in causes)
    return Article(reason, (Line(WORDS[mark], "meaning"), examples), kind=KINDS[mark])


def _picture(summary: Summary) -> Picture:
    numbers = {place: str(number) for number, place in enumerate(summary.places, 1)}
    labels = {place: f"{number:>2} {place}" for place, number in numbers.items()}
    cells = summary.cells()
    marks = {
        labels[saver]: {numbers.get(loader, loader): results for loader, results in row.items()}
        for saver, row in cells.items()
    }
    key = "   ".join(f"{mark} {meaning}" for mark, meaning in MARKS.items())
    table = _table("saved by", marks, [SAVED, *numbers.values()], key)
    columns = {place: f"{place.split()[0]} {number}" for place, number in numbers.items()}
    faces: dict[str, dict[str, dict[str, int]]] = {column: {} for column in columns.values()}
    for saver, row in cells.items():
        for loader in row.keys() & columns.keys():
            faces[columns[loader]][labels[saver]] = dict(Counter(SHADES[result.mark] for result in row[loader]))
    picture = cube_picture(faces, list(labels.values()), list(faces))
    return Picture(picture, CAPTION, "Savers and loaders", table=table)


def _table(
    heading: str, rows: Mapping[str, Mapping[str, list[Result]]], columns: Sequence[str], key: str = ""
) -> Table:
    """Table of who loads what: how many states hold or, with a key, the worst mark of them."""

    def cell(results: list[Result] | None) -> Cell:
        if not results:
            return Cell("-", "not_claimed")
        held, total, mark = sum(result.verdict is Verdict.PASS for result in results), len(results), worst(results)
        return Cell(mark if key else f"{held:,}" if held == total else f"{held:,} of {total:,}", KINDS[mark])

    made = tuple(Row(name, tuple(cell(row.get(column)) for column in columns)) for name, row in rows.items())
    return Table(heading, tuple(columns), (RowGroup(made),), key=key, numbers=True)
