"""How does a report write down a failure, so that a list of expected failures knows it? Reports read this without torch."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import fields

from fsdp_testing.cases.records import ExpectedFailure, Finding
from fsdp_testing.judging.signature import as_pattern, signature_of

FIELDS = tuple(field.name for field in fields(ExpectedFailure))


def look_of(finding: Finding) -> str:
    """Return how a finding fails, as the entry of a list would say it."""
    return entry_of(finding).look


def entry_of(finding: Finding) -> ExpectedFailure:
    """Return the entry that expects a finding; its reason and page are for a person to write.

    What the cause says of operations, ranks, units and how many more are wrong is left open.
    """
    look = signature_of(finding)
    happened = finding.happened or (finding.shortest.happened if finding.shortest is not None else "")
    return ExpectedFailure("WHY", look.kind, look.quantity, look.operation, cause=as_pattern(happened), page="PAGE")


def entry_line(check: str, findings: Iterable[Finding]) -> str:
    """Return the line of TOML that expects the new failures of a check, with `WHY` and `PAGE` to be filled in."""
    entries = list(dict.fromkeys(entry_of(finding) for finding in findings if finding.expected is None))
    tables = [_table(entry) for entry in entries]
    value = tables[0] if len(tables) == 1 else "\n".join(["[", *(f"  {table}," for table in tables), "]"])
    return f"{_quoted(check)} = {value}"


def entry_literal(check: str, findings: Iterable[Finding]) -> str:
    """Return the same as an item of a Python dictionary."""
    new = [finding for finding in findings if finding.expected is None]
    entries = [_given(entry) for entry in dict.fromkeys(map(entry_of, new))]
    return f"{check!r}: {entries[0] if len(entries) == 1 else entries}"


def _given(entry: ExpectedFailure) -> dict[str, str]:
    return {name: str(getattr(entry, name)) for name in FIELDS if getattr(entry, name)}


def _table(entry: ExpectedFailure) -> str:
    return f"{{ {', '.join(f'{name} = {_quoted(value)}' for name, value in _given(entry).items())} }}"


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
