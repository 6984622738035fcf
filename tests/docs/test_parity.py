"""docs/parity.md says of two pairs of implementations what `fsdp-verify parity` finds today."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from fsdp_testing.explain.trace.order_parity import CaseParity, compare_case, parity_cases
from fsdp_testing.report.parity import differing_aspects

PAGE = (Path(__file__).resolve().parents[2] / "docs/parity.md").read_text(encoding="utf-8")
PAIRS = [("fsdp_ref-wrapper", "fsdp_ref-composable"), ("torch-fsdp1", "torch-fsdp2")]


def said(left: str, right: str) -> dict[tuple[str, str], list[str]]:
    """The table of a pair: model and strategy to the aspects in which they differ."""
    table = PAGE.split(f"<!-- parity {left} {right} -->")[1].split("\n\n")[0]
    found: dict[tuple[str, str], list[str]] = {}
    for line in table.strip().splitlines()[2:]:
        models, strategies, aspects = (cell.strip() for cell in line.strip("|").split("|"))
        for model in re.findall(r"`(\w+)`", models):
            for strategy in re.findall(r"`(\w+)`", strategies):
                found[model, strategy] = [] if aspects == "nothing" else aspects.split(", ")
    return found


def compared(left: str, right: str) -> list[CaseParity]:
    return [compare_case(left, right, case) for case in parity_cases(left, right, 2)]


@pytest.mark.parametrize(("left", "right"), PAIRS)
def test_every_case_of_the_command_has_a_row(left: str, right: str) -> None:
    cases = {(case.model.name, case.strategy) for case in parity_cases(left, right, 2)}
    assert cases == set(said(left, right))


@pytest.mark.slow
@pytest.mark.parametrize(("left", "right"), PAIRS)
def test_the_table_is_what_the_command_finds(left: str, right: str) -> None:
    found = compared(left, right)
    assert {(one.case.model.name, one.case.strategy): differing_aspects(one) for one in found} == said(left, right)
    assert not [fault for one in found for fault in one.faults]


@pytest.mark.slow
def test_the_three_reasons_account_for_every_row_that_differs() -> None:
    """Asked twice, one gather for nothing after the forward without backward, and 208 elements where FSDP1 has 200."""
    for one in compared("torch-fsdp1", "torch-fsdp2"):
        rows = {
            (comparison.aspect, row.left, row.right)
            for comparison in one.comparisons
            for row in comparison.rows
            if not row.same
        }
        unshards = {row for row in rows if row[0] == "requests" and not row[1] and row[2].startswith("unshard ")}
        wasted = {("memory", "", "gather layers.2"), ("memory", "", "free layers.2")}
        wasted |= {("collectives", "", "all_gather float64[72] on 2 ranks")}
        padded = {
            ("collectives", f"{kind} float64[200] on 2 ranks", f"{kind} float64[208] on 2 ranks")
            for kind in ("all_gather", "reduce_scatter(sum)")
        }
        expected = {"mlp": wasted, "gpt": padded}.get(one.case.model.name, set())
        assert unshards
        assert rows - unshards == expected
