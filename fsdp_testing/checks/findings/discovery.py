"""The record of a failure: confirmed alone, shrunk, described in a sentence, saved so that anyone can run it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from fsdp_testing.base.document import Format, decode, encode
from fsdp_testing.cases.models.tree_schema import check_case_with_tree
from fsdp_testing.cases.records import Case, Overrun, opening
from fsdp_testing.judging.known import Rule
from fsdp_testing.judging.signature import Signature, as_pattern
from fsdp_testing.judging.tags import tags, tokens

FORMAT = Format("fsdp_testing/fuzz_finding", 1)

# Tags that every case has in some form; a rule made from a finding does not require them.
_PLAIN = ("strategy:full_shard", "world:2", "dtype:float64", "optimizer:sgd", "units:0", "node:linear")
_CASES = ("case", "original")
_PLAIN_NEEDS = ("needs:full_shard", "needs:uneven_parameters")


@dataclass(frozen=True, slots=True)
class Discovery:
    """One failure, understood as far as a machine can.

    Attributes:
        implementation: Name.
        signature: The signature of the failure.
        original: The case that first showed it.
        case: The simplest case that fails in the same way.
        reason: First fact that differs.
        account: The fate of the ranks, if one was lost.
        confirmed: It fails in the same way alone in new processes.
        attempts: Cases run to shrink it.
        seconds: Time taken to shrink it.
        overrun: The facts about excess memory or communication, if any.
        cause: What one process would have to do to give the wrong numbers, if known.
    """

    implementation: str
    signature: Signature
    original: Case
    case: Case
    reason: str
    account: str = ""
    confirmed: bool = True
    attempts: int = 0
    seconds: float = 0.0
    overrun: Overrun | None = None
    cause: str = ""

    @property
    def name(self) -> str:
        """Return the name of its folder: its signature, and the identity of the case."""
        words = "".join(c if c.isalnum() else "-" for c in f"{self.signature.kind}-{self.signature.operation}")
        return f"{words}-{self.case.identity}"

    @property
    def key(self) -> tuple[Any, ...]:
        """Return a key that findings of one defect share, as far as known: signature, operations, other needs."""
        needed = frozenset(
            tag for tag in tags(self.case) if not tag.startswith(("units:", "node:", "batch:", "world:"))
        )
        return (self.signature, tuple(sorted(set(tokens(self.case)))), needed)

    def sentence(self) -> str:
        what = ", ".join(tokens(self.case))
        return f"{self.implementation}: after {what or 'wrapping'}: {self.signature}. {self.reason}"

    def rule(self) -> Rule:
        """Return the rule by which a campaign recognises it later: by its cause, if that was found."""
        names, cause = tokens(self.case), as_pattern(self.cause.partition("; ")[0])
        cause = cause if self.overrun is None else self.overrun.more
        plain = ("forward_backward", "step", "observe")
        return Rule(
            self.name,
            opening(self.reason, 200),
            signatures=((*self.signature, cause) if cause else tuple(self.signature),),
            operations=names,
            tags=tuple(sorted(tag for tag in tags(self.case) if tag not in (*_PLAIN, *_PLAIN_NEEDS))),
            without=next((name for name in reversed(names) if name not in plain), ""),
            example=json.loads(self.case.to_json()),
        )

    def to_json(self) -> str:
        cases = {name: json.loads(getattr(self, name).to_json()) for name in _CASES}
        return FORMAT.write({**encode(self), "seconds": round(self.seconds, 3), **cases}, indent=1)

    @classmethod
    def from_json(cls, text: str, where: str) -> Discovery:
        """Read a finding.

        Raises:
            InvalidRecord: It is damaged or newer than this version.
        """
        body = FORMAT.read(text, where)
        # The case is a complete document inside this one, so that it can be copied out and run.
        cases = {name: Case.from_json(body[name], f"{where}.{name}") for name in _CASES if name in body}
        for name, case in cases.items():
            check_case_with_tree(case, f"{where}.{name}")
        return decode(cls, {**body, **{name: encode(case) for name, case in cases.items()}}, where)
