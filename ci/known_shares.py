"""How much the known failures of the fuzzer would excuse. `python ci/known_shares.py [NAME...]` prints a table.

Cases are drawn as a campaign draws them. In each, a failure is supposed at every operation at which it can show, in every unit,
and the rules are asked whether they know it. Nothing runs.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import NamedTuple

from fsdp_testing.adapters import registry
from fsdp_testing.cases.drawing import CaseDrawer, Scope, SeededChoices
from fsdp_testing.cases.records import Case, FailureKind
from fsdp_testing.checks.findings.known import shipped_known
from fsdp_testing.judging.known import CaseFeatures, Rule
from fsdp_testing.judging.signature import Signature, operation_kind
from fsdp_testing.judging.tags import units_of_tree

CASES = 400
NAMES = ("torch-ddp", "torch-fsdp1", "torch-fsdp1-flat", "torch-fsdp2")
LOOKS = tuple(
    Signature(FailureKind(kind), quantity, operation)
    for kind, quantity, operation in (
        ("diverged", "output", "forward"),
        ("diverged", "value and optimizer state", "step"),
        ("diverged", "value", "end"),
        ("diverged", "value", "reload"),
        ("diverged", "gradient", "forward_backward"),
        ("diverged", "gradient is None", "forward_backward"),
        ("diverged", "gradient holds numbers", "forward_backward"),
        ("disagreed", "gradient", "forward_backward"),
        ("diverged", "total_norm", "clip"),
        ("excess", "gathers", "forward_backward"),
        ("kept", "full parameters", "forward"),
        ("kept", "full parameters", "forward_backward"),
    )
)
"""Failures that random cases can show."""
_WITHOUT_UNIT = {"output", "total_norm", "gathers"}
"""Quantities that are of no unit; whatever else fails is supposed in each of the units, and counts by their share."""


class Share(NamedTuple):
    """Of what share of all cases a failure that looks so would be taken for known, somewhere in the case.

    Attributes:
        look: The failure.
        known: By its looks.
        unasked: Of these, where a rule that knows it names no cause: whatever its cause is, the failure is known.
        blind: Of these, where no second run shows what it may hide either.
        most: The rule that knows it most often.
    """

    look: Signature
    known: float
    unasked: float
    blind: float
    most: str


def shares(name: str, cases: int = CASES) -> Iterator[Share]:
    """Yield what the rules that ship for an implementation would excuse."""
    drawer = CaseDrawer(Scope(registry.load(name).claimed(1)))
    drawn = [drawer.draw(SeededChoices((7 << 40) + number)) for number in range(cases)]
    known = shipped_known(name)
    asked_of_units = any(rule.units for rule in known.rules)
    for look in LOOKS:
        counted: dict[str, float] = {}
        unasked = blind = 0.0
        for case in drawn:
            of_units = asked_of_units and look.quantity not in _WITHOUT_UNIT
            units: list[str | None] = [*sorted(units_of_tree(case))] if of_units else []
            for unit in units or [None]:
                share = 1 / max(len(units), 1)
                where = None if unit is None else (unit,)
                knowing = [
                    rules
                    for at in _places(case, look)
                    if (rules := known.recognizing(look, CaseFeatures(case, at, where)))
                ]
                for rules in knowing[:1]:
                    counted[rules[0].name] = counted.get(rules[0].name, 0) + share
                bare = [rule for rules in knowing for rule in rules if not rule.asks_cause(look)]
                unasked += share * bool(bare)
                blind += share * any(not _runs_again(rule, case) for rule in bare)
        total = sum(counted.values())
        yield Share(
            look, total / cases, unasked / cases, blind / cases, max(counted, key=counted.__getitem__, default="")
        )


def _places(case: Case, look: Signature) -> list[int]:
    """Operations in or after which a failure can look so."""
    places = [at for at in range(len(case.program) + 1) if operation_kind(case, at).startswith(look.operation)]
    if look.quantity == "output":  # a forward with a backward gives outputs, too
        places = [at for at, operation in enumerate(case.program) if operation.kind.startswith("forward")]
    return places


def _runs_again(rule: Rule, case: Case) -> bool:
    return rule.variant(case) is not None


def main(names: list[str]) -> None:
    """Print the shares of each implementation."""
    for name in names or NAMES:
        print(f"{name}: of {CASES} cases, known by its looks / not asked its cause / without a second run either")
        for share in shares(name):
            if share.known:
                numbers = " / ".join(f"{part:5.1%}" for part in share[1:4])
                print(f"  {share.look!s:<55} {numbers}   {share.most}")


if __name__ == "__main__":
    main(sys.argv[1:])
