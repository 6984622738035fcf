"""Squares that are shaded by verdict: the cube of small cases (world by face), and the matrix of pairs of traits."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import groupby

from markupsafe import Markup

from fsdp_testing.report.drawings.svg import WIDTH, Drawing

LEFT = 210
CHARACTER = 6.2
ROW = 16
HEAD = 40
NAME_WIDTH = 180
PAIR = 12
SHADES = {"fail": "fails", "unknown": "unknown", "refused": "refused", "pass": "holds"}
"""Verdicts by importance, each with its class: a square gets the class of the first verdict that occurs in it."""


def cube_picture(
    faces: Mapping[str, Mapping[str, Mapping[str, int]]], rows: Sequence[str], worlds: Sequence[str]
) -> Markup:
    """Return the drawing.

    Args:
        faces: World -> face -> verdict -> number of cells.
        rows: Faces, from top to bottom.
        worlds: Strategy and mesh, from left to right; one strategy's stand in a row.
    """
    drawing = Drawing(HEAD + ROW * len(rows), "Which cells hold and which fail, by strategy and mesh")
    left = max(LEFT, CHARACTER * max(map(len, rows), default=0))
    width = (WIDTH - left) / max(len(worlds), 1)
    strategies = [world.split(" ")[0] for world in worlds]
    for place, world in enumerate(worlds):
        x = left + width * place
        if place == 0 or strategies[place] != strategies[place - 1]:
            drawing.label_in(x, 14, width * strategies.count(strategies[place]), strategies[place], "strong")
            drawing.line("grid", (x - 1, 0), (x - 1, HEAD + ROW * len(rows)))
        drawing.text(x + width / 2, 32, world.split(" ")[1], "soft", "middle")
    for number, face in enumerate(rows):
        y = HEAD + ROW * number
        drawing.text(0, y + 12, face)
        for place, world in enumerate(worlds):
            _square(drawing, (left + width * place, y), width, (world, face), faces.get(world, {}).get(face, {}))
    return drawing.markup()


def _square(
    drawing: Drawing, corner: tuple[float, float], width: float, names: tuple[str, str], counts: Mapping[str, int]
) -> None:
    ran = sum(counts.values())
    if not ran:
        return
    worst = next(verdict for verdict in SHADES if counts.get(verdict))
    part = SHADES[worst] if counts[worst] == ran else f"{SHADES[worst]} some"
    text = ", ".join(f"{count} {SHADES[verdict]}" for verdict, count in sorted(counts.items()))
    drawing.box(f"cell {part}", *corner, (width - 2, ROW - 2), f"{names[0]}, {names[1]}: {text}")


def matrix_picture(
    traits: Sequence[str], word: Callable[[int, int], str], classes: Mapping[str, str], single: Collection[str]
) -> Markup:
    """Return the lower half of the matrix, each trait named where its row and its column meet.

    Args:
        traits: Traits, in their order.
        word: The result of the pair of a trait and an earlier one, by their indices.
        classes: Classes of the squares, by word; squares with other words stay empty.
        single: Words whose squares stand alone and say which pair they are; others are joined along a row.
    """
    drawing = Drawing(PAIR * len(traits) + 4, "Which pairs of traits hold, fail, or did not run")
    width = (WIDTH - NAME_WIDTH) / max(len(traits), 1)

    def look(row: int, column: int) -> tuple[str, int]:
        return word(row, column), column if word(row, column) in single else -1

    for row, trait in enumerate(traits):
        start, looks = 0, [look(row, column) for column in range(row)]
        for (became, alone), group in groupby(looks):
            length = len(list(group))
            if became in classes:
                hint = f"{trait} with {traits[start]}: {became}" if alone >= 0 else f"{trait}: {became}"
                drawing.box(f"cell {classes[became]}", width * start, PAIR * row, (width * length, PAIR - 1), hint)
            start += length
        drawing.text(width * row + 4, PAIR * (row + 1) - 3, trait)
    return drawing.markup()
