"""A result for readers: one model, which `terminal.py` prints and `html.py` writes as a page.

Pure functions build a `Sheet` from the result of a command (`conformance.py`, `parity.py`, `search/*`, `train/report.py`).
`kind` is a class of the style sheet and a style of the terminal: a verdict's value, or one of `said` (what matters), `meaning`
(what explains).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Link:
    """A text that leads to an anchor of the page."""

    text: str
    anchor: str


@dataclass(frozen=True, slots=True)
class Line:
    """A text, links with commas between, and what can be copied; with `addresses` web addresses in the text are links too."""

    text: str
    kind: str = ""
    links: tuple[Link, ...] = ()
    command: str = ""
    addresses: bool = False


@dataclass(frozen=True, slots=True)
class Facts:
    """Names with their values; a legend has the `kinds` of the names."""

    pairs: tuple[tuple[str, str], ...]
    kinds: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Cell:
    """One cell of a table; `brief` stands for the text where columns are narrow."""

    text: str
    kind: str = ""
    brief: str = ""
    anchor: str = ""
    title: str = ""


@dataclass(frozen=True, slots=True)
class Row:
    """One row of a table."""

    label: str
    cells: tuple[Cell, ...]
    meaning: str = ""


@dataclass(frozen=True, slots=True)
class RowGroup:
    """Rows under one title; without a title they are the whole table. A page folds rows that need no attention."""

    rows: tuple[Row, ...]
    title: str = ""
    note: str = ""
    urgent: bool = True


@dataclass(frozen=True, slots=True)
class Table:
    """Rows by columns; in a terminal that is too narrow, columns have numbers instead of names.

    `heading` is that of the rows' labels; `key` says what cells mean, `brief_key` where they are brief; `numbers` stand at
    the right of their columns.
    """

    heading: str
    columns: tuple[str, ...]
    groups: tuple[RowGroup, ...]
    title: str = ""
    key: str = ""
    brief_key: str = ""
    numbers: bool = False


@dataclass(frozen=True, slots=True)
class Steps:
    """The operations of a schedule.

    Attributes:
        lines: Each operation.
        wrong: Index of the operation at which it goes wrong; None if unknown.
        ranks: Each rank at that operation, and whether it is wrong; None if unknown.
        mistake: What is wrong there.
        single: Whether it is one operation of a longer program.
    """

    lines: tuple[str, ...]
    wrong: int | None = None
    ranks: tuple[tuple[int, bool | None], ...] = ()
    mistake: str = ""
    single: bool = False


@dataclass(frozen=True, slots=True)
class Listing:
    """Text with its own line breaks; what is to be copied is never shortened (`whole`), a page may number its lines."""

    text: str
    whole: bool = False
    numbered: bool = False


@dataclass(frozen=True, slots=True)
class Picture:
    """A drawing for a page; a terminal shows its `table`, if it has one. The colours of a `timed` drawing need a key."""

    svg: str
    caption: str
    label: str
    title: str = ""
    timed: bool = False
    table: Table | None = None


@dataclass(frozen=True, slots=True)
class Fold:
    """Blocks that a page folds unless `unfolded`, and that a terminal shows only in full.

    `page_only`: never shown in a terminal, because it holds pictures or a document for another command.
    """

    title: str
    blocks: tuple[Block, ...]
    unfolded: bool = False
    page_only: bool = False
    kind: str = ""


@dataclass(frozen=True, slots=True)
class Article:
    """One failure, cause, or verdict: its owner, a word or a sentence or both, its cost, and the facts."""

    heading: str
    blocks: tuple[Block, ...]
    owner: str = ""
    kind: str = ""
    anchor: str = ""
    sentence: str = ""
    severity: str = ""


@dataclass(frozen=True, slots=True)
class Card:
    """One subject in a line, with the shares of its results."""

    title: str
    sentence: str
    note: str
    kind: str
    shares: tuple[tuple[str, int], ...]
    other_name: str = ""


@dataclass(frozen=True, slots=True)
class Group:
    """Blocks that belong together: a `list`, or an element of the class `kind`, side by side in a `pair` and in `answers`."""

    blocks: tuple[Block, ...]
    kind: str


@dataclass(frozen=True, slots=True)
class Section:
    """Blocks under a title. With an anchor it is in the table of contents, by its `entry` if it has one, else by its title.

    A terminal shows the first `at_sight` blocks and counts the others; 0 for all.
    """

    title: str
    blocks: tuple[Block, ...]
    note: str = ""
    anchor: str = ""
    entry: str = ""
    kind: str = ""
    at_sight: int = 0


Block = Line | Facts | Table | Steps | Listing | Picture | Fold | Article | Card | Group | Section


@dataclass(frozen=True, slots=True)
class Sheet:
    """A result.

    Attributes:
        title: Title of the page.
        exit_code: Exit code of the command.
        conclusion: What the exit code means here.
        lead: The first blocks.
        sections: Everything else.
        closing: What a terminal shows before the conclusion.
        subject: Heading of the page; the title where it is empty.
        genre: The sort of page.
        headline: The first line for a reader of the page; the conclusion where it is empty.
        foot: The last words of the page.
        environment: When, of what, by which command and with which versions it was made.
        known: Whether there are known failures, although the exit code is 0.
    """

    title: str
    exit_code: int
    conclusion: str
    lead: tuple[Block, ...] = ()
    sections: tuple[Section, ...] = ()
    closing: tuple[Block, ...] = ()
    subject: str = ""
    genre: str = ""
    headline: str = ""
    foot: str = "Made by fsdp-testing."
    environment: Mapping[str, str] = field(default_factory=dict)
    known: bool = False

    @property
    def ending(self) -> str:
        """The last line that a reader of a terminal sees."""
        return f"exit code {self.exit_code}: {self.conclusion}"

    @property
    def state(self) -> str:
        """Class of the banner. Green is for a result in which everything holds."""
        return {0: "known" if self.known else "good", 1: "bad"}.get(self.exit_code, "unknown")


def bulleted(texts: Iterable[str]) -> Group:
    """Return lines as a list."""
    return Group(tuple(map(Line, texts)), "list")


def numbered(count: int, noun: str) -> str:
    """Return the number with its noun: "1 check", "2 checks"."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def listed(items: Iterable[object]) -> str:
    """Return the items with commas between."""
    return ", ".join(map(str, items))
