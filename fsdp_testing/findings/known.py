"""Which failures are known, so that a campaign goes on to the next unknown one?

Rules are data: what a case must contain to be hit by a known failure, and which operation to leave out then. A rule
has a reason and a link, and where it has an example, the campaign runs the example unedited: if it passes by now, the
rule is reported stale.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from fsdp_testing.errors import InvalidRecord
from fsdp_testing.findings.tags import tags, token, tokens
from fsdp_testing.judging.signature import Signature
from fsdp_testing.records import Case
from fsdp_testing.records.document import check_format, decode, encode, load_json, to_json

KNOWN_FORMAT = "fsdp_testing/known_failures"
KNOWN_VERSION = 1
SHIPPED = Path(__file__).parent / "known_failures"
_EDITS = 40


class Portrayed:
    """A case in words, found out once for however many rules ask: that takes longer than drawing the case."""

    def __init__(self, case: Case) -> None:
        self._case = case
        self.tokens = ("begin", *tokens(case))

    @cached_property
    def tags(self) -> frozenset[str]:
        """What `tags` says of it."""
        return tags(self._case)


@dataclass(frozen=True, slots=True)
class Rule:
    """One known failure.

    Attributes:
        name: Unique in its file.
        reason: What goes wrong, in one sentence.
        link: Where it is reported or documented.
        operations: Tokens that occur in this order (others may lie between them); empty matches any program. A token
            may end in `*`; `begin` stands before the first operation.
        unless: Tokens that may not lie between them.
        tags: Tags that the case has, all of them; a tag may end in `*`.
        drop: Operations with this token are left out, the last one first, until the rule no longer applies; empty
            discards the case.
        signature: Kind and beginning of the quantity of a failure: one that looks so, in a case that has the operations
            and tags, is counted as this one and not looked into. For failures that no edit of a case avoids, or that
            are not worth one; then the rule edits nothing.
        example: A case that fails because of it, to notice when it no longer does.
    """

    name: str
    reason: str
    link: str = ""
    operations: tuple[str, ...] = ()
    unless: tuple[str, ...] = ()
    tags: tuple[str, ...] = ()
    drop: str = ""
    signature: tuple[str, ...] = ()
    example: Any = None

    def applies(self, case: Case) -> bool:
        """Whether a legal case is one that this failure hits."""
        return self.hits(Portrayed(case))

    def hits(self, seen: Portrayed) -> bool:
        """Whether a legal case, seen in words, is one that this failure hits."""
        return not self.signature and self._fits(seen)

    def knows(self, signature: Signature, case: Case) -> bool:
        """Whether a failure with this signature, met in this case, is this one by its looks."""
        same_kind = bool(self.signature) and self.signature[0] == signature.kind
        same = same_kind and all(signature.quantity.startswith(part) for part in self.signature[1:])
        return same and self._fits(Portrayed(case))

    def _fits(self, seen: Portrayed) -> bool:
        return _in_order(self.operations, seen.tokens, self.unless) and _all_held(self.tags, seen)

    def edit(self, case: Case) -> Case | None:
        """Returns the case without what brings the failure about, or None if that leaves nothing to run."""
        for _ in range(_EDITS):
            if not self.applies(case):
                return case
            places = [
                i for i, operation in enumerate(case.program) if self.drop and _matches(self.drop, token(operation))
            ]
            if not places:
                return None
            case = case.without_operation(places[-1])
        return None


def _matches(pattern: str, text: str) -> bool:
    return text.startswith(pattern[:-1]) if pattern.endswith("*") else text == pattern


def _in_order(wanted: Sequence[str], found: Sequence[str], unless: Sequence[str]) -> bool:
    if not wanted:
        return True
    return any(
        _matches(wanted[0], text) and _goes_on(wanted[1:], found[place + 1 :], unless)
        for place, text in enumerate(found)
    )


def _goes_on(wanted: Sequence[str], found: Sequence[str], unless: Sequence[str]) -> bool:
    for text in found:
        if not wanted:
            break
        if _matches(wanted[0], text):
            wanted = wanted[1:]
        elif any(_matches(pattern, text) for pattern in unless):
            return False
    return not wanted


def _all_held(wanted: Sequence[str], seen: Portrayed) -> bool:
    return all(
        any(tag.startswith(pattern[:-1]) for tag in seen.tags) if pattern.endswith("*") else pattern in seen.tags
        for pattern in wanted
    )


@dataclass(frozen=True, slots=True)
class KnownFailures:
    """The known failures of one implementation."""

    rules: tuple[Rule, ...] = ()

    def around(self, case: Case) -> tuple[Case | None, tuple[str, ...]]:
        """Returns the case edited around every known failure (None: nothing is left), and the rules that applied."""
        applied: list[str] = []
        seen = Portrayed(case)
        for rule in self.rules:
            if rule.hits(seen):
                applied.append(rule.name)
                edited = rule.edit(case)
                if edited is None or not edited.program:
                    return None, tuple(applied)
                case, seen = edited, Portrayed(edited)
        return case, tuple(applied)

    def recognize(self, signature: Signature, case: Case) -> Rule | None:
        """Returns the rule that knows a failure, met in this case, by its looks."""
        return next((rule for rule in self.rules if rule.knows(signature, case)), None)

    def with_rule(self, rule: Rule) -> KnownFailures:
        """Returns these rules and one more."""
        return KnownFailures((*self.rules, rule))

    def examples(self) -> list[tuple[Rule, Case]]:
        """Returns the rules that have an example, with it."""
        return [
            (rule, Case.from_document(rule.example, f"known failure {rule.name}"))
            for rule in self.rules
            if rule.example is not None
        ]

    def to_json(self) -> str:
        """Returns the rules as a JSON document."""
        return to_json({"format": KNOWN_FORMAT, "version": KNOWN_VERSION, "rules": encode(self.rules)}, indent=2)


@dataclass(frozen=True, slots=True)
class _Document:
    rules: tuple[Rule, ...] = field(default_factory=tuple)


def read_known(text: str, where: str) -> KnownFailures:
    """Reads a file of rules.

    Raises:
        InvalidRecord: It is damaged, newer than this version, or names a rule twice.
    """
    data = load_json(text, where)
    check_format(data, KNOWN_FORMAT, KNOWN_VERSION, where)
    document = decode(_Document, {"rules": data.get("rules", [])}, where)
    names = [rule.name for rule in document.rules]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise InvalidRecord(f"{where}: expected rules with names of their own, got {twice} twice. Rename them.")
    return KnownFailures(document.rules)


def shipped_known(name: str) -> KnownFailures:
    """Returns the rules that ship with fsdp_testing for implementation `name`; none for one that we do not know."""
    path = SHIPPED / f"{name}.json"
    return read_known(path.read_text(encoding="utf-8"), str(path)) if path.is_file() else KnownFailures()


def joined(parts: Iterable[KnownFailures]) -> KnownFailures:
    """Returns all rules together; of two with one name the first stays."""
    rules: dict[str, Rule] = {}
    for part in parts:
        for rule in part.rules:
            rules.setdefault(rule.name, rule)
    return KnownFailures(tuple(rules.values()))
