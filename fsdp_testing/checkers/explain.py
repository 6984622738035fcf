"""How is a divergence told to people? One sentence that names the operation, the quantity, the ranks and the size."""

from __future__ import annotations

import re

from fsdp_testing.checkers.divergence import Divergence
from fsdp_testing.records import Case, Finding, RaisedError


def operation_text(case: Case, index: int) -> str:
    """Returns operation `index` in one line; wrapping and the end of the program have names of their own."""
    if index < 0:
        return "building and wrapping the model"
    if index >= len(case.program):
        return "the end of the program"
    return case.program[index].text(index)


def explain(case: Case, divergence: Divergence, others: int) -> str:
    """Returns one sentence for `divergence`; `others` more were found at the same point."""
    where = "at" if divergence.index >= len(case.program) else "after"
    sentence = f"{where} {operation_text(case, divergence.index)}: {divergence.quantity} {divergence.sentence}"
    if divergence.quantity.rank < 0 and divergence.ranks and divergence.kind != "disagreed":
        sentence += f", on {_ranks(divergence.ranks)}"
    return sentence + (f"; {others} more quantities diverge there" if others else "")


def finding_of(case: Case, divergence: Divergence, others: int) -> Finding:
    """Returns the finding that reports `divergence`."""
    return Finding(
        kind=divergence.kind,
        quantity=str(divergence.quantity),
        operation=divergence.index,
        operation_text=operation_text(case, divergence.index),
        ranks=divergence.ranks,
        explanation=explain(case, divergence, others),
        case=case,
        max_error=divergence.max_error,
        bound=divergence.bound,
        bound_derivation=divergence.derivation,
    )


def raised_finding(case: Case, errors: dict[int, RaisedError]) -> Finding:
    """Returns the finding that ranks raised, told by the earliest one.

    Args:
        case: The case.
        errors: What each rank raised, by rank; not empty.
    """
    _, error = min(errors.items(), key=lambda item: (item[1].index, item[0]))
    lines = error.message.strip().splitlines() or [""]
    who = "every rank" if len(errors) == case.world.size else _ranks(tuple(sorted(errors)))
    text = operation_text(case, error.index)
    told = f"{who} raised {error.type_name}: {lines[0]}"
    if error.not_supported:
        told = f"it claims {_claims(case, error.index)}, but {told}, at {_place(error.traceback)}"
    return Finding(
        kind="raised",
        quantity=error.type_name,
        operation=error.index,
        operation_text=text,
        ranks=tuple(sorted(errors)),
        explanation=f"in {text}: {told}",
        case=case,
        detail="\n".join(f"--- rank {number}\n{item.traceback}" for number, item in sorted(errors.items())),
    )


def _place(account: str) -> str:
    """File and line of the innermost frame of a traceback."""
    frames = re.findall(r'^  File "([^"]+)", line (\d+)', account, re.MULTILINE)
    return f"{frames[-1][0]}:{frames[-1][1]}" if frames else "an unknown place"


def _claims(case: Case, index: int) -> str:
    """The capabilities that the failing operation, or the case as a whole, needs."""
    inside = 0 <= index < len(case.program)
    needed = (case.program[index].required() if inside else frozenset()) or case.required()
    return ", ".join(sorted(needed))


def _ranks(ranks: tuple[int, ...]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"
