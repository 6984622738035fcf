"""What has happened in one campaign so far? Counts, and what was found."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from fsdp_testing.cases.records import Verdict
from fsdp_testing.checks.findings.discovery import Discovery
from fsdp_testing.search.campaign.state import KNOWN


def decided(statuses: Mapping[str, int]) -> int:
    """Return how many cases are right, or fail as is known."""
    return statuses.get(Verdict.PASS.value, 0) + statuses.get(KNOWN, 0)


@dataclass(slots=True)
class CampaignTally:
    """What has happened in this run.

    Attributes:
        drawn: Cases drawn.
        run: Cases run and judged, variants included.
        variants: Cases of those that are others without what brought a known failure about.
        operations: Operations in them.
        statuses: Cases by verdict; `known` are those that failed by a known failure.
        discovered: What was found, each defect once.
        duplicates: How often each was met again.
        not_investigated: Suspects like others that were investigated: cases that fail, each for a reason that nobody looked for.
        found_before: What an earlier run of the campaign found and this one met again, with how often.
        unjudged: Why some cases could not be judged.
        known: How many cases failed by each known failure.
        postponed: How many cases were put off for each known failure that costs the ranks.
        resumed: Cases that an earlier campaign drew and did not run.
        left: Cases drawn that are left for the next campaign.
        examples: Examples of known failures that were run again, and how many there are.
        gone: Known failures whose example passes: their rules were dropped.
        drawing_seconds: Time spent on drawing.
        investigating_seconds: Time that lanes spent on suspects instead of new cases, added up over lanes.
        seconds: Wall time.
        worlds_lost: Worlds that had to be replaced.
    """

    drawn: int = 0
    run: int = 0
    variants: int = 0
    operations: int = 0
    statuses: Counter[str] = field(default_factory=Counter)
    discovered: list[Discovery] = field(default_factory=list)
    duplicates: Counter[str] = field(default_factory=Counter)
    not_investigated: int = 0
    found_before: Counter[str] = field(default_factory=Counter)
    unjudged: Counter[str] = field(default_factory=Counter)
    known: Counter[str] = field(default_factory=Counter)
    postponed: Counter[str] = field(default_factory=Counter)
    resumed: int = 0
    left: int = 0
    examples: tuple[int, int] = (0, 0)
    gone: list[str] = field(default_factory=list)
    drawing_seconds: float = 0.0
    investigating_seconds: float = 0.0
    seconds: float = 0.0
    worlds_lost: int = 0

    def count(self, operations: int, variant: bool) -> None:
        """Count one case that ran and was judged."""
        self.run += 1
        self.operations += operations
        self.variants += variant

    @property
    def exit_code(self) -> int:
        """Return 1 if a case failed that no known failure explains, 3 if a case is not judged or none passed, else 0.

        What fails among other cases and passes alone is neither right nor wrong.
        """
        if self.found_before or self.not_investigated or any(discovery.confirmed for discovery in self.discovered):
            return 1
        return 3 if self.unjudged or self.discovered or not decided(self.statuses) else 0

    def unknown(self) -> list[str]:
        """Return why this run does not say that all is right although nothing was refuted, a sentence each."""
        once = [discovery.name for discovery in self.discovered if not discovery.confirmed]
        said = [f"{sum(self.unjudged.values())} cases could not be judged"] if self.unjudged else []
        said += [f"what failed once passes alone: {', '.join(once)}"] if once else []
        return said or ["no case was judged, so nothing is known; give more --seconds, or look at `fsdp-verify doctor`"]

    @property
    def rate(self) -> float:
        """Return the cases per second."""
        return self.run / self.seconds if self.seconds else 0.0

    @property
    def discarded(self) -> int:
        """Return how many cases were drawn, did not run, and are not left for the next campaign: always 0."""
        return self.drawn + self.resumed - (self.run - self.variants) - self.left
