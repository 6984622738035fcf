"""The sheet of a certificate: where it holds, and the shortest schedule of each cause."""

from __future__ import annotations

from collections import Counter

from fsdp_testing.report.drawings.squares import cube_picture
from fsdp_testing.report.sheet import (
    Article,
    Cell,
    Facts,
    Fold,
    Line,
    Listing,
    Picture,
    Row,
    RowGroup,
    Section,
    Sheet,
    Steps,
    Table,
    bulleted,
)
from fsdp_testing.search.certificate.axes import WORLDS
from fsdp_testing.search.certificate.causes import CellCause
from fsdp_testing.search.certificate.summary import FACES, VERDICTS, Summary

REASONS_AT_SIGHT = 8
CAPTION = "One square for each strategy, mesh and face: its cells share the values in its row."
LEGEND = Facts(
    (
        ("holds", "green: every cell of the square is right"),
        ("fails", "red: every cell fails; pale with an edge: some do"),
        ("unknown", "violet: a cell has no verdict, and none fails"),
        ("empty", "not claimed, or no such cell"),
    ),
    ("pass", "fail", "unknown", "not_claimed"),
)
LETTERS = Facts(
    (
        ("S", "a micro-batch that reduces gradients"),
        ("N", "one that keeps them local (`no_sync`)"),
        ("s, n", "the same, with a part of the model left out"),
    )
)


def certificate_sheet(summary: Summary) -> Sheet:
    """Return the sheet of a certificate."""
    rows = [face for face in FACES if any(face in faces for faces in summary.faces.values())]
    worlds = [f"{strategy} {mesh}" for strategy, meshes in WORLDS.items() for mesh in meshes]
    picture = cube_picture(summary.faces, rows, [world for world in worlds if world in summary.faces])
    reasons = tuple(Line(f"{number:,} x {reason}") for reason, number in summary.reasons.items())
    missing = tuple(Line(f"{number:,} cells need {tags}") for tags, number in summary.not_claimed.items())
    why = tuple(_article(cause, summary.implementation) for cause in summary.causes)
    sections = (
        Section(
            "Where", (LEGEND, LETTERS, Picture(picture, CAPTION, "The cube", table=_faces(summary))), anchor="where"
        ),
        Section("Why", why, anchor="why", kind="fail"),
        Section("Unknown", reasons, anchor="unknown", kind="unknown", at_sight=REASONS_AT_SIGHT),
        Section("Not claimed", missing, anchor="not-claimed", kind="not_claimed", at_sight=REASONS_AT_SIGHT),
    )
    return Sheet(
        title=f"{summary.implementation}: small cases",
        exit_code=summary.exit_code,
        conclusion=f"{summary.implementation}: {summary.conclusion()}",
        lead=(bulleted(summary.notes()),),
        sections=tuple(section for section in sections if section.blocks),
        subject=f"{summary.implementation} in every small case",
        environment=summary.environment,
    )


def _article(cause: CellCause, name: str) -> Article:
    known = f"known failure {cause.known} {cause.link}".rstrip() + ". " if cause.known else ""
    title = f"The case as a document; saved as case.json, `fsdp-verify replay case.json --implementation {name}` runs it again"
    document = Fold(title, (Listing(cause.case.to_json(indent=1)),), page_only=True)
    heading = f"{cause.signature}: {cause.cells:,} cells, the simplest: {cause.cell.words}"
    return Article(heading, (Line(f"{known}{cause.reason}"), Steps(cause.schedule), document), kind="fail")


def _faces(summary: Summary) -> Table:
    """Return the cube as a table: every face but schedules that hold everywhere."""
    strategies = [strategy for strategy in WORLDS if summary.at(strategy, "all")]
    faces = [(f"mesh: {mesh}", mesh, "all") for mesh in dict.fromkeys(m for s in strategies for m in WORLDS[s])]
    faces += [(face, "", face) for face in FACES[1:]]
    rows = []
    for label, mesh, face in faces:
        counted = [summary.at(f"{strategy} {mesh}".strip(), face) for strategy in strategies]
        if not label.startswith("first: ") or any(set(counts) - {VERDICTS[0]} for counts in counted):
            rows.append(Row(label, tuple(map(_cell, counted))))
    return Table("cells that hold", tuple(strategies), (RowGroup(tuple(rows)),), numbers=True)


def _cell(counts: Counter[str]) -> Cell:
    total, (passes, fails, unknown) = sum(counts.values()), (counts[word] for word in VERDICTS)
    if not total:
        return Cell("-", "not_claimed")
    kind = "fail" if fails else "unknown" if unknown else ""
    return Cell(f"{passes:,}" if passes == total else f"{passes:,} of {total:,}", kind)
