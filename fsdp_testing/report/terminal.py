"""A sheet in a terminal: blocks fit its width, text can be copied, and no text can move the cursor."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from rich.console import Console, ConsoleOptions, RenderableType
from rich.padding import Padding
from rich.rule import Rule
from rich.segment import Segment
from rich.table import Table as Grid
from rich.text import Text

from fsdp_testing.base import env
from fsdp_testing.base.documentation import page
from fsdp_testing.base.printable import printable
from fsdp_testing.report.sheet import (
    Article,
    Block,
    Card,
    Cell,
    Facts,
    Fold,
    Group,
    Line,
    Listing,
    Picture,
    Section,
    Sheet,
    Steps,
    Table,
    listed,
)

# Colour repeats a word; nothing is shown by colour alone.
STYLES = {
    "pass": "green",
    "fail": "bold red",
    "unknown": "bold magenta",
    "not_claimed": "dim",
    "expected_failure": "yellow",
    "stale": "bold yellow",
    "meaning": "dim",
    "good": "bold green",
    "known": "bold green",
    "bad": "bold red",
}
"""Style of a kind; plain if it has none."""
HEAD_LINES = 4
TAIL_LINES = 12
LOG_WIDTH, _LEAST_WIDTH = 120, 20


class Output(Console):
    """A console that shows names and messages as they are, but no control character of theirs."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Draw; only rich's own output moves the cursor or sets a style, whatever a text contains."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(printable(segment.text), segment.style)

    def say(self, *parts: str | tuple[str, str], style: str = "") -> None:
        """Print a line of parts, each a text or a text with its style: no markup, and not broken where the width ends."""
        self.print(Text.assemble(*parts, style=style), soft_wrap=True)


def open_console() -> Output:
    """Return a console on standard output; a log file, which has no width, gets a usual one unless `COLUMNS` sets it."""
    console = Output(highlight=False)
    if not console.is_terminal and not env.get("COLUMNS"):
        return Output(highlight=False, width=LOG_WIDTH)
    return console if console.width >= _LEAST_WIDTH else Output(highlight=False, width=_LEAST_WIDTH)


def print_sheet(sheet: Sheet, console: Console, *, full: bool = False) -> None:
    """Print everything but the conclusion, which comes last (`say_ending`).

    Args:
        sheet: The report.
        console: The console to write to; its width decides the layout.
        full: Show what is folded, and complete accounts.
    """
    gap = (Line(""),) if sheet.lead and sheet.sections and not isinstance(sheet.lead[-1], Table) else ()
    for part in _Printer(console.width, full).parts((*sheet.lead, *gap, *sheet.sections, *sheet.closing)):
        # Tables fit the width; text keeps its own lines, so that commands and paths can be copied.
        console.print(part, soft_wrap=isinstance(part, Text))


def say_ending(sheet: Sheet, console: Console) -> None:
    """Print the last line: the exit code and what it means."""
    console.print(plain(sheet.ending, STYLES.get(sheet.state, "")), soft_wrap=True)


def plain(text: str, style: str = "") -> Text:
    """Return the text of a run as it is: no markup, and no escape sequence that could move a reader's cursor or hide a line."""
    return Text(printable(text), style=style)


