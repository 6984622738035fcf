"""What is an exhibit? A real bug's story and source, the mutation, the checks that must catch it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

Plant = Callable[[], AbstractContextManager[None]]


@dataclass(frozen=True, slots=True)
class Exhibit:
    """One bug.

    Attributes:
        id: "B036": its number in the collection.
        title: The defect in one line.
        story: Who met it and what it did, in a few sentences.
        source: Public references: issues and pull requests.
        plant: Opens a context in which the reference has the bug (in the process that calls it).
        checks: Names of the checks each of which must fail on it; at least one.
        path: Which of the reference's two ways in is used: "wrapper" or "composable".
        world_sizes: World sizes on which it shows.
        silent: Whether it gives wrong numbers without an error.
        fuzzed: Whether random cases can show it; False for what no operation of theirs does.
    """

    id: str
    title: str
    story: str
    source: str
    plant: Plant
    checks: tuple[str, ...]
    path: str = "wrapper"
    world_sizes: tuple[int, ...] = (2,)
    silent: bool = True
    fuzzed: bool = True

    @property
    def target(self) -> str:
        """Import string under which the reference with this bug is judged."""
        return f"fsdp_testing.museum.collection:{self.id}"
