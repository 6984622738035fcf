"""How do the parts of a divided campaign become one? Each part once; what was found by several is found once.

The result is a campaign like any other, which goes on where its parts ended: cases that one part drew further than another
are left for it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from fsdp_testing.base.document import read_text
from fsdp_testing.cases.records import Verdict
from fsdp_testing.checks.findings.discovery import Discovery
from fsdp_testing.errors import InvalidArgument, InvalidRecord
from fsdp_testing.report.merging import Part, added, in_order
from fsdp_testing.search.campaign.state import Progress, StateDirectory, read_progress
from fsdp_testing.search.campaign.tally import decided

_WHOLE = "Remove the folder, or copy it whole."
# Parts draw about as fast as one another. What a slower one has still to draw becomes a list.
_MOST_BEHIND = 10_000_000


@dataclass(frozen=True, slots=True)
class MergedCampaign:
    """What the parts gave together; `repeated` counts findings that an earlier part has too."""

    progress: Progress
    found: tuple[Discovery, ...]
    repeated: int

    @property
    def exit_code(self) -> int:
        """Return what `fuzz` would return for all cases of all parts."""
        if self.progress.not_investigated or any(discovery.confirmed for discovery in self.found):
            return 1
        statuses = self.progress.statuses
        return 3 if self.found or statuses.get(Verdict.UNKNOWN.value) or not decided(statuses) else 0


def merge_campaigns(parts: Iterable[Path], into: Path) -> MergedCampaign:
    """Put the states of all parts together, and write them to the new directory `into`.

    Raises:
        InvalidRecord: A state or a finding is damaged.
        InvalidArgument: A part is missing or there twice, parts are not of one campaign, or `into` is no new directory.
    """
    states = {path: read_progress(path) for path in parts}
    fastest = max(states, key=lambda path: states[path].drawn)
    if states[fastest].drawn - min(state.drawn for state in states.values()) > _MOST_BEHIND:
        raise InvalidRecord(
            f"{fastest / 'state.json'}.drawn: expected at most {_MOST_BEHIND} cases more than another part, got "
            f"{states[fastest].drawn}. The file is damaged."
        )
    advice = "Give the --state directories of `fsdp-verify fuzz ... --shard 1/N` to `N/N`, all else alike."
    ordered = in_order({str(path): state for path, state in states.items()}, _part_of, advice)
    if into.exists() and (not into.is_dir() or any(into.iterdir())):
        raise InvalidArgument(
            f"--state: expected a directory that is new or empty, got {str(into)!r}. Give another one."
        )
    target = StateDirectory(into, next(iter(ordered.values())).implementation)
    discoveries: dict[object, Discovery] = {}
    repeated = 0
    # All is read before anything is written.
    copies: list[tuple[str, list[tuple[str, str]]]] = []
    for path in map(Path, ordered):
        for folder in StateDirectory(path, states[path].implementation).found():
            file = folder / "finding.json"
            discovery = Discovery.from_json(read_text(file, "a finding", _WHOLE), str(file))
            key = discovery.key if discovery.confirmed else ("unconfirmed", discovery.signature)
            if key in discoveries:
                repeated += 1
                continue
            discoveries[key] = discovery
            copies.append((f"found/{folder.name}", _texts(folder)))
        copies.append(("unjudged", _texts(path / "unjudged")))
    progress = joined_progress(list(ordered.values()))
    for folder_name, files in copies:
        target.write_files(folder_name, files)
    target.save(progress)
    return MergedCampaign(progress, tuple(discoveries.values()), repeated)


def joined_progress(states: list[Progress]) -> Progress:
    """Return the progress of the whole campaign; `states` are those of its parts, in their order."""
    of = len(states)

    def whole(part: int, number: int) -> int:
        return number * of + part

    ends = [whole(part, state.drawn - 1) + 1 for part, state in enumerate(states) if state.drawn]
    drawn = max(ends, default=0)
    unfinished = [whole(part, number) for part, state in enumerate(states) for number in state.unfinished]
    # What a slower part has not drawn yet.
    unfinished += [number for part, state in enumerate(states) for number in range(whole(part, state.drawn), drawn, of)]
    return Progress(
        implementation=states[0].implementation,
        campaigns=max(state.campaigns for state in states),
        drawn=drawn,
        run=sum(state.run for state in states),
        seconds=sum(state.seconds for state in states),
        statuses=dict(sorted(added(state.statuses for state in states).items())),
        known=dict(sorted(added(state.known for state in states).items())),
        not_investigated=sum(state.not_investigated for state in states),
        unfinished=tuple(sorted(unfinished)),
        turns={name: turn for state in states for name, turn in state.turns.items()},
        drawn_by=states[0].drawn_by,
        known_by=states[0].known_by,
    )


def _part_of(state: Progress) -> Part:
    alike = {"implementation": state.implementation, "cases by": state.drawn_by}
    return Part(
        () if state.shard == (1, 1) else state.shard, {**alike, "known failures": state.known_by or "not recorded"}
    )


def _texts(folder: Path) -> list[tuple[str, str]]:
    files = [file for file in sorted(folder.glob("*")) if file.is_file()]
    return [(file.name, read_text(file, "a file of a campaign", _WHOLE)) for file in files]
