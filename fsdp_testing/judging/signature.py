"""Signatures of failures, to recognise equal ones and expected ones. Reports read this without torch.

Shortening a case must keep the signature: kind, sort of quantity, operation. It leaves out numbers, names of parameters and
ranks, which change while a case shrinks although the defect stays. It is built from the fields of a finding, never from its
sentence.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import fields
from fnmatch import fnmatchcase
from typing import NamedTuple

from fsdp_testing.cases.records import LOSES_RANKS, RAISES, Case, ExpectedFailure, FailureKind, Finding, Mismatch

MESSAGE_LENGTH = 90


class Signature(NamedTuple):
    """What a failure looks like.

    Attributes:
        kind: The kind of failure.
        quantity: Sort of quantity, and how it differs if not in numbers; or type and message of an exception.
        operation: Kind of the operation after which it shows (`build`, `end`); empty where none is known.
    """

    kind: FailureKind
    quantity: str = ""
    operation: str = ""

    def __str__(self) -> str:
        where = f" in {self.operation}" if self.operation else ""
        return f"{self.kind} {self.quantity}{where}".strip()


class FineSignature(NamedTuple):
    """What a failure looks like, its place included.

    Attributes:
        alike: The coarser signature.
        fqn: The parameter or buffer; empty for results and exceptions.
        model: Model in which `fqn` is a name.
        strategy: Sharding strategy.
    """

    alike: Signature
    fqn: str
    model: str
    strategy: str


def signature_of(finding: Finding) -> Signature:
    """Return what a finding looks like."""
    kind, sort = finding.kind, _without_place(finding.sort or finding.quantity)
    operation = operation_kind(finding.case, finding.operation)
    if kind in RAISES:
        line = next(iter(finding.message.splitlines()), "")
        # Which attribute of what is missing is the defect, not a particular of the case.
        return Signature(kind, f"{sort}: {_without_particulars(line, words_stay=sort == 'AttributeError')}", operation)
    if kind in LOSES_RANKS:
        return Signature(kind, finding.message)
    if kind == FailureKind.LEAKED:
        return Signature(kind, sort)
    if sort == "output":
        operation = "forward"  # which kind of forward shows wrong weights first says nothing about them
    if operation == "step" and sort.startswith(("value", "optimizer")):
        sort = "value and optimizer state"  # a step writes both from one gradient: which is further off says nothing
    if kind == FailureKind.DIVERGED and finding.mismatch != Mismatch.NUMBERS:
        sort += f" {finding.mismatch}"
    return Signature(kind, sort, operation)


def fine_signature_of(finding: Finding) -> FineSignature:
    """Return what a finding looks like, its place included."""
    return FineSignature(signature_of(finding), finding.fqn, finding.case.model.name, finding.case.strategy)


def alike(quantity: str, found: Signature) -> bool:
    """Return whether a failure shows in `quantity`; of an exception that is its type and the beginning of its message.

    A type alone, `AssertionError:`, is an exception without a message, not any of this type.
    """
    if found.kind not in RAISES:
        return found.quantity.strip() == quantity.strip()
    met, quantity = _without_place(found.quantity), _without_place(quantity)
    return (met.startswith(quantity) and not quantity.rstrip().endswith(":")) or met.strip() == quantity.strip()


def looks_like(found: Signature, kind: FailureKind, quantity: str = "", operation: str = "") -> bool:
    """Return whether a failure is of a kind, in a quantity and after an operation; empty ones may be any."""
    same = not quantity or alike(quantity, found)
    return found.kind == kind and same and operation in ("", found.operation)


def has_cause(cause: str, pattern: str) -> bool:
    """Return whether a part of a cause matches the pattern (fnmatch)."""
    return fnmatchcase(cause, f"*{pattern}*")


def as_pattern(cause: str) -> str:
    """Return a pattern (fnmatch) of a cause that matches it in other cases: numbers and names are left open."""
    subject = r"the gradient of \S+( \(and of \d+ more\))?"
    return re.sub(rf"{subject}|`[^`]*`|\d+", _left_open, re.sub(r"[\[\]]", "?", cause))


def _left_open(found: re.Match[str]) -> str:
    return "the gradient of *" if found[0].startswith("the gradient of") else "*"


def operation_kind(case: Case, index: int) -> str:
    """Return the kind of operation `index`; building, and the end of the program, have names of their own."""
    if index < 0:
        return "build"
    return case.program[index].kind if index < len(case.program) else "end"


def _without_place(text: str) -> str:
    """The type of an exception without our module's name: a moved class would hide known failures."""
    return re.sub(r"^fsdp_(?:testing|ref)(?:\.[a-z_]\w*)*\.(?=[A-Z])", "", text)


def _without_particulars(message: str, *, words_stay: bool) -> str:
    """Foreign text without its varying parts: numbers, names, addresses, the order of a set; quoted words may stay."""
    text = re.sub(r"0x[0-9a-f]+", "#", message)
    text = re.sub(r"\b(ranks?) \d+((, | and )\d+)*", r"\1 #", text)
    quoted = r"('\w+')|'[^']*'|\"[^\"]*\"|\[[^\]]*\]|\([^)]*\)"
    text = re.sub(quoted, lambda found: (words_stay and found[1]) or "_", text)
    text = re.sub(r"\b(aten\.[\w.]+):", r"\1", text)  # torch 2.11 has a colon behind the operator
    text = re.sub(r"\boptimizer\.state(\.\w+)+", "_", text)  # a key of saved state, whatever the parameter is called
    text = re.sub(r"\b[a-z_]+(\.\w+)*\.(weight|bias|_flat_param)\b", "_", text)
    text = re.sub(r"-?\d+(\.\d+)?(e-?\d+)?", "#", text)
    text = re.sub(r"\{([^{}:]+)\}", lambda found: f"{{{', '.join(sorted(found[1].split(', ')))}}}", text)
    return re.sub(r"\s+", " ", text).strip()[:MESSAGE_LENGTH]


FIELDS = tuple(field.name for field in fields(ExpectedFailure))
UNWRITTEN = {"reason": "WHY", "page": "PAGE"}
"""What a printed entry has where a person has to write: a list that still has it is refused."""


def look_of(finding: Finding) -> str:
    """Return how a finding fails, in the form of a list's entry."""
    return entry_of(finding).look


def entry_of(finding: Finding) -> ExpectedFailure:
    """Return the entry that expects a finding; its reason and page are for a person to write.

    Operations, ranks, units and counts in the cause are left open.
    """
    look = signature_of(finding)
    happened = finding.happened or (finding.shortest.happened if finding.shortest is not None else "")
    how = {"quantity": look.quantity, "operation": look.operation, "cause": as_pattern(happened)}
    return ExpectedFailure(kind=look.kind, **UNWRITTEN, **how)


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
