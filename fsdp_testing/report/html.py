"""A sheet as one self-contained HTML file, with styles and script inside.

The page needs no network and no script to be read; the script adds filtering, jumping between troubles by key, and
copying of commands. Everything that comes from a run is escaped by the template engine.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from functools import partial
from importlib import resources
from typing import Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup, escape

from fsdp_testing.base.documentation import text_of
from fsdp_testing.base.printable import printable
from fsdp_testing.report.sheet import Block, Fold, Section, Sheet
from fsdp_testing.report.summary import ADDRESS


def html_text(sheet: Sheet) -> str:
    """Return the page."""
    # Templates escape every value, and fail on an undefined name.
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, finalize=_without_control
    )
    pages: dict[str, str] = {}
    environment.filters.update(
        begun=begun,
        coded=coded,
        linked=partial(linked, pages=pages),
        kind_of=lambda block: type(block).__name__.lower(),
    )
    template = environment.from_string(_resource("page.html"))
    entries = [section for section in _sections(sheet.sections) if section.anchor]
    return template.render(
        sheet=sheet,
        entries=entries,
        pages=pages,
        first=next((section for section in entries if _has_trouble(section)), next(iter(entries), None)),
        style=Markup(_resource("page.css")),
        script=Markup(_resource("page.js")),
    )


def _sections(blocks: Iterable[Block]) -> Iterator[Section]:
    """Yield sections, including the folded ones."""
    for block in blocks:
        if isinstance(block, Section):
            yield block
        if isinstance(block, Section | Fold):
            yield from _sections(block.blocks)


def _has_trouble(section: Section) -> bool:
    return section.kind in ("fail", "unknown", "stale", "expected_failure")


def linked(text: str, pages: dict[str, str]) -> Markup:
    """Return the text, escaped, with its web addresses as links, and links to the pages of the documentation that it names.

    These pages are added to `pages` and become part of the file: its reader may have no copy of the documentation.
    """

    def link(piece: str) -> Markup:
        if not piece.startswith("docs/"):
            return Markup('<a href="{0}" rel="noreferrer">{0}</a>').format(piece)
        if piece not in pages and (told := text_of(piece)) is not None:
            pages[piece] = told
        return Markup('<a href="#{0}">{0}</a>').format(piece) if piece in pages else escape(piece)

    pieces = re.split(rf"({ADDRESS}|\bdocs/[\w./-]+\.(?:md|py)\b)", text)
    return Markup("").join(link(piece) if index % 2 else coded(piece) for index, piece in enumerate(pieces))


def coded(text: str) -> Markup:
    """Return the text, escaped, with what stands in backticks as code."""
    pieces = re.split(r"`([^`\n]+)`", text)
    return Markup("").join(
        Markup("<code>{}</code>").format(piece) if index % 2 else escape(piece) for index, piece in enumerate(pieces)
    )


def begun(text: str) -> str:
    """Return the text with a capital letter, unless it begins with a name in code such as `zero_grad`."""
    return text[:1].upper() + text[1:] if text.partition(" ")[0].strip(",:;").isalpha() else text


def _without_control(value: Any) -> Any:
    """Write control characters out: HTML cannot hold them, and a page is also read in terminals."""
    if isinstance(value, Markup):
        return Markup(printable(value))
    return printable(value) if isinstance(value, str) else value


def _resource(name: str) -> str:
    return (resources.files("fsdp_testing.report") / "page" / name).read_text(encoding="utf-8")
