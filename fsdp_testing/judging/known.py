"""The known failures: a campaign counts them, and a run expects them.

Rules are data: the failure's signature, and the common traits of the cases that showed it. A rule applies after a case was
judged: it changes no case and leaves none out. It has a reason, a page and an example, which campaigns run again: a rule whose
example passes is dropped. A user's expected failures become the same rules (`expected.py`).
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import cached_property
from typing import Any

from fsdp_testing.base.document import Format, decode, encode, load_json, to_json
from fsdp_testing.cases.models.tree import unit_of
from fsdp_testing.cases.models.tree_schema import check_case_with_tree
from fsdp_testing.cases.records import (
    ENDS_RANKS,
    LOSES_RANKS,
    Case,
    ExpectedFailure,
    FailureKind,
    Finding,
    ModelSpec,
    WorldSpec,
)
from fsdp_testing.errors import InvalidRecord
from fsdp_testing.judging.signature import Signature, has_cause, looks_like
from fsdp_testing.judging.tags import NEW_MODEL, NEW_OPTIMIZER, UNITS, tags, units_with, words_of

FORMAT = Format("fsdp_testing/known_failures", 2)


class CaseFeatures:
    """A case in words, computed once for all rules, since that takes longer than drawing the case.

    Args:
        case: The case.
        at: Operation in or after which it fails: later operations did not cause the failure. None if that is not known.
        units: Units in which it fails; None if that is not known.
        parameter: Name of the parameter that fails; empty if that is not known, or where none does.
    """

    def __init__(
        self, case: Case, at: int | None = None, units: Collection[str] | None = None, parameter: str = ""
    ) -> None:
        self._case = case
        self._at = at
        self._units = units
        self.parameter = parameter

    @cached_property
    def places(self) -> tuple[frozenset[str], ...]:
        """Return the words of each operation that may have brought the failure about, the beginning first."""
        places = (frozenset({"begin", NEW_MODEL, NEW_OPTIMIZER}), *words_of(self._case.program))
        return places if self._at is None else places[: self._at + 2]

    @cached_property
    def tags(self) -> frozenset[str]:
        return tags(self._case)

    def fails_during(self, pattern: str) -> bool:
        """Return whether the operation in which it fails has a word, as far as it is known."""
        return not pattern or self._at is None or _is(pattern, self.places[-1])

    def fails_in(self, word: str) -> bool:
        """Return whether it fails in units that a word of `UNITS` names alone, as far as is known."""
        named = units_with(self._case, word) if word and self._units is not None else None
        return named is None or named.issuperset(self._units or ())


def features_of(finding: Finding) -> CaseFeatures:
    """Return the case of a finding in words, with the operation at which it fails."""
    if finding.overrun is not None:
        units = tuple(unit for unit, _ in finding.overrun.units) or None
    else:
        named = finding.case.wrapping.units if finding.case.wrapping.policy is None else None
        units = (unit_of(finding.fqn, named),) if finding.fqn and named is not None else None
    at = None if finding.kind in LOSES_RANKS else finding.operation
    return CaseFeatures(finding.case, at, units, finding.fqn)


@dataclass(frozen=True, slots=True)
class Rule:
    """One known failure.

    Attributes:
        name: Unique in its file.
        reason: The defect in one sentence.
        page: File or address where it is written up.
        signatures: What it looks like, in each way that it was seen: kind, quantity (of an exception its beginning),
            operation, and what one process would have to do to give its wrong numbers, as a pattern (fnmatch) of a part of
            that sentence; what is not given may be anything. In a list for several implementations a fifth part is the one that
            alone fails so, as a pattern. A campaign asks the cause of the first failures that it knows
            by such a rule, and of every so many later ones.
        operations: Tokens that occur in this order (others may lie between them); empty matches any program. A token
            may end in `*`, and `a|b` is either; `@forward`, `@backward`, `@local`, `@reduced`, `@trained`, `@new_model`,
            `@new_optimizer`, `@optimizer_saved` and `@skips` are any operation that does this (`tags.words_of`); `begin`, which
            is new too, stands before the first operation.
        unless: Tokens that may not lie between them.
        during: Token of the operation in which it fails, written as those of `operations`; empty for any.
        tags: Tags that the case has, all of them; a tag may end in `*`.
        units: Word of `tags.UNITS` for the units in which it fails, all of them; empty for any.
        parameter: Name of the parameter that fails, as a pattern (fnmatch); empty for any.
        without: Token of the operations without which it does not show; a case in which it was met is run once more without
            them, because it may have hidden another failure. Empty where no such operation is known.
        instead: Fields of the case that differ in that run, where no operation causes the failure: `{"world": {"mesh": [1, 2]}}`
            leaves the size of the world as it is; "none" is none (TOML has no null).
        on: The implementations that have it, in a list for several of them.
        issue: Address of the report.
        link: The field that files of earlier versions have instead of `page` and `issue`; empty once a file is read.
        example: A case that fails because of it, to notice when it no longer does.
        unlike: A case that passes, for readers alone.
    """

    name: str
    reason: str
    page: str = ""
    signatures: tuple[tuple[str, ...], ...] = ()
    operations: tuple[str, ...] = ()
    unless: tuple[str, ...] = ()
    during: str = ""
    tags: tuple[str, ...] = ()
    units: str = ""
    parameter: str = ""
    without: str = ""
    instead: Mapping[str, Any] = field(default_factory=dict)
    on: tuple[str, ...] = ()
    issue: str = ""
    link: str = ""
    example: Any = None
    unlike: Any = None

    @staticmethod
    def of_entry(entry: ExpectedFailure) -> Rule:
        """Return the rule for one entry of a list of expected failures."""
        signature = (str(entry.kind), entry.quantity, entry.operation, entry.cause)
        return Rule("", entry.reason, entry.page, (signature,), parameter=entry.parameter, issue=entry.issue)

    def entries(self) -> list[ExpectedFailure]:
        """Return the ways in which it was seen, as a report says each."""
        return [self._entry(*signature) for signature in self.signatures]

    def entry_for(self, signature: Signature, cause: str | None = None) -> ExpectedFailure:
        """Return the signature that matches a failure, also by its cause if that was examined."""
        ways = [way for way in self.signatures if _looks_like(way, signature) and _has_cause(way, cause)]
        return self._entry(*ways[0])

    def _entry(self, kind: str, quantity: str = "", operation: str = "", cause: str = "") -> ExpectedFailure:
        way = (FailureKind(kind), quantity, operation, self.parameter, cause)
        return ExpectedFailure(self.reason, *way, page=self.page, issue=self.issue)

    @property
    def places(self) -> str:
        return ", ".join(filter(None, (self.page, self.issue)))

    @property
    def ends_ranks(self) -> bool:
        """Return whether it costs the ranks in one of the ways in which it was seen."""
        return any(FailureKind(signature[0]) in ENDS_RANKS for signature in self.signatures)

    def of(self, name: str) -> Rule:
        """Return what the rule says of one implementation."""
        return replace(
            self,
            on=(),
            signatures=tuple(way[:4] for way in self.signatures if fnmatchcase(name, "".join(way[4:]) or "*")),
        )

    def fits(self, features: CaseFeatures) -> bool:
        """Return whether a case has the traits of the cases in which it was seen."""
        places = _places(self.operations, features.places, self.unless)
        return places is not None and all(_is(pattern, features.tags) for pattern in self.tags)

    def knows(self, signature: Signature, features: CaseFeatures) -> bool:
        """Return whether a failure with this signature, met in such a case, is this one."""
        looks = any(_looks_like(known, signature) for known in self.signatures)
        named = fnmatchcase(features.parameter, self.parameter or "*")
        where = features.fails_during(self.during) and features.fails_in(self.units)
        return looks and named and where and self.fits(features)

    def asks_cause(self, signature: Signature) -> bool:
        """Return whether a failure with this signature is recognised only by its cause."""
        ways = [way for way in self.signatures if _looks_like(way, signature)]
        return bool(ways) and all(way[3:] and way[3] for way in ways)

    def is_by_cause(self, signature: Signature, cause: str | None) -> bool:
        """Return whether the cause of a failure, if examined, is this one's."""
        return any(_looks_like(way, signature) and _has_cause(way, cause) for way in self.signatures)

    def variant(self, case: Case) -> Case | None:
        """Return the case without the cause of the failure; None if nothing is left, or the rule names no cause.

        The first operation that may be removed is removed: the failure may show in a later one.
        """
        variant = self._changed(case, f"known failure {self.name}: instead")
        while self.without and self.fits(features := CaseFeatures(variant)):
            fitting = _places(self.operations, features.places, self.unless) or ()
            places = [place for place in (*fitting, *range(len(features.places))) if self._leaves_out(features, place)]
            if not places:
                return None
            variant = variant.without_operation(places[0] - 1)
        return variant if variant != case and variant.program else None

    def _leaves_out(self, features: CaseFeatures, place: int) -> bool:
        return place > 0 and _is(self.without, features.places[place])

    def check(self, where: str) -> None:
        """Check that `instead` names fields of a case, and `units` some of its units.

        Raises:
            InvalidRecord: One is unknown, or cannot have this value.
        """
        self._changed(Case(ModelSpec("tree"), WorldSpec(1), ()), f"{where}: {self.name}.instead")
        if self.units and self.units not in UNITS:
            raise InvalidRecord(
                f"{where}: {self.name}.units: expected one of {', '.join(UNITS)}, got {self.units!r}. Choose one, or none."
            )

    def _changed(self, case: Case, where: str) -> Case:
        return decode(Case, _merged(encode(case), self.instead), where) if self.instead else case


