"""Recognises expected failures by how they fail, never by the name of the check alone.

An entry that only names a check would excuse any failure of it: a new error instead of a known rounding, all numbers
instead of one. So an entry gives kind, quantity and operation, as `Signature` does, and optionally the parameter and the
cause. It becomes a rule as in the fuzzer (`known.py`), which decides. A check fails as expected if each of its failing cases
does.
"""

from __future__ import annotations

import difflib
import hashlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fsdp_testing.base.document import to_json
from fsdp_testing.cases.records import (
    LOSES_RANKS,
    RAISES,
    CheckResult,
    ExpectedFailure,
    FailureKind,
    Finding,
    Verdict,
    merge,
)
from fsdp_testing.errors import InvalidArgument
from fsdp_testing.judging.known import KnownFailures, Rule, features_of
from fsdp_testing.judging.signature import FIELDS, UNWRITTEN, entry_line, look_of, signature_of

CauseOf = Callable[[Finding], str]
"""What one process would have to do to give the wrong numbers of a finding, as a clause; empty if unknown."""

NO_CASE = "has no case for world size"
"""How the explanation of a check begins that has nothing to run in worlds of the given sizes."""
_WITHOUT_OPERATION = LOSES_RANKS | {FailureKind.LEAKED}


@dataclass(frozen=True, slots=True)
class Expectation:
    """What a user expects of one check on one implementation.

    Attributes:
        failures: The known failures; each names how it fails.
        bare: A reason alone; it excuses nothing, because it would excuse anything.
    """

    failures: tuple[Rule, ...] = ()
    bare: str = ""

    @property
    def reason(self) -> str:
        reasons = [entry.text for rule in self.failures for entry in rule.entries()]
        return "; ".join(dict.fromkeys([*reasons, *filter(None, [self.bare])]))

    @property
    def lists_hangs(self) -> bool:
        """Whether a hang is expected: then later cases must run, or the hang would excuse them."""
        return any(entry.kind == FailureKind.HUNG for rule in self.failures for entry in rule.entries())


def read_expectation(given: Any, where: str, problems: list[str]) -> Expectation:
    """Read what a user wrote for one check: one entry, a list of entries, or a reason alone.

    Args:
        given: The user's text.
        where: Check and implementation, for messages.
        problems: Gets a sentence for each mistake.
    """
    if isinstance(given, str):
        if not given.strip():
            problems.append(f"{where} has no reason")
        return Expectation(bare=given)
    several = given if isinstance(given, Sequence) else [given]
    if not several:
        problems.append(f"{where} has no entry")
    return Expectation(tuple(_entries(several, where, problems)))


def expectations(
    given: Mapping[str, Any] | None, names: Sequence[str], checks: Collection[str]
) -> dict[str, dict[str, Expectation]]:
    """Read what a user expects: entries by check for all implementations, or such a mapping for each implementation.

    Raises:
        InvalidArgument: A name that is no check or implementation, or an entry that does not say how it fails.
    """
    problems: list[str] = []
    found: dict[str, dict[str, Expectation]] = {name: {} for name in names}
    for key, entry in (given or {}).items():
        if key in found and isinstance(entry, Mapping):
            tables = {key: entry}
        elif key in checks or not isinstance(entry, Mapping):
            tables = {name: {key: entry} for name in names}
        else:
            problems.append(f"{key!r} is neither a check nor one of the implementations")
            continue
        for name, table in tables.items():
            for check, expected in table.items():
                if check not in checks:
                    near = difflib.get_close_matches(str(check), checks, n=1)
                    problems.append(
                        f"{check!r} is not a check ({name})" + (f"; did you mean {near[0]}?" if near else "")
                    )
                found[name][check] = read_expectation(expected, f"{check!r} ({name})", problems)
    if problems:
        raise InvalidArgument(
            f"expected_failures: expected {{check: entry}} or {{implementation: {{check: entry}}}} with entries of "
            f"{', '.join(FIELDS)}, got: {'; '.join(dict.fromkeys(problems))}. A run without the list prints the entries."
        )
    return found


def digest(expected: Mapping[str, Mapping[str, Expectation]]) -> str:
    """Return what differs where expected failures do; empty if there are none."""
    text = to_json({name: dict(sorted(table.items())) for name, table in sorted(expected.items()) if table})
    return hashlib.sha256(text.encode()).hexdigest()[:16] if text != "{}" else ""


def _entries(given: Iterable[Any], where: str, problems: list[str]) -> Iterator[Rule]:
    for entry in given:
        if isinstance(entry, Rule):
            yield entry
            continue
        if isinstance(entry, ExpectedFailure):
            entry = {name: getattr(entry, name) for name in FIELDS}
        if not isinstance(entry, Mapping):
            problems.append(f"{where} has {entry!r}, where a table of {', '.join(FIELDS)} belongs")
            continue
        wrong = list(_wrong(entry))
        problems += [f"{where}: {text}" for text in wrong]
        if not wrong:
            yield Rule.of_entry(ExpectedFailure(**{**entry, "kind": FailureKind(entry["kind"])}))


