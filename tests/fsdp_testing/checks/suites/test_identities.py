"""Which cases each check runs is on record (`identities.txt`): a change of it is meant, and shows in a diff.

    python tests/fsdp_testing/checks/suites/test_identities.py > tests/fsdp_testing/checks/suites/identities.txt

One line for each check, in the order of reports: its name, a digest of the identities of its cases on two, three and four
ranks under every strategy, and the capabilities without which it is not asked.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from fsdp_testing.cases.records import CAPABILITIES
from fsdp_testing.checks.suites import CHECKS, Check

RECORD = Path(__file__).with_name("identities.txt")


def line_of(check: Check) -> str:
    places = check.places(frozenset(CAPABILITIES), (2, 3, 4), "gloo")
    identities = " ".join(case.identity for place in places for case in check.build(place))
    return " ".join((check.name, hashlib.sha256(identities.encode()).hexdigest()[:12], *sorted(check.needs)))


def test_checks_have_the_names_order_needs_and_cases_that_are_on_record():
    assert [line_of(check) for check in CHECKS.values()] == RECORD.read_text().splitlines()


if __name__ == "__main__":
    print(*map(line_of, CHECKS.values()), sep="\n")