def _merged(data: Any, change: Any) -> Any:
    if not isinstance(change, Mapping):
        return None if change == "none" else change
    known = data if isinstance(data, Mapping) else {}
    return {**known, **{name: _merged(known.get(name), value) for name, value in change.items()}}


def _looks_like(way: Sequence[str], signature: Signature) -> bool:
    return looks_like(signature, FailureKind(way[0]), *way[1:3])


def _has_cause(way: Sequence[str], cause: str | None) -> bool:
    return cause is None or has_cause(cause, "".join(way[3:]))


def _is(pattern: str, words: Iterable[str]) -> bool:
    ways = pattern.split("|")
    return any(word.startswith(way[:-1]) if way.endswith("*") else word == way for word in words for way in ways)


def _places(wanted: Sequence[str], found: Sequence[frozenset[str]], unless: Sequence[str]) -> tuple[int, ...] | None:
    """Where the wanted operations are, in this order; None if they are not all there."""
    if not wanted:
        return ()
    starts = (place for place, operation in enumerate(found) if _is(wanted[0], operation))
    ways = (_places_from(start, wanted[1:], found, unless) for start in starts)
    return next((way for way in ways if way is not None), None)


def _places_from(
    start: int, wanted: Sequence[str], found: Sequence[frozenset[str]], unless: Sequence[str]
) -> tuple[int, ...] | None:
    places = [start]
    for place in range(start + 1, len(found)):
        if len(places) > len(wanted):
            break
        if _is(wanted[len(places) - 1], found[place]):
            places.append(place)
        elif any(_is(pattern, found[place]) for pattern in unless):
            return None
    return tuple(places) if len(places) > len(wanted) else None


