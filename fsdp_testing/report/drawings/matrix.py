"""The matrix of pairs: one square for each pair of traits, shaded by its result."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import groupby

from markupsafe import Markup

from fsdp_testing.report.drawings.svg import WIDTH, Drawing

NAME_WIDTH = 180
ROW = 12


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
    drawing = Drawing(ROW * len(traits) + 4, "Which pairs of traits hold, fail, or did not run")
    width = (WIDTH - NAME_WIDTH) / max(len(traits), 1)

    def look(row: int, column: int) -> tuple[str, int]:
        return word(row, column), column if word(row, column) in single else -1

    for row, trait in enumerate(traits):
        start, looks = 0, [look(row, column) for column in range(row)]
        for (became, alone), group in groupby(looks):
            length = len(list(group))
            if became in classes:
                hint = f"{trait} with {traits[start]}: {became}" if alone >= 0 else f"{trait}: {became}"
                drawing.box(f"cell {classes[became]}", width * start, ROW * row, (width * length, ROW - 1), hint)
            start += length
        drawing.text(width * row + 4, ROW * (row + 1) - 3, trait)
    return drawing.markup()
