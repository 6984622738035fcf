"""Known failures: one list with a record for each defect, from which each command takes its part.

`fuzz` and `certify` take the rules of an implementation, `run` the expected failures of each check, and `ci/known_defects.py`
makes the tables of docs/findings. A user's list has this form or one of two older ones: only rules (JSON), or entries by check
(TOML).
"""

from __future__ import annotations

import functools
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fsdp_testing.base.document import Format, decode, load_toml
from fsdp_testing.base.documentation import text_of
from fsdp_testing.errors import InvalidRecord
from fsdp_testing.judging.known import KnownFailures, Rule, check_rules, read_known

LIST = Path(__file__).parent / "known_failures.toml"
FORMAT = Format("fsdp_testing/known_defects", 1)
PAGES = "docs/findings/"


@dataclass(frozen=True, slots=True)
class Expected:
    """How checks fail because of a defect.

    Attributes:
        on: Implementations; `NAME.tensor_parallel` is NAME with tensor parallelism.
        checks: Names of the checks, each of which fails in all these ways.
        signatures: As in a rule.
        tags: As in a rule, if only some cases of the checks fail this way.
        reason: What goes wrong here, if the defect's reason is not enough.
    """

    on: tuple[str, ...]
    checks: tuple[str, ...]
    signatures: tuple[tuple[str, ...], ...]
    tags: tuple[str, ...] = ()
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Defect:
    """One defect.

    Attributes:
        name: Unique in the list.
        reason: The defect in one sentence.
        page: An address, or `none`. Default: the page NAME.md of docs/findings; for a defect that was public before and has no
            page, the script docs/findings/known/NAME.py.
        issue: Address of the report, if one thread is about it.
        affects: The affected software, for readers.
        effect: Its effect on a user, in a word or two: silent, or an error.
        reported: The public record of a defect that was known before.
        shown: A check and the implementation on which it fails because of it; `NAME+capability` is NAME asked for something
            that it does not claim. For defects whose check is not in `expected`.
        not_shown: Why no check shows it.
        found: How it was found, if neither by a check nor by a rule's program.
        expected: The checks in which it shows.
        rules: How it shows in any case. A rule without page and issue takes both from the defect.
    """

    name: str
    reason: str
    page: str = ""
    issue: str = ""
    affects: str = ""
    effect: str = ""
    reported: str = ""
    shown: tuple[str, ...] = ()
    not_shown: str = ""
    found: str = ""
    expected: tuple[Expected, ...] = ()
    rules: tuple[Rule, ...] = ()

    @property
    def place(self) -> str:
        """Return the page by its path from the root of a checkout, or the address; empty for none."""
        page = self.page or (f"{self.name}.md" if self.affects else f"known/{self.name}.py")
        return page if ":" in page else "" if page == "none" else PAGES + page

    def rules_on(self, name: str) -> Iterator[Rule]:
        """Yield its rules for an implementation."""
        for rule in self.rules:
            if name in rule.on:
                yield replace(rule.of(name), page=rule.page or self.place, issue=rule.issue or self.issue)

    def expected_on(self, name: str) -> Iterator[tuple[str, Rule]]:
        """Yield each check that fails because of it, with each way in which it fails."""
        for entry in self.expected:
            reason = entry.reason or self.reason
            rule = Rule(self.name, reason, self.place, entry.signatures, tags=entry.tags, issue=self.issue)
            yield from ((check, rule) for check in entry.checks if name in entry.on)

    @property
    def implementations(self) -> list[str]:
        """Return the implementations on which it was seen."""
        named = [*(rule.on for rule in self.rules), *(entry.on for entry in self.expected), self.shown[1:]]
        return list(dict.fromkeys(name.partition(".")[0] for names in named for name in names))


def is_list(document: Mapping[str, Any]) -> bool:
    """Return whether a document is a list of defects."""
    return "format" in document and isinstance(document.get("defect"), list)


def read_list(document: Mapping[str, Any], where: str) -> tuple[Defect, ...]:
    """Read a list of defects.

    Raises:
        InvalidRecord: It is damaged, newer than this version, names a defect twice, or has a rule that says too little.
    """
    body = FORMAT.read(dict(document), where)
    defects = tuple(decode(Defect, given, f"{where}: defect {at}") for at, given in enumerate(body.get("defect", ())))
    names = [defect.name for defect in defects]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise InvalidRecord(f"{where}: expected defects with unique names, got {twice} twice. Rename them.")
    for name in sorted({name for defect in defects for rule in defect.rules for name in rule.on}):
        check_rules(rules_of(defects, name), where)
    return defects


def rules_of(defects: Iterable[Defect], name: str) -> KnownFailures:
    """Return the rules of a list for one implementation."""
    return KnownFailures(tuple(rule for defect in defects for rule in defect.rules_on(name)))


def tables_of(defects: Iterable[Defect]) -> dict[str, dict[str, Any]]:
    """Return the expected failures of a list by implementation and check, in the form of a list of entries by check."""
    tables: dict[str, dict[str, Any]] = {}
    for defect in defects:
        for name in dict.fromkeys(name for entry in defect.expected for name in entry.on):
            own, _, beside = name.partition(".")
            table = tables.setdefault(own, {})
            table = table.setdefault(beside, {}) if beside else table
            for check, rule in defect.expected_on(name):
                table.setdefault(check, []).append(rule)
    return tables


@functools.cache
def shipped() -> tuple[Defect, ...]:
    """Return the list that ships with fsdp_testing."""
    return read_list(tomllib.loads(shipped_text()), str(LIST))


def shipped_text() -> str:
    """Return that list as it is written; a wheel has it in the archive of the pages that are made from it."""
    text = LIST.read_text(encoding="utf-8") if LIST.is_file() else text_of("docs/findings/known_failures.toml")
    if text is None:
        raise InvalidRecord(
            f"{LIST}: expected the list of known failures, got an incomplete package. Install it again."
        )
    return text


def shipped_known(name: str) -> KnownFailures:
    """Return the rules that ship with fsdp_testing for implementation `name`; none for an unknown one."""
    return rules_of(shipped(), name)


def read_rules(text: str, where: str, name: str) -> KnownFailures:
    """Read a file of rules, or the rules of a list for one implementation.

    Raises:
        InvalidRecord: The file is neither, or damaged.
    """
    if text.lstrip().startswith("{"):  # TOML cannot begin like this
        return read_known(text, where)
    document = load_toml(text, where)
    return rules_of(read_list(document, where), name)