class _Printer:
    """Draws blocks, those inside of others indented."""

    def __init__(self, width: int, full: bool, indent: str = "") -> None:
        self._width = width
        self._full = full
        self._indent = indent

    def parts(self, blocks: Iterable[Block]) -> Iterator[RenderableType]:
        for block in blocks:
            yield from getattr(self, f"_{type(block).__name__.lower()}")(block)

    def _inside(self, blocks: Iterable[Block], indent: str = "  ") -> Iterator[RenderableType]:
        return _Printer(self._width, self._full, self._indent + indent).parts(blocks)

    def _indented(self, text: str, kind: str = "", style: str = "") -> Text:
        lines = (f"{self._indent}{line}" for line in text.splitlines() or [""])
        return plain("\n".join(lines), style or STYLES.get(kind, ""))

    def _line(self, line: Line) -> Iterator[Text]:
        texts = (page(line.text) if line.addresses else line.text, listed(link.text for link in line.links))
        text = self._indented(" ".join(filter(None, texts)), line.kind)
        yield Text.assemble(text, (f" {line.command}", "bold")) if line.command else text

    def _facts(self, facts: Facts) -> Iterator[RenderableType]:
        grid = Grid.grid(padding=(0, 2))
        grid.add_column(style="dim")
        grid.add_column(overflow="fold")
        for name, value in facts.pairs:
            grid.add_row(plain(name), plain(value))
        yield Padding(grid, (0, 0, 0, len(self._indent)))

    def _steps(self, steps: Steps) -> Iterator[RenderableType]:
        if steps.lines and not steps.single:
            yield plain("\n".join(f"{self._indent}  {line}" for line in steps.lines), "cyan")

    def _listing(self, listing: Listing) -> Iterator[RenderableType]:
        lines = listing.text.rstrip().splitlines()
        if not (self._full or listing.whole) and len(lines) > HEAD_LINES + TAIL_LINES + 1:
            note = f"... {len(lines) - HEAD_LINES - TAIL_LINES} lines left out (--full shows them) ..."
            lines = [*lines[:HEAD_LINES], note, *lines[-TAIL_LINES:]]
        yield self._indented("\n".join(lines), "meaning")

    def _picture(self, picture: Picture) -> Iterator[RenderableType]:
        if picture.table is not None:
            yield from self._table(picture.table)

    def _fold(self, fold: Fold) -> Iterator[RenderableType]:
        if not fold.page_only and (fold.unfolded or self._full):
            yield self._indented(fold.title, "meaning")
            yield from self._inside(fold.blocks)

    def _article(self, article: Article) -> Iterator[RenderableType]:
        owner = (f"{printable(article.owner)}: ", "bold") if article.owner else ""
        heading = ": ".join(filter(None, (article.heading, article.sentence)))
        heading += f" ({article.severity})" if article.severity else ""
        yield Text.assemble(self._indent, owner, plain(heading))
        yield from self._inside(article.blocks)
        yield Text()

    def _card(self, card: Card) -> Iterator[RenderableType]:
        yield self._indented(f"{card.title}  {card.sentence}  ({card.note})", card.kind)

    def _group(self, group: Group) -> Iterator[RenderableType]:
        width = max((len(block.title) for block in group.blocks if isinstance(block, Card)), default=0)
        blocks = [
            replace(block, title=block.title.ljust(width)) if isinstance(block, Card) else block
            for block in group.blocks
        ]
        return self._inside(blocks) if group.kind == "list" else self.parts(blocks)

    def _section(self, section: Section) -> Iterator[RenderableType]:
        style = STYLES.get(section.kind, "bold")
        if section.title:
            yield Rule(plain(section.title, style), style=style, align="left")
        if section.note:
            yield self._indented(section.note, "meaning")
        visible = section.blocks[: section.at_sight or None]
        yield from self.parts(visible)
        if len(visible) < len(section.blocks):
            yield plain(f"and {len(section.blocks) - len(visible):,} more; --html or --json has all", "dim")
        if visible and not isinstance(visible[-1], Article | Picture | Section | Table):
            yield Text()

    def _table(self, table: Table) -> Iterator[RenderableType]:
        """Rows by columns; where the names of columns do not fit, they are numbered and words are short, with a key."""
        rows = [row for group in table.groups for row in group.rows]
        words = [[len(row.cells[place].text) for row in rows] for place in range(len(table.columns))]
        columns = [max([len(name), *sizes]) + 2 for name, sizes in zip(table.columns, words, strict=True)]
        labels = [len(row.label) + 2 for row in rows]
        brief = any(cell.brief for row in rows for cell in row.cells)
        narrow = brief and max(labels, default=5) + sum(columns) > self._width
        grid = Grid(box=None, pad_edge=False, header_style="bold", show_edge=False)
        grid.add_column(plain(table.heading), overflow="fold", no_wrap=2 * max(labels, default=0) <= self._width)
        for number, name in enumerate(table.columns, 1):
            grid.add_column(plain(str(number) if narrow else name), overflow="fold", no_wrap=narrow)
            grid.columns[-1].justify = "right" if table.numbers else "left"
        if table.title:
            yield plain(table.title, "bold")
        for group in table.groups:
            if group.title:
                grid.add_row(plain(group.title, "bold"))
            for row in group.rows:
                label = plain(f"{'  ' if group.title else ''}{row.label}")
                grid.add_row(label, *(_word(cell, narrow) for cell in row.cells))
        yield grid
        if narrow:
            yield plain(f"columns: {listed(f'{number} {name}' for number, name in enumerate(table.columns, 1))}")
            yield plain(table.brief_key)
        if table.key:
            yield plain(table.key, "dim")
        yield Text()


def _word(cell: Cell, narrow: bool) -> Text:
    return plain(cell.brief if narrow and cell.brief else cell.text, STYLES.get(cell.kind, ""))
