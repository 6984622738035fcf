"""When do two findings look the same? Pure, and from records alone, so that reports need no torch.

What a failure looks like is its kind, the sort of quantity in which it shows, and the kind of operation after which it
shows. Numbers are left out: they change while a program is shortened although the defect stays.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from fsdp_testing.records import Case, Finding

MESSAGE_LENGTH = 90
_SORTS = ("gradient of ", "parameter ", "optimizer state ", "buffer ")


class FindingSignature(NamedTuple):
    """What a finding looks like.

    Attributes:
        kind: Kind of the finding.
        sort: Sort of quantity (`gradient`, `parameter`, `optimizer state exp_avg`, `parameter and optimizer state` for
            what a step writes, `buffer`, `output`, `total norm`), or type and message of an exception.
        operation: Kind of the operation after which it shows first (`step`, `forward`, ...).
    """

    kind: str
    sort: str
    operation: str


class FineSignature(NamedTuple):
    """What a finding looks like, its place included.

    Attributes:
        alike: The coarser signature.
        fqn: The parameter or buffer; empty for results and exceptions.
        model: Model in which `fqn` is a name.
        strategy: Sharding strategy.
    """

    alike: FindingSignature
    fqn: str
    model: str
    strategy: str


def signature_of(finding: Finding) -> FindingSignature:
    """Returns what `finding` looks like."""
    sort, _ = _sort_and_fqn(finding)
    operation = _operation_of(finding)
    if sort == "output":
        operation = "forward"  # which kind of forward shows wrong weights first says nothing about them
    return FindingSignature(finding.kind, sort, operation)


def fine_signature_of(finding: Finding) -> FineSignature:
    """Returns what `finding` looks like, its place included."""
    _, fqn = _sort_and_fqn(finding)
    return FineSignature(signature_of(finding), fqn, finding.case.model.name, finding.case.strategy)


def schedule_shape(case: Case) -> tuple[str, ...]:
    """Returns the kinds of the operations of a program, local micro-batches told apart.

    Modes of a forward are not: a forward without backward disturbs what follows whether or not it recorded a graph.
    """
    return tuple(operation.shape() for operation in case.program)


def _sort_and_fqn(finding: Finding) -> tuple[str, str]:
    if finding.kind == "raised":
        lines = finding.explanation.partition(" raised ")[2].splitlines()
        return _without_numbers(re.sub(r", at \S+:\d+$", "", lines[0]) if lines else finding.quantity), ""
    if finding.kind in ("died", "hung", "uncoordinated"):
        return finding.quantity, ""
    text = re.sub(r" on rank \d+$", "", finding.quantity)
    for prefix in _SORTS:
        if text.startswith(prefix):
            rest = text.removeprefix(prefix)
            part, between, fqn = rest.partition(" of ")
            sort = prefix.removesuffix(" ").removesuffix(" of")
            found = (f"{sort} {part}", fqn) if between else (sort, rest)
            if found[0].startswith(("parameter", "optimizer")) and _operation_of(finding) == "step":
                # One step writes both from one gradient; which of them is further off says nothing.
                found = ("parameter and optimizer state", found[1])
            return (f"{found[0]} {_shape(finding)}".strip(), found[1])
    return ("total norm" if text == "total norm" else "output"), ""


def _shape(finding: Finding) -> str:
    """Of what kind a difference without a size is: None-ness, dtype, a flag."""
    if finding.max_error is not None or finding.kind != "diverged":
        return ""
    sentence = finding.explanation.partition(finding.quantity)[2]
    return _without_numbers(sentence.partition(",")[0])


def _without_numbers(text: str) -> str:
    text = re.sub(r"0x[0-9a-f]+", "#", text)
    text = re.sub(r"'[^']*'|\"[^\"]*\"|\[[^\]]*\]|\([^)]*\)", "_", text)
    text = re.sub(r"\b[a-z_]+(\.\w+)*\.(weight|bias)\b", "_", text)
    text = re.sub(r"-?\d+(\.\d+)?(e-?\d+)?", "#", text)
    return re.sub(r"\s+", " ", text).strip()[:MESSAGE_LENGTH]


def _operation_of(finding: Finding) -> str:
    program, index = finding.case.program, finding.operation
    if index < 0:
        return "build"
    return program[index].kind if index < len(program) else "end"