@dataclass(frozen=True, slots=True)
class KnownFailures:
    """The known failures of one implementation."""

    rules: tuple[Rule, ...] = ()

    @property
    def digest(self) -> str:
        return hashlib.sha256(self.to_json().encode()).hexdigest()[:16]

    def recognize(self, signature: Signature, met: Case | CaseFeatures, cause: str | None = None) -> Rule | None:
        """Return the first rule that knows a failure.

        Args:
            signature: The signature of the failure.
            met: The case in which it occurred, and the operation as far as that is known.
            cause: Its cause; None if it was not examined.
        """
        return next(iter(self.recognizing(signature, met, cause)), None)

    def recognizing(self, signature: Signature, met: Case | CaseFeatures, cause: str | None = None) -> list[Rule]:
        """Return every rule that knows a failure, as `recognize`."""
        features = CaseFeatures(met) if isinstance(met, Case) else met
        knowing = [rule for rule in self.rules if rule.knows(signature, features)]
        return [rule for rule in knowing if rule.is_by_cause(signature, cause)]

    def may_end_ranks(self, case: Case) -> Rule | None:
        """Return a rule of a failure that costs the ranks and was seen in such cases."""
        return self.fitting([rule.name for rule in self.rules if rule.ends_ranks], case)

    def fitting(self, names: Iterable[str], case: Case, at: int | None = None) -> Rule | None:
        """Return the first of the named rules whose failure was seen in such cases."""
        wanted = frozenset(names)
        features = CaseFeatures(case, at)
        return next((rule for rule in self.rules if rule.name in wanted and rule.fits(features)), None)

    def with_rule(self, rule: Rule) -> KnownFailures:
        """Return these rules and one more, in the place of one that has its name."""
        return KnownFailures((*self.without_rules([rule.name]).rules, rule))

    def without_rules(self, names: Iterable[str]) -> KnownFailures:
        """Return the rules without those named here."""
        gone = frozenset(names)
        return KnownFailures(tuple(rule for rule in self.rules if rule.name not in gone))

    def examples(self) -> list[tuple[Rule, Case]]:
        """Return the rules that have an example, each with its example."""
        found = []
        for rule in self.rules:
            if rule.example is not None:
                case = Case.from_json(rule.example, f"known failure {rule.name}")
                check_case_with_tree(case, f"known failure {rule.name}")
                found.append((rule, case))
        return found

    def to_json(self) -> str:
        """Return the rules as a JSON document, one line for each field of a rule."""
        rules = ",\n".join(_rule_json(rule) for rule in self.rules)
        return f'{{"format": "{FORMAT.name}", "version": {FORMAT.version}, "rules": [\n{rules}\n]}}\n'