def _wrong(entry: Mapping[str, Any]) -> Iterator[str]:
    for name in entry:
        if name not in FIELDS:
            near = difflib.get_close_matches(str(name), FIELDS, n=1)
            yield f"{name!r} is none of {', '.join(FIELDS)}" + (f"; did you mean {near[0]}?" if near else "")
        elif not isinstance(entry[name], str):
            yield f"{name} is no text"
        elif entry[name] == UNWRITTEN.get(name):
            advice = "the defect in one sentence" if name == "reason" else "where it is described, or leave it out"
            yield f"{name} is still {entry[name]}; write {advice}"
    given = {name: value for name, value in entry.items() if isinstance(value, str) and value.strip()}
    kind = given.get("kind", "")
    if kind not in set(FailureKind):
        yield f"kind is {kind!r}, and not one of {', '.join(FailureKind)}"
        return
    needed = {"reason"} | ({"quantity"} if kind != FailureKind.HUNG else set())
    needed |= {"operation"} if kind not in _WITHOUT_OPERATION else set()
    lacking = [name for name in FIELDS if name in needed and name not in given]
    if lacking:
        yield f"lacks {', '.join(lacking)}"
    elif kind in RAISES and ": " not in f"{given['quantity']} ":
        yield f"quantity is {given['quantity']!r}; expected type and beginning of the message, as in 'ValueError: expected'"


def as_expected(result: CheckResult, expectation: Expectation, cause_of: CauseOf) -> CheckResult:
    """Return the result as seen by a user who expects these failures.

    Each failing case must fail in one of the listed ways; any other is new, and leads the account. A check that passes, or is not
    claimed, makes the entry stale; one that is unknown, or has cases for worlds of other sizes alone, does not.

    Args:
        result: The result of the check.
        expectation: The user's entry.
        cause_of: Asked of a finding that looks like an entry that names a cause.
    """
    seen = replace(result, expected=expectation.reason)
    if result.verdict is Verdict.NOT_CLAIMED and result.explanation.startswith(NO_CASE):
        return seen
    if result.verdict in (Verdict.PASS, Verdict.NOT_CLAIMED):
        return replace(seen, verdict=Verdict.STALE)
    if result.verdict is not Verdict.FAIL:
        return seen
    findings = [_recognised(finding, expectation.failures, cause_of) for finding in result.findings]
    known = [finding for finding in findings if finding.expected is not None]
    new = [finding for finding in findings if finding.expected is None]
    failing = sum(case.verdict is Verdict.FAIL for case in result.cases)
    if new or len(known) < max(failing, 1):
        said = new[0].explanation if new else result.explanation
        return replace(
            seen, findings=(*new, *known), explanation=said, remark=_unexpected(result, expectation, new, known)
        )
    verdicts = [Verdict.EXPECTED_FAILURE if case.verdict is Verdict.FAIL else case.verdict for case in result.cases]
    met = {finding.expected for finding in known}
    idle = [entry.look for rule in expectation.failures for entry in rule.entries() if entry not in met]
    remark = f"listed, but no case fails in this way: {'; '.join(idle)}" if idle else ""
    return replace(seen, findings=tuple(known), verdict=merge([*verdicts, Verdict.EXPECTED_FAILURE]), remark=remark)


def _recognised(finding: Finding, rules: Iterable[Rule], cause_of: CauseOf) -> Finding:
    """The finding with its matching entry, or unchanged; with its cause, if an entry asked for it."""
    signature = signature_of(finding)
    fitting = KnownFailures(tuple(rules)).recognizing(signature, features_of(finding))
    known = next((rule for rule in fitting if not rule.asks_cause(signature)), None)
    if known is not None or not fitting:
        return replace(finding, expected=known.entry_for(signature) if known is not None else None)
    cause = ""
    for _ in range(
        2
    ):  # a world lost during the search leaves the cause unknown, which must not look like a different cause
        cause = cause_of(finding) or cause
        known = next((rule for rule in fitting if rule.is_by_cause(signature, cause)), None)
        if known is not None:
            break
    return replace(finding, expected=known.entry_for(signature, cause) if known is not None else None, happened=cause)


def _unexpected(result: CheckResult, expectation: Expectation, new: Sequence[Finding], known: Sequence[Finding]) -> str:
    if not expectation.failures:
        return (
            f"listed as known ({expectation.bare}), without saying how it fails; a reason alone excuses nothing. "
            f"To expect this failure, write {entry_line(result.check, new)}"
        )
    beside = f"{len(known)} of its failing cases {'is' if len(known) == 1 else 'are'} known; " if known else ""
    looks = "; ".join(dict.fromkeys(entry.look for rule in expectation.failures for entry in rule.entries()))
    got = "; ".join(dict.fromkeys(look_of(finding) for finding in new)) or "a failure without an account"
    return f"{beside}the list has {looks}; this failure is {got}"
