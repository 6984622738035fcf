"""An exchange of checkpoints in numbers: computed once; terminal, page and JSON show the same."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fsdp_testing.base.document import Format, decode
from fsdp_testing.cases.records import Verdict, exit_code
from fsdp_testing.search.checkpoints.exchange import Result

FORMAT = Format("fsdp_testing/checkpoints", 2)
SAVED = "saved"
"""Column of what is said about saving itself."""
MARKS = {"X": "one fails", "?": "one is unknown", "r": "one is refused: an error on every rank", "=": "all equal"}
"""What stands in a cell: the first of these that applies to a state in it."""


@dataclass(frozen=True, slots=True)
class Cause:
    """Results that do not hold for one reason.

    Attributes:
        mark: Of `MARKS`.
        reason: The first entry that differs, or what was raised.
        count: How many there are.
        example: Saver, loader, subject and way of the first one.
    """

    mark: str
    reason: str
    count: int
    example: str


@dataclass(frozen=True, slots=True)
class Summary:
    """A table of checkpoints.

    Attributes:
        environment: Versions.
        places: Implementations and layouts, in the order of rows and columns.
        results: Everything that was saved, and everything that was loaded.
        seconds: How long it took.
    """

    environment: Mapping[str, str]
    places: tuple[str, ...]
    results: tuple[Result, ...]
    seconds: float

    @property
    def loaded(self) -> list[Result]:
        """Return what is said of states that were loaded."""
        return [result for result in self.results if result.loader]

    @property
    def exit_code(self) -> int:
        """Return 1 if anything fails, 3 if anything is unknown or nothing holds, else 0."""
        code = exit_code(result.verdict for result in self.results)
        return code if any(result.verdict is Verdict.PASS for result in self.loaded) else code or 3

    def conclusion(self) -> str:
        """Return what was found, in a sentence."""
        marks = [result.mark for result in self.loaded]
        others = [("X", "fail"), ("r", "end with an error on every rank"), ("?", "are unknown")]
        text = f"{marks.count('='):,} of {len(marks):,} loaded states are equal to what was saved, and train on equally"
        return text + "".join(f"; {marks.count(mark):,} {verb}" for mark, verb in others if mark in marks)

    def cells(self) -> dict[str, dict[str, list[Result]]]:
        """Return saver -> loader (and `SAVED`) -> results."""
        cells: dict[str, dict[str, list[Result]]] = {place: {} for place in self.places}
        for result in self.results:
            cells[result.saver].setdefault(result.loader or SAVED, []).append(result)
        return cells

    def by_implementation(self) -> dict[str, dict[str, list[Result]]]:
        """Return the same for implementations, all layouts together."""
        table: dict[str, dict[str, list[Result]]] = {}
        for saver, loaders in self.cells().items():
            row = table.setdefault(saver.split()[0], {})
            for loader, results in loaders.items():
                row.setdefault(loader.split()[0], []).extend(results)
        return table

    def causes(self) -> list[Cause]:
        """Return why states do not hold, what fails first, the most frequent first; layouts are not distinguished."""
        groups: dict[tuple[str, str, str, str], list[Result]] = {}
        for result in self.results:
            if result.verdict is not Verdict.PASS:
                who = f"{result.saver.split()[0]} -> {result.loader.split()[0] if result.loader else SAVED}"
                groups.setdefault((result.mark, result.reason, who, result.subject), []).append(result)
        causes = [Cause(*key[:2], len(same), _example(same[0])) for key, same in groups.items()]
        return sorted(causes, key=lambda cause: (list(MARKS).index(cause.mark), -cause.count))

    def to_json(self) -> str:
        """Return it as a JSON document."""
        return FORMAT.write(self, indent=1)

    @staticmethod
    def from_json(text: str, where: str) -> Summary:
        """Return what `to_json` wrote; `where` it comes from is for messages.

        Raises:
            InvalidRecord: The text is something else, or damaged.
        """
        return decode(Summary, FORMAT.read(text, where))


def _example(result: Result) -> str:
    loaded = f" -> {result.loader}" if result.loader else ", saved"
    return f"{result.saver}{loaded} ({result.subject}; {result.way})"


def worst(results: Sequence[Result]) -> str:
    """Return the letter that a cell shows."""
    marks = {result.mark for result in results}
    return next(mark for mark in MARKS if mark in marks)
