"""The counts and discoveries of one run of a campaign, and their sheet."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from fsdp_testing.cases.records import Verdict
from fsdp_testing.checks.findings.discovery import Discovery
from fsdp_testing.report.sheet import Line, Sheet, listed, numbered


def exit_code_of(verdicts: Mapping[Verdict, int], discovered: list[Discovery]) -> int:
    """Return 1 if a failing case is no known failure, 3 if one is unknown or none passes or is a known failure, else 0.

    A case that fails in a batch and passes alone is neither right nor wrong: unknown.
    """
    if verdicts.get(Verdict.FAIL) or any(discovery.confirmed for discovery in discovered):
        return 1
    decided = verdicts.get(Verdict.PASS) or verdicts.get(Verdict.EXPECTED_FAILURE)
    return 3 if verdicts.get(Verdict.UNKNOWN) or discovered or not decided else 0


@dataclass(slots=True)
class CampaignTally:
    """The counts of this run.

    Attributes:
        drawn: Cases drawn.
        run: Cases run and judged, variants included.
        variants: How many of them were variants without the cause of a known failure.
        operations: Operations in all cases.
        verdicts: Verdicts on all cases; an expected failure is a known failure.
        discovered: The findings, each defect once.
        duplicates: How often each was met again.
        not_investigated: Suspects that look like investigated ones: failing cases whose own cause is unknown.
        found_before: Findings of an earlier run that this run met again, with counts.
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
    verdicts: Counter[Verdict] = field(default_factory=Counter)
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

    @property
    def exit_code(self) -> int:
        """Return 1 if a failing case is no known failure, 3 if one is unknown or none passed, else 0."""
        return self.exit_code_for(self.verdicts)

    def exit_code_for(self, verdicts: Mapping[Verdict, int]) -> int:
        """Return the exit code for the verdicts of all runs; an earlier finding that this run met again counts as a failure."""
        code = 1 if self.found_before else exit_code_of(verdicts, self.discovered)
        return code or (3 if self.unjudged else 0)

    def unknown(self) -> list[str]:
        """Return the reasons for having no verdict although nothing was refuted, a sentence each."""
        once = [discovery.name for discovery in self.discovered if not discovery.confirmed]
        reasons = [f"{numbered(sum(self.unjudged.values()), 'case')} could not be judged"] if self.unjudged else []
        reasons += [f"cases that failed once and pass alone: {', '.join(once)}"] if once else []
        if not reasons and self.verdicts[Verdict.UNKNOWN]:
            count = numbered(self.verdicts[Verdict.UNKNOWN], "case")
            reasons = [f"{count} failed among others, as an earlier run found, and passed alone"]
        nothing = "no case was judged: no verdict; give more --seconds, or run `fsdp-verify doctor`"
        return reasons or [nothing]

    @property
    def rate(self) -> float:
        return self.run / self.seconds if self.seconds else 0.0

    @property
    def discarded(self) -> int:
        """Return how many cases were drawn, did not run, and are not left for the next campaign: always 0."""
        return self.drawn + self.resumed - (self.run - self.variants) - self.left


REASONS_AT_SIGHT = 10


def campaign_sheet(tally: CampaignTally, name: str, state: Path) -> Sheet:
    """Return the sheet of a campaign on an implementation; its findings were printed as they came."""
    conclusion = "; ".join(_conclusions(tally))
    return Sheet(name, tally.exit_code, conclusion, lead=(Line(_ran(tally, state)), *_known(tally), *_others(tally)))


def _ran(tally: CampaignTally, state: Path) -> str:
    mean = tally.operations / tally.run if tally.run else 0.0
    extra = f", {tally.variants} of them to look behind known failures" if tally.variants else ""
    return (
        f"{numbered(tally.run, 'case')} in {tally.seconds:.1f} s ({tally.rate:.1f}/s, {mean:.1f} operations each{extra}); "
        f"{numbered(len(tally.discovered), 'finding')}, met again {numbered(sum(tally.duplicates.values()), 'time')}; "
        f"{tally.drawn} cases drawn, {tally.left} left for the next campaign, {tally.discarded} discarded; "
        f"state in {state}"
    )


def _known(tally: CampaignTally) -> Iterator[Line]:
    ran, there = tally.examples
    if there:
        yield Line(f"examples of known failures run again: {ran} of {there}; {len(tally.gone)} pass now")
    for name in tally.gone:
        yield Line(f"  the example of known failure {name!r} passes: its rule was dropped", "stale")
    if count := tally.verdicts[Verdict.EXPECTED_FAILURE]:
        yield Line(
            f"cases that failed as a known failure or an earlier finding does: {count} ({count / tally.run:.1%})"
        )
    for rule in dict.fromkeys([*(name for name, _ in tally.known.most_common()), *tally.postponed]):
        met, postponed = tally.known[rule], tally.postponed[rule]
        later = f", {postponed} postponed, because it kills ranks" if postponed else ""
        yield Line(f"  {met / max(tally.run, 1):.1%} ({numbered(met, 'case')}{later}): {rule}", "meaning")


def _others(tally: CampaignTally) -> Iterator[Line]:
    yield from _counted("could not be judged", tally.unjudged)
    if tally.not_investigated:
        how = "failing cases that look like investigated ones"
        yield Line(f"{how}: {tally.not_investigated}")
    yield from _counted("cases that failed as an earlier run of this campaign found", tally.found_before)


def _counted(title: str, counts: Mapping[str, int]) -> Iterator[Line]:
    if counts:
        yield Line(f"{title}: {sum(counts.values())}")
        ranked = sorted(counts.items(), key=lambda item: -item[1])
        yield from (Line(f"  {number} x {reason}", "meaning") for reason, number in ranked[:REASONS_AT_SIGHT])


def _conclusions(tally: CampaignTally) -> Iterator[str]:
    confirmed = [discovery.name for discovery in tally.discovered if discovery.confirmed]
    if confirmed:
        yield f"{numbered(len(confirmed), 'finding')}: {listed(confirmed)}"
    if tally.found_before:
        yield f"{numbered(sum(tally.found_before.values()), 'case')} failed as an earlier run of this campaign found"
    if tally.not_investigated:
        yield f"{numbered(tally.not_investigated, 'case')} failed like others that were investigated"
    if not (confirmed or tally.found_before or tally.not_investigated) and tally.verdicts[Verdict.FAIL]:
        yield f"{numbered(tally.verdicts[Verdict.FAIL], 'case')} failed"
    if tally.exit_code == 3:
        yield from tally.unknown()
    if tally.exit_code == 0:
        yield "every case that ran is right, or a known failure"
