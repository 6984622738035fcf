"""The sheet of the matrix of pairs: the picture, the pairs that do not hold, and why the rest was not tested."""

from __future__ import annotations

from collections import Counter

from fsdp_testing.cases.records import Verdict
from fsdp_testing.report.drawings.squares import matrix_picture
from fsdp_testing.report.sheet import (
    Cell,
    Facts,
    Line,
    Picture,
    Row,
    RowGroup,
    Section,
    Sheet,
    Table,
    numbered,
)
from fsdp_testing.search.pairs.matrix import (
    FAILS,
    HOLDS,
    KNOWN,
    NOT_CLAIMED,
    NOT_EXPRESSIBLE,
    NOT_MET,
    OPEN,
    REFUSED,
    UNKNOWN,
    WORDS,
    Summary,
)

AT_SIGHT = 12
CASES = {
    Verdict.PASS: "pass", Verdict.FAIL: "fail", Verdict.UNKNOWN: "unknown", Verdict.EXPECTED_FAILURE: "fail as known",
}  # fmt: skip
CAPTION = (
    "One row and one column for each trait, which is named where they meet. Green: a case with both is right. Red: each case "
    "with both fails. Brown: each is a known failure. Violet: unknown, or with an edge alone: no case was made. Grey: refused. "
    "Pale: no legal case has both. Empty: not claimed, or not run."
)
_CLASSES = {
    HOLDS: "holds", FAILS: "fails", REFUSED: "refused", KNOWN: "known", UNKNOWN: "unknown", NOT_MET: "not_met",
    NOT_EXPRESSIBLE: "impossible",
}  # fmt: skip
_TROUBLE = (FAILS, REFUSED, UNKNOWN, KNOWN, NOT_MET)
_KINDS = {FAILS: "fail", REFUSED: "fail", UNKNOWN: "unknown", NOT_MET: "unknown", KNOWN: "stale"}


def pairs_sheet(summary: Summary) -> Sheet:
    """Return the sheet of a run of every pair."""
    total = sum(summary.counts.values())
    facts = tuple((word, f"{summary.counts[word]:,}") for word in WORDS if summary.counts.get(word))
    cases = ", ".join(
        f"{count:,} {CASES.get(Verdict(verdict), verdict)}" for verdict, count in sorted(summary.cases.items())
    )
    sections = [
        Section(
            "Pairs",
            (
                Picture(
                    matrix_picture(summary.traits, summary.word, _CLASSES, _TROUBLE),
                    CAPTION,
                    "Every pair of traits",
                    table=_table(summary),
                ),
            ),
            anchor="pairs",
        )
    ]
    for word in _TROUBLE:
        lines = tuple(Line(f"{one} with {other}: {why}") for one, other, became, why in summary.wrong if became == word)
        sections.append(Section(_title(word), lines, anchor=_anchor(word), kind=_KINDS[word], at_sight=AT_SIGHT))
    for word in (NOT_MET, NOT_EXPRESSIBLE, NOT_CLAIMED):
        lines = tuple(Line(f"{numbered(count, 'pair')}: {why}") for why, count in summary.reasons[word].items())
        sections.append(Section(_title(word), lines, anchor=f"{_anchor(word)}-why", at_sight=AT_SIGHT))
    return Sheet(
        title=f"{summary.implementation}: every pair of traits",
        exit_code=summary.exit_code,
        conclusion=f"{summary.implementation}: {summary.conclusion}",
        lead=(
            Line(f"{numbered(len(summary.traits), 'trait')}, {numbered(total, 'pair')}; cases: {cases}"),
            Facts(facts),
        ),
        sections=tuple(section for section in sections if section.blocks),
        subject=f"{summary.implementation}, every pair of traits",
        environment=summary.environment,
    )


def _title(word: str) -> str:
    return word.capitalize()


def _anchor(word: str) -> str:
    return word.replace(" ", "-")


def _table(summary: Summary) -> Table:
    """Return, for the terminal, the pairs of each trait that do not hold; a trait whose pairs all hold is left out."""
    counts = [Counter[str]() for _ in summary.traits]
    for row, letters in enumerate(summary.matrix):
        for column in range(len(letters)):
            word = summary.word(row, column)
            counts[row][word] += 1
            counts[column][word] += 1
    columns = tuple(word for word in (*_TROUBLE, OPEN) if summary.counts.get(word))
    rows = [
        Row(trait, tuple(Cell(f"{count[word]:,}" if count[word] else "-", _KINDS.get(word, "")) for word in columns))
        for trait, count in zip(summary.traits, counts)
        if any(count[word] for word in columns)
    ]
    return Table("pairs of a trait", columns, (RowGroup(tuple(rows)),), numbers=True)