def _rule_json(rule: Rule) -> str:
    given = {name: value for name, value in encode(rule).items() if value not in ("", [], {}, None)}
    return "  {\n" + ",\n".join(f"    {to_json(name)}: {to_json(value)}" for name, value in given.items()) + "\n  }"


def read_known(text: str, where: str) -> KnownFailures:
    """Read a file of rules.

    Raises:
        InvalidRecord: It is damaged, of another version, names a rule twice, or has one without a signature.
    """
    data = load_json(text, where)
    known = decode(KnownFailures, {"rules": FORMAT.read(data, where).get("rules", [])}, where)
    if data["version"] < FORMAT.version:
        raise InvalidRecord(
            f"{where}.version: expected {FORMAT.version}, got {data['version']}. Rules of that version took operations "
            "out of cases; now a rule recognises a failure by its signatures. Give each rule `signatures` (a campaign "
            "with --no-known writes them in finding.json) and rename `drop` to `without`."
        )
    check_rules(known, where)
    return KnownFailures(tuple(map(_with_places, known.rules)))


def check_rules(known: KnownFailures, where: str) -> None:
    """Check that rules of one implementation say how a failure looks, each under a name of its own.

    Raises:
        InvalidRecord: One does not.
    """
    names = [rule.name for rule in known.rules]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise InvalidRecord(f"{where}: expected rules with unique names, got {twice} twice. Rename them.")
    bare = [rule.name for rule in known.rules if not rule.signatures or not all(rule.signatures)]
    if bare:
        raise InvalidRecord(
            f"{where}: expected rules with `signatures` (kind, quantity, operation), got none in {bare}. "
            "A rule without one would match every failure."
        )
    for rule in known.rules:
        rule.check(where)


def _with_places(rule: Rule) -> Rule:
    """Move the link of an earlier version to its new field."""
    if not rule.link:
        return rule
    reported = re.search(r"/(issues|pull)/\d+", rule.link) is not None
    return replace(rule, link="", issue=rule.link) if reported else replace(rule, link="", page=rule.link)


def joined(parts: Iterable[KnownFailures]) -> KnownFailures:
    """Return all rules together; of two rules with one name the first stays."""
    rules: dict[str, Rule] = {}
    for part in parts:
        for rule in part.rules:
            rules.setdefault(rule.name, rule)
    return KnownFailures(tuple(rules.values()))
