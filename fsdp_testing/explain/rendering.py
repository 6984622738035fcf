"""Words a reduced failure in one or two sentences: schedule, what is wrong, by how much, and what it is like."""

from __future__ import annotations

from collections.abc import Mapping

from fsdp_testing.cases.records import RAISES, Case, Finding
from fsdp_testing.explain.contributions import of_program, sentence
from fsdp_testing.explain.hypotheses import Hypothesis, kinds_text
from fsdp_testing.judging.checkers.explain import listed, ranks_text

UnshardedUnits = Mapping[str, tuple[int, ...]]


def render(finding: Finding, like: Hypothesis | None, unsharded: UnshardedUnits, cast: str = "") -> str:
    """Return the account of a finding on its shortest schedule.

    Args:
        finding: The finding; its case is the shortest one.
        like: What the wrong numbers are equal to.
        unsharded: Units that were gathered when the operation without effect began, with the ranks on which they were.
        cast: Which cast gives these numbers, in mixed precision; empty if none does.
    """
    case = finding.case
    schedule = listed([operation.words() for operation in case.program[: finding.operation + 1]], "then")
    after = f"After {schedule}" if schedule else "While building and wrapping the model"
    if finding.kind in RAISES:
        return f"{after}: {finding.statement}"
    wrong = f"{after}: {_what_is_wrong(finding)}"
    if cast:
        return f"{after}: {cast}; {_what_is_wrong(finding)}, and is what one process gives with that cast."
    if like is None:
        return f"{wrong}."
    if like.pattern is not None:
        return f"{wrong}, and is {like.pattern.words}{_where(like)}."
    return f"{after}: {clause(case, like, unsharded)}; {_what_is_wrong(finding)}, {_equal_to(case, like)}."


def _what_is_wrong(finding: Finding) -> str:
    if finding.max_error is None:
        # Without the place, which the schedule has just said.
        return finding.statement or finding.explanation
    size = f"max error {finding.max_error:.3g}"
    if finding.bound is not None:
        size += f", bound {finding.bound:.2g}" if finding.bound else ", equal bits were due"
    where = "" if " on rank " in finding.quantity or not finding.ranks else f" on {ranks_text(finding.ranks)}"
    return f"{finding.quantity} is wrong{where} ({size})"


def clause(case: Case, like: Hypothesis, unsharded: UnshardedUnits) -> str:
    """Return what happened, without the schedule and the numbers."""
    if like.contributions is not None:
        return sentence(like.contributions, case.world.size, of_program(case))
    if like.pattern is not None:
        return f"what is wrong is {like.pattern.words}{_where(like)}"
    if like.happened:
        return f"{like.happened}{_where(like)}"
    operation = case.program[like.left_out]
    name = f"operation {like.left_out}, {operation.words()}"
    if like.kinds == {"result"} and operation.writes_parameters:
        if unsharded:
            place = ranks_text(tuple(sorted({rank for ranks in unsharded.values() for rank in ranks})))
            verb = "holds" if len(unsharded) == 1 else "hold"
            return f"{units_text(tuple(unsharded))} still {verb} the weights from before {name}, on {place}"
        return f"the weights from before {name}, are still in use"
    return f"{name}, had no effect on {kinds_text(like.kinds)}{_where(like)}"


def _where(like: Hypothesis) -> str:
    return f" on {ranks_text(like.ranks)}" if like.ranks else ""


def _equal_to(case: Case, like: Hypothesis) -> str:
    if like.contributions is not None:
        return "and is, within the bound, what the terms of one process add up to so"
    if like.happened:
        return f"and {like.confirmed}"
    text = case.program[like.left_out].text(like.left_out)
    for_whom = f" for {units_text(like.units)}" if like.units else ""
    return f"and is what one process gives without {text}{for_whom}"


def units_text(units: tuple[str, ...]) -> str:
    """Return units in words; the root has no name."""
    if units == ("",):
        return "the root unit"
    noun = "unit" if len(units) == 1 else "units"
    return f"{noun} {listed([f'`{unit}`' if unit else '(root)' for unit in units])}"
