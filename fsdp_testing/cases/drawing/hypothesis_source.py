"""Lets Hypothesis tests draw the same cases: through the same generator, with choices that Hypothesis makes.

Shrinking is Hypothesis's own: every choice is ordered from simple to intricate.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeVar

from hypothesis import strategies as st

from fsdp_testing.cases.drawing.drawing import CaseDrawer
from fsdp_testing.cases.drawing.features import Scope
from fsdp_testing.cases.records import Case
from fsdp_testing.cases.records.capabilities import CAPABILITIES, check_capabilities

T = TypeVar("T")


class HypothesisChoices:
    """The source of choices inside a Hypothesis test."""

    def __init__(self, draw: st.DrawFn) -> None:
        self._draw = draw

    def integer(self, low: int, high: int) -> int:
        return self._draw(st.integers(low, high))

    def chance(self, one_in: int) -> bool:
        # The simplest answer is no; the highest number means yes, so that shrinking moves towards no.
        return self._draw(st.integers(0, one_in - 1)) == one_in - 1

    def more(self, one_in: int) -> bool:
        return self._draw(st.integers(0, one_in - 1)) != 0

    def pick(self, options: Sequence[T]) -> T:
        return options[self._draw(st.integers(0, len(options) - 1))]

    def subset(self, count: int, *, sparse: bool) -> int:
        mask = self._draw(st.integers(0, 2**count - 1))
        return mask & self._draw(st.integers(0, 2**count - 1)) if sparse else mask


def cases(
    *,
    capabilities: Iterable[str] = CAPABILITIES,
    world_sizes: Sequence[int] = (2,),
    max_operations: int = 12,
    excluded: Iterable[str] = (),
    tensor_parallel: int = 1,
) -> st.SearchStrategy[Case]:
    """Legal cases, for `@given` tests of any implementation.

    Args:
        capabilities: Claims of the implementation under test: only these are drawn.
        world_sizes: Numbers of ranks; the first is drawn most.
        max_operations: Longest program.
        excluded: Features (`fsdp_testing.cases.drawing.FEATURES`) that are never drawn.
        tensor_parallel: How many ranks share one model; layouts of its modules are drawn.

    Raises:
        InvalidImplementation: An unknown capability.
        InvalidArgument: An unknown feature, or sizes below 1.
    """
    claimed = check_capabilities(capabilities, "cases")
    drawer = CaseDrawer(Scope(claimed, tuple(world_sizes), max_operations, frozenset(excluded), tensor_parallel))

    @st.composite
    def drawn(draw: st.DrawFn) -> Case:
        return drawer.draw(HypothesisChoices(draw))

    return drawn()
