"""What is an exhibit? A real bug's story and source, the mutation, the checks that must catch it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from fsdp_testing.museum.planting import Change, instead, planting

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


class Hall(list[Exhibit]):
    """The exhibits of one file, in the order in which they stand there."""

    def exhibit(
        self, number: str, owner: Any, name: str, source: str, checks: str, *, also: Sequence[Change] = (), **facts: Any
    ) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """Decorate the mutation of an exhibit, which gets the original as its first argument.

        The first line of its docstring is the title, the rest is the story.

        Args:
            number: The exhibit's id.
            owner: Module or class in which a function is replaced.
            name: Name of that function.
            source: Public references.
            checks: Names of the checks that must fail on it, separated by blanks.
            also: What else is replaced at the same time.
            **facts: Other fields of `Exhibit`.
        """

        def show(mutation: Callable[..., Any]) -> Callable[..., Any]:
            title, _, story = (inspect.getdoc(mutation) or "").partition("\n\n")
            title = title[:1].lower() + title[1:].rstrip(".")
            plant = planting((owner, name, instead(mutation)), *also)
            self.append(Exhibit(number, title, " ".join(story.split()), source, plant, tuple(checks.split()), **facts))
            return mutation

        return show
