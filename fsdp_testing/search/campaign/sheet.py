"""A campaign as people read it: how much ran, what was known, what could not be judged."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from fsdp_testing.cases.records import Verdict
from fsdp_testing.report.sheet import Line, Sheet, listed, numbered
from fsdp_testing.search.campaign.tally import CampaignTally

REASONS_AT_SIGHT = 10


def campaign_sheet(tally: CampaignTally, name: str, state: Path) -> Sheet:
    """Return what a campaign on an implementation says; its findings were told when they were made."""
    conclusion = "; ".join(_conclusions(tally))
    return Sheet(name, tally.exit_code, conclusion, lead=(Line(_ran(tally, state)), *_known(tally), *_others(tally)))


def _ran(tally: CampaignTally, state: Path) -> str:
    mean = tally.operations / tally.run if tally.run else 0.0
    extra = f", {tally.variants} of them for what a known failure may hide" if tally.variants else ""
    return (
        f"{tally.run} cases in {tally.seconds:.1f} s ({tally.rate:.1f}/s, {mean:.1f} operations each{extra}); "
        f"{len(tally.discovered)} findings, met again {sum(tally.duplicates.values())} times; "
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
        yield Line(f"cases that failed by a known failure: {count} ({count / tally.run:.1%})")
    for rule in dict.fromkeys([*(name for name, _ in tally.known.most_common()), *tally.postponed]):
        met, postponed = tally.known[rule], tally.postponed[rule]
        later = f", {postponed} put off, since it costs the ranks" if postponed else ""
        yield Line(f"  {met / max(tally.run, 1):.1%} ({met} cases{later}): {rule}", "meaning")


def _others(tally: CampaignTally) -> Iterator[Line]:
    yield from _counted("could not be judged", tally.unjudged)
    if tally.not_investigated:
        how = "cases that fail like others that were investigated, and were not themselves"
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
        yield f"{sum(tally.found_before.values())} cases failed as an earlier run of this campaign found"
    if tally.not_investigated:
        yield f"{tally.not_investigated} cases fail like others that were investigated"
    if not (confirmed or tally.found_before or tally.not_investigated) and tally.verdicts[Verdict.FAIL]:
        yield f"{tally.verdicts[Verdict.FAIL]} cases fail"
    if tally.exit_code == 3:
        yield from tally.unknown()
    if tally.exit_code == 0:
        yield "every case that ran is right, or fails as is known"
