"""Merges the failures of N ranks into one text. Pure functions over pytest's serialised representations.

The form is the one that `pytest_report_to_serializable` writes and `pytest_report_from_serializable` reads, so that
every rank's rewritten assertion keeps its colours and its place in the terminal, in junit and through pytest-xdist.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterable, Sequence
from typing import Any

from fsdp_testing.errors import CollectiveMismatch
from fsdp_testing.ranks.pool.cause import reports_lost_peer

Crash = dict[str, Any]
Element = tuple[dict[str, Any], Crash | None, str | None]

_ADDRESS = re.compile(r"0x[0-9a-f]+")
_OWN_RANK = re.compile(r"World\(rank=\d+,")


def text_element(lines: Iterable[str]) -> Element:
    """Return plain lines in place of a traceback."""
    entry = {"type": "ReprEntryNative", "data": {"lines": [line + "\n" for line in lines]}}
    return {"reprentries": [entry], "extraline": None, "style": "native"}, None, None


def elements_of(longrepr: Any) -> list[Element]:
    """Return the chain of exceptions of one rank's representation, or its text."""
    if isinstance(longrepr, dict) and "reprtraceback" in longrepr:
        chain = longrepr.get("chain")
        if chain:
            return [(element[0], element[1], element[2]) for element in chain]
        return [(longrepr["reprtraceback"], longrepr.get("reprcrash"), None)]
    if isinstance(longrepr, list | tuple) and len(longrepr) == 3:
        return [text_element([f"{longrepr[0]}:{longrepr[1]}: {longrepr[2]}"])]
    return [text_element(str(longrepr).splitlines() or ["(no message)"])]


def message_of(longrepr: Any) -> str:
    """Return the first line that says what went wrong: exception and message."""
    if isinstance(longrepr, dict) and longrepr.get("reprcrash"):
        lines = str(longrepr["reprcrash"].get("message", "")).strip().splitlines()
        return lines[0] if lines else ""
    if isinstance(longrepr, list | tuple) and len(longrepr) == 3:
        return str(longrepr[2])
    lines = [line.strip() for line in str(longrepr).splitlines() if line.strip()]
    errors = [line[2:].strip() for line in lines if line.startswith("E ")]
    return (errors or lines or [""])[0]


def is_consequence(longrepr: Any) -> bool:
    """Return whether the error says only that another rank has gone."""
    return reports_lost_peer(message_of(longrepr))


def is_mismatch(longrepr: Any) -> bool:
    """Return whether the ledger refused a collective: each rank that noticed names the other's call."""
    return message_of(longrepr).startswith(f"{CollectiveMismatch.__module__}.{CollectiveMismatch.__name__}: ")


def abbreviated(longrepr: Any) -> list[Element]:
    """Return message and places, without the source of every frame."""
    lines = [message_of(longrepr)]
    for traceback, _, _ in elements_of(longrepr):
        for entry in traceback["reprentries"]:
            place = entry["data"].get("reprfileloc")
            if place:
                lines.append(f"  {place['path']}:{place['lineno']}: {place['message']}".rstrip(": "))
    return [text_element(lines)]


def crash_of(longrepr: Any) -> Crash | None:
    """Return where it went wrong, if known."""
    if isinstance(longrepr, dict):
        return longrepr.get("reprcrash")
    return None


def fold(texts: Sequence[tuple[int, Any]]) -> list[tuple[list[int], Any]]:
    """Group (rank, representation) pairs that differ only in addresses and the rank."""
    groups: dict[str, tuple[list[int], Any]] = {}
    for rank, longrepr in texts:
        key = _OWN_RANK.sub("World(rank=_,", _ADDRESS.sub("0x_", json.dumps(longrepr, sort_keys=True, default=str)))
        groups.setdefault(key, ([], longrepr))[0].append(rank)
    return list(groups.values())


def with_header(header: str, elements: Sequence[Element]) -> list[Element]:
    """Return `elements` with a headline in front of the first."""
    rule = header.center(100, "-") if len(header) < 90 else header
    first, crash, link = elements[0]
    traceback = copy.deepcopy(first)
    entry = {"type": "ReprEntryNative", "data": {"lines": [rule + "\n"]}}
    traceback["reprentries"] = [entry, *traceback["reprentries"]]
    return [(traceback, crash, link), *elements[1:]]


def build(elements: Sequence[Element], lead: str, crash: Crash | None, fallback: tuple[str, int]) -> dict[str, Any]:
    """Return one serialised representation of `elements`; `lead` is what the short summary shows.

    Args:
        elements: Elements in the order in which they are shown.
        lead: The leading sentence.
        crash: Place of the first failure, if known.
        fallback: Path and line of the test itself.
    """
    path, line = (crash["path"], crash["lineno"]) if crash else fallback
    # pytest takes the summary's line from the last element of a chain.
    place = {"path": str(path), "lineno": int(line), "message": lead}
    chain = [list(copy.deepcopy(element)) for element in elements]
    chain[-1][1] = place
    for element in chain[:-1]:
        element[2] = element[2] or None
    empty: dict[str, Any] = {"reprentries": [], "extraline": None, "style": "native"}
    return {"reprcrash": dict(place), "reprtraceback": empty, "sections": [], "chain": chain}
