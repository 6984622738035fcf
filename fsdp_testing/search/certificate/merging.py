"""How do the certificates of the parts of a cube become one? Each part once; a cause that several met is one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from fsdp_testing.base.document import decode
from fsdp_testing.report.merging import Part, added, in_order, versions_of
from fsdp_testing.search.certificate.causes import CellCause
from fsdp_testing.search.certificate.summary import FORMAT, STATUSES, Summary


def read_summary(text: str, where: str) -> Summary:
    """Read what `certify --json` wrote.

    Raises:
        InvalidRecord: It is damaged, or of another version.
    """
    return decode(Summary, FORMAT.read(text, where), where)


def merged(parts: Mapping[str, Summary]) -> Summary:
    """Return the certificate of the whole cube, or of the whole sample.

    A part that has not come to its end leaves cells that have not run; the certificate says how many.

    Args:
        parts: The certificates of all parts, by where they come from.

    Raises:
        InvalidArgument: A part is missing or there twice, or parts are not of one certificate; every offender is listed.
    """
    advice = "Give the JSON documents of `fsdp-verify certify ... --shard 1/N` to `N/N`, all else alike."
    ordered = list(in_order(parts, lambda part: Part(part.shard, _alike(part)), advice).values())
    counts = added(part.statuses for part in ordered)
    return replace(
        ordered[0],
        shard=(),
        asked=sum(part.asked for part in ordered),
        earlier=sum(part.earlier for part in ordered),
        statuses={status: counts[status] for status in STATUSES},
        faces=_faces(ordered),
        reasons=dict(added(part.reasons for part in ordered).most_common()),
        causes=_causes(cause for part in ordered for cause in part.causes),
        unconfirmed=sum(part.unconfirmed for part in ordered),
        unexplained=sum(part.unexplained for part in ordered),
        failing=tuple(sorted(name for part in ordered for name in part.failing)),
        seconds=sum(part.seconds for part in ordered),
    )


def _alike(part: Summary) -> dict[str, object]:
    whole = {"implementation": part.implementation, "cells": part.cube, "not claimed": dict(part.not_claimed)}
    return {**whole, "sample": part.sample, "source": part.source, **versions_of(part.environment)}


def _faces(parts: Iterable[Summary]) -> dict[str, dict[str, dict[str, int]]]:
    faces_of: dict[str, dict[str, dict[str, int]]] = {}
    for part in parts:
        for world, faces in part.faces.items():
            for face, counts in faces.items():
                there = faces_of.setdefault(world, {}).setdefault(face, {})
                for status, count in counts.items():
                    there[status] = there.get(status, 0) + count
    return {world: faces_of[world] for world in sorted(faces_of)}


def _causes(given: Iterable[CellCause]) -> tuple[CellCause, ...]:
    """Return each cause once: the same known failure, or what looks alike in the same simplest cell."""
    causes: dict[tuple[str, ...], CellCause] = {}
    for cause in given:
        key = (cause.known or cause.cell.name, cause.signature)
        known = causes.get(key)
        simpler = cause if known is None else min(known, cause, key=lambda one: (not one.shortened, one.cell))
        causes[key] = replace(simpler, cells=cause.cells + (known.cells if known is not None else 0))
    return tuple(sorted(causes.values(), key=lambda cause: (-cause.cells, cause.cell)))
