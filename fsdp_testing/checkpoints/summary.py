"""What does an exchange of checkpoints say, in numbers? Computed once; terminal, page and JSON show the same."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fsdp_testing.checkpoints.exchange import Result
from fsdp_testing.checkpoints.verdicts import FAILS, HOLDS, REFUSED, STATUSES, UNKNOWN
from fsdp_testing.records.document import Format

FORMAT = Format("fsdp_testing/checkpoints", 1)
SAVED = "saved"
"""Column of what is said about saving itself."""


@dataclass(frozen=True, slots=True)
class Cause:
    """Results with one status and one reason.

    Attributes:
        status: `fails`, `unknown` or `refused`.
        reason: The first entry that differs, or what was raised.
        count: How many there are.
        example: Saver, loader, subject and way of the first one.
    """

    status: str
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
    def statuses(self) -> Counter[str]:
        """Return how many loaded states there are of each status."""
        return Counter(result.status for result in self.results if result.loader)

    @property
    def exit_code(self) -> int:
        """Return 1 if anything fails, 3 if anything is unknown or nothing holds, else 0."""
        found = Counter(result.status for result in self.results)
        if found[FAILS]:
            return 1
        return 3 if found[UNKNOWN] or not self.statuses[HOLDS] else 0

    def conclusion(self) -> str:
        """Return what was found, in a sentence."""
        found = self.statuses
        others = [(FAILS, "fail"), (REFUSED, "are refused with an error"), (UNKNOWN, "are unknown")]
        text = f"{found[HOLDS]:,} of {sum(found.values()):,} loaded states are equal to what was saved, and train on equally"
        return text + "".join(f"; {found[status]:,} {verb}" for status, verb in others if found[status])

    def cells(self) -> dict[str, dict[str, Counter[str]]]:
        """Return saver -> loader (and `SAVED`) -> status -> how many."""
        found: dict[str, dict[str, Counter[str]]] = {place: {} for place in self.places}
        for result in self.results:
            found[result.saver].setdefault(result.loader or SAVED, Counter())[result.status] += 1
        return found

    def by_implementation(self) -> dict[str, dict[str, Counter[str]]]:
        """Return the same for implementations, all layouts together."""
        found: dict[str, dict[str, Counter[str]]] = {}
        for saver, loaders in self.cells().items():
            row = found.setdefault(saver.split()[0], {})
            for loader, counts in loaders.items():
                row.setdefault(loader.split()[0], Counter()).update(counts)
        return found

    def causes(self) -> list[Cause]:
        """Return why states do not hold, what fails first, the most frequent first; layouts are not told apart."""
        groups: dict[tuple[str, str, str, str], list[Result]] = {}
        for one in self.results:
            if one.status != HOLDS:
                who = f"{one.saver.split()[0]} -> {one.loader.split()[0] if one.loader else SAVED}"
                groups.setdefault((one.status, one.reason, who, one.subject), []).append(one)
        found = [Cause(key[0], key[1], len(same), _example(same[0])) for key, same in groups.items()]
        return sorted(found, key=lambda cause: (STATUSES.index(cause.status), -cause.count))

    def to_json(self) -> str:
        """Return it as a JSON document."""
        return FORMAT.write(self, indent=1)


def _example(result: Result) -> str:
    loaded = f" -> {result.loader}" if result.loader else ", saved"
    return f"{result.saver}{loaded} ({result.subject}; {result.way})"


def worst(counts: Mapping[str, int]) -> str:
    """Return the status that a cell shows."""
    return next(status for status in STATUSES if counts.get(status))


def summary_of(
    places: Sequence[str], results: Sequence[Result], environment: Mapping[str, str], seconds: float
) -> Summary:
    """Return what results say."""
    return Summary(dict(environment), tuple(places), tuple(results), seconds)
