"""Which parts of the harness execute which mutants of a sample, and how that is kept for another sample."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from mutant_subjects import Mutant

KINDS = ("pairs", "run", "tensor")
OF_CHECKS = KINDS[1:]
"""Their parts have names of their own, so that what was measured holds for another harness."""


@dataclass(slots=True)
class Executed:
    """Which parts of the harness execute which mutant of a sample.

    Attributes:
        mutants: Their keys; places in this list stand for them.
        places: File and function of each.
        everywhere: Those outside of functions: whatever imports the file executes them.
        parts: Name -> kind -> part -> the mutants that it executes; parts that fail without any mutant are not among them.
        sound: Whether the sound copy passed where all cases are asked at once, and random ones (`Bench.control`).
    """

    mutants: list[str]
    places: list[str] = field(default_factory=list)
    everywhere: list[int] = field(default_factory=list)
    parts: dict[str, dict[str, dict[str, list[int]]]] = field(default_factory=dict)
    sound: bool = False

    @classmethod
    def of(cls, mutants: Sequence[Mutant], names: Sequence[str]) -> Executed:
        """Return what is known before anything is measured."""
        places = [f"{mutant.place} {mutant.function}" for mutant in mutants]
        return cls([mutant.key for mutant in mutants], places, parts={name: {} for name in names})

    def take(self, text: str) -> None:
        """Take over what was kept of a sample, perhaps another one."""
        kept: dict[str, Any] = json.loads(text)
        self.sound |= kept["sound"] and kept["mutants"] == self.mutants
        numbers = [
            self._like(key, kept["mutants"], kept["places"], place) for key, place in zip(self.mutants, self.places)
        ]
        for name, kinds in kept["parts"].items():
            for kind, parts in kinds.items():
                on = {part: int(bits, 16) for part, bits in parts.items()}
                self.parts[name][kind] = {
                    part: [number for number, like in enumerate(numbers) if bits & like] for part, bits in on.items()
                }

    @staticmethod
    def _like(key: str, keys: list[str], places: list[str], place: str) -> int:
        """The bits of a mutant among those that were kept: its own, or those of its file, or all.

        Those of its function would miss parts: what executes one line of it may not execute another.
        """
        same = [number for number, other in enumerate(keys) if other == key]
        same = same or [number for number, other in enumerate(places) if other.split()[0] == place.split(maxsplit=1)[0]]
        return sum(1 << number for number in same or range(len(keys)))

    def text(self, kinds: Sequence[str], *, sound: bool) -> str:
        """Return what is kept of these kinds: the mutants that a part executes as bits of a number."""
        parts = {
            name: {
                kind: {part: f"{sum(1 << number for number in on):x}" for part, on in of_kind.items()}
                for kind, of_kind in of_name.items()
                if kind in kinds
            }
            for name, of_name in self.parts.items()
        }
        kept = {"mutants": self.mutants, "places": self.places, "sound": sound and self.sound, "parts": parts}
        return json.dumps(kept, indent=0) + "\n"

    def parts_of(self, mutant: Mutant, name: str, kind: str) -> list[str]:
        """The parts of a kind that execute a mutant; first those that execute few others, which are about it."""
        number, parts = self.mutants.index(mutant.key), self.parts[name][kind].items()
        executing = [(len(mutants), part) for part, mutants in parts if number in mutants or number in self.everywhere]
        return [part for _, part in sorted(executing)]

    def asked_of(self, mutant: Mutant, names: Sequence[str], kind: str) -> dict[str, list[str]]:
        """The parts that are asked of each implementation.

        The implementations of a subject are ways to the same code: a check that one of them passes is not asked of the next.
        Chunks of `pairs` have only their number in common, so all are asked. Fuzzing has no parts.
        """
        if kind == "fuzz":
            return {name: [] for name in names}
        asked: dict[str, list[str]] = {}
        for name in names:
            before = {part for parts in asked.values() for part in parts} if kind != "pairs" else set()
            parts = [part for part in self.parts_of(mutant, name, kind) if part not in before]
            asked |= {name: parts} if parts else {}
        return asked

    def holds(self, mutant: Mutant) -> bool:
        """Whether any part executes it, or may: what a kind executes is measured when a stage first asks it."""
        kinds = [(name, kind) for name, kinds in self.parts.items() for kind in kinds]
        return len(kinds) < len(self.parts) * len(KINDS) or any(self.parts_of(mutant, *each) for each in kinds)
