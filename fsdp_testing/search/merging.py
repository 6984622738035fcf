"""The parts of one search become that search: each part once, of one subject, or refused by number (`report/merging.in_order`).

Parts of a campaign are the directories that `fuzz --shard --state` wrote; they become a campaign that continues where they
ended. Parts of a certificate are the documents that `certify --shard --json` wrote.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

from fsdp_testing.base.document import read_text
from fsdp_testing.checks.findings.discovery import Discovery
from fsdp_testing.errors import InvalidArgument
from fsdp_testing.report.merging import Part, in_order, versions_of
from fsdp_testing.search.campaign.tally import exit_code_of
from fsdp_testing.search.campaign.writing import STATE_FILE, findings_in, write_files
from fsdp_testing.search.certificate.causes import CellCause
from fsdp_testing.search.certificate.summary import Summary
from fsdp_testing.search.state import OPEN, State, read_state, write_state

_WHOLE = "Remove the folder, or copy it whole."


def total(values: Iterable[Any]) -> Any:
    """Return the sum of the parts' values: numbers are added, mappings entry by entry, and sequences are joined in order."""
    whole, *others = values
    for other in others:
        if isinstance(whole, Mapping):
            both = {**whole, **other}
            whole = {key: total([part[key] for part in (whole, other) if key in part]) for key in both}
        else:
            whole = whole + other
    return whole


# ----------------------------------------------------------------------------------------------- campaigns


@dataclass(frozen=True, slots=True)
class MergedCampaign:
    """The merged results; `repeated` counts findings that an earlier part has too."""

    state: State
    discoveries: tuple[Discovery, ...]
    repeated: int

    @property
    def exit_code(self) -> int:
        """Return the exit code of one campaign on all cases of all parts: 3 if it has a list of cases and not all of them ran."""
        code = exit_code_of(self.state.counts(), list(self.discoveries))
        return code or (3 if self.state.listed and self.state.unfinished else 0)


def merge_campaigns(parts: Iterable[Path], into: Path) -> MergedCampaign:
    """Put the states of all parts together, and write them to the new directory `into`.

    Raises:
        InvalidRecord: A state or a finding is damaged.
        InvalidArgument: A part is missing or there twice, parts are not of one campaign, or `into` is no new directory.
    """
    states = {str(path): read_state(path / STATE_FILE) for path in parts}
    advice = "Give the --state directories of `fsdp-verify fuzz ... --shard 1/N` to `N/N`, with equal options."
    ordered = in_order(states, lambda state: Part(() if state.shard == (1, 1) else state.shard, state.subject), advice)
    if into.exists() and (not into.is_dir() or any(into.iterdir())):
        raise InvalidArgument(
            f"--state: expected a directory that is new or empty, got {str(into)!r}. Give another one."
        )
    discoveries: dict[object, Discovery] = {}
    repeated = 0
    # Read everything before writing anything.
    copies: list[tuple[str, list[tuple[str, str]]]] = []
    for path in map(Path, ordered):
        for folder in findings_in(path, states[str(path)].found):
            file = folder / "finding.json"
            discovery = Discovery.from_json(read_text(file, "a finding", _WHOLE), str(file))
            key = discovery.key if discovery.confirmed else ("unconfirmed", discovery.signature)
            if key in discoveries:
                repeated += 1
                continue
            discoveries[key] = discovery
            copies.append((f"found/{folder.name}", _texts(folder)))
        copies.append(("unjudged", _texts(path / "unjudged")))
    whole = replace(
        joined(list(ordered.values())), found=tuple(Path(name).name for name, _ in copies if name != "unjudged")
    )
    for folder_name, files in copies:
        write_files(into / folder_name, files)
    write_state(into / STATE_FILE, whole)
    return MergedCampaign(whole, tuple(discoveries.values()), repeated)


def joined(states: Sequence[State]) -> State:
    """Return the state of the whole campaign; `states` are those of its parts, in their order.

    Parts draw at about the same pace; the numbers that a slower part has not drawn yet are left for the whole.
    """
    of = len(states)
    drawn = max(
        (of * (len(state.verdicts) - 1) + part + 1 for part, state in enumerate(states) if state.verdicts), default=0
    )
    drawn = max(drawn, states[0].listed)
    columns = [state.verdicts.ljust(-(-drawn // of), OPEN) for state in states]
    return State(
        subject=states[0].subject,
        verdicts="".join(chain.from_iterable(zip(*columns, strict=True)))[:drawn],
        reasons={
            str(int(number) * of + part): reason
            for part, state in enumerate(states)
            for number, reason in state.reasons.items()
        },
        variants=total(state.variants for state in states),
        known=total(state.known for state in states),
        not_investigated=total(state.not_investigated for state in states),
        suspects=tuple(sorted(n * of + part for part, state in enumerate(states) for n in state.suspects)),
        suspect_variants=total(state.suspect_variants for state in states),
        listed=states[0].listed,
        turns={name: turn for state in states for name, turn in state.turns.items()},
        runs=max(state.runs for state in states),
        seconds=total(state.seconds for state in states),
    )


def _texts(folder: Path) -> list[tuple[str, str]]:
    files = [file for file in sorted(folder.glob("*")) if file.is_file()]
    return [(file.name, read_text(file, "a file of a campaign", _WHOLE)) for file in files]


# ----------------------------------------------------------------------------------------------- certificates

_ADDED = ("asked", "earlier", "verdicts", "faces", "reasons", "unconfirmed", "unexplained", "failing", "seconds")


def merge_certificates(parts: Mapping[str, Summary]) -> Summary:
    """Return the certificate of the whole cube, or of the whole sample.

    An unfinished part leaves cells that have not run; the certificate says how many.

    Raises:
        InvalidArgument: A part is missing or there twice, or parts are not of one certificate; every offender is listed.
    """
    advice = "Give the JSON documents of `fsdp-verify certify ... --shard 1/N` to `N/N`, with equal options."
    ordered = list(in_order(parts, lambda part: Part(part.shard, _alike(part)), advice).values())
    whole = {name: total(getattr(part, name) for part in ordered) for name in _ADDED}
    first = ordered[0]
    due = min(first.sample, first.cube - sum(first.not_claimed.values()))
    if first.sample and whole["asked"] != due:
        raise InvalidArgument(
            f"merge: expected parts that ask {due:,} cells together, got {whole['asked']:,} cells. {advice}"
        )
    whole["faces"] = dict(sorted(whole["faces"].items()))
    whole["reasons"] = dict(sorted(whole["reasons"].items(), key=lambda pair: -pair[1]))
    whole["failing"] = tuple(sorted(whole["failing"]))
    causes = _causes(cause for part in ordered for cause in part.causes)
    return replace(ordered[0], shard=(), causes=causes, **whole)


def _alike(part: Summary) -> dict[str, object]:
    whole = {"implementation": part.implementation, "cells": part.cube, "not claimed": dict(part.not_claimed)}
    return {**whole, "sample": part.sample, "source": part.source, **versions_of(part.environment)}


def _causes(given: Iterable[CellCause]) -> tuple[CellCause, ...]:
    """Return each cause once: causes are equal if they name the same known failure, or look alike in the same simplest cell."""
    causes: dict[tuple[str, ...], CellCause] = {}
    for cause in given:
        key = (cause.known or cause.cell.name, cause.signature)
        other = causes.get(key, replace(cause, cells=0))
        simpler = min(other, cause, key=lambda either: (not either.shortened, either.cell))
        causes[key] = replace(simpler, cells=other.cells + cause.cells)
    return tuple(sorted(causes.values(), key=lambda cause: (-cause.cells, cause.cell)))
