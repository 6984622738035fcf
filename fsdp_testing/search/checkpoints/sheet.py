"""An exchange of checkpoints as people read it: who loads what, and why the rest does not hold."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from fsdp_testing.cases.records import Verdict
from fsdp_testing.report.drawings.cube import cube_picture
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
from fsdp_testing.search.checkpoints.summary import MARKS, SAVED, Cause, Summary, worst

CAUSES_AT_SIGHT = 12
SHADES = {"X": "fail", "?": "unknown", "r": "refused", "=": "pass"}
"""What the drawing calls a state, by its mark."""
KINDS = {"X": "fail", "?": "unknown", "r": "expected_failure", "=": ""}
WORDS = {"X": "fails", "?": "unknown", "r": "refused: an error on every rank"}
CAPTION = (
    "A row for each implementation and layout that saved, a column with the same number for each that loaded. A square is "
    "green where every state is equal to the bit and trains on equally, red where all fail, pale with an edge where some "
    "do, grey where an error says so, violet where something is unknown."
)


def checkpoints_sheet(summary: Summary) -> Sheet:
    """Return who loads what."""
    names = list(dict.fromkeys(place.split()[0] for place in summary.places))
    totals = _table("states that hold", summary.by_implementation(), [SAVED, *names])
    reasons: dict[tuple[str, str], list[Cause]] = {}
    for cause in summary.causes():
        reasons.setdefault((cause.mark, cause.reason), []).append(cause)
    why = tuple(_article(reason, causes) for (_, reason), causes in reasons.items())
    note = "each reason once, with the first state of each pair"
    return Sheet(
        title="Checkpoints",
        exit_code=summary.exit_code,
        conclusion=summary.conclusion(),
        lead=(totals,) if len(summary.places) > len(names) else (),
        sections=(
            Section("Who loads what", (_picture(summary),), anchor="who"),
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
    """Who loads what: how many states hold or, with a key, how the worst of them is."""

    def cell(results: list[Result] | None) -> Cell:
        if not results:
            return Cell("-", "not_claimed")
        held, total, mark = sum(result.verdict is Verdict.PASS for result in results), len(results), worst(results)
        return Cell(mark if key else f"{held:,}" if held == total else f"{held:,} of {total:,}", KINDS[mark])

    made = tuple(Row(name, tuple(cell(row.get(column)) for column in columns)) for name, row in rows.items())
    return Table(heading, tuple(columns), (RowGroup(made),), key=key, numbers=True)
