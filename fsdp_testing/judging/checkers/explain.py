"""Makes a finding of a fact: its place in the program, and one sentence that is rendered from the facts."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from fsdp_testing.cases.records import Case, FailureKind, Finding, Overrun, RaisedError
from fsdp_testing.errors import CollectiveMismatch
from fsdp_testing.judging.checkers.divergence import Divergence


def operation_text(case: Case, index: int) -> str:
    """Return operation `index` in one line; wrapping and the end of the program have names of their own."""
    if index < 0:
        return "building and wrapping the model"
    if index >= len(case.program):
        return "the end of the program"
    return case.program[index].text(index)


def explain(case: Case, divergence: Divergence, count: int) -> str:
    """Return one sentence for `divergence`; `others` more were found at the same point."""
    where = "at" if divergence.index >= len(case.program) else "after"
    more = f"; {count} more quantities diverge there" if count else ""
    return f"{where} {operation_text(case, divergence.index)}: {_statement(divergence)}{more}"


def finding_of(case: Case, divergence: Divergence, divergences: Sequence[Divergence]) -> Finding:
    """Return the finding that reports `divergence`, which leads of all `divergences` at its point."""
    return finding(
        case,
        divergence.kind,
        str(divergence.quantity),
        divergence.index,
        _statement(divergence),
        explain(case, divergence, len(divergences) - 1),
        ranks=divergence.ranks,
        wrong_on=tuple(sorted({rank for wrong in divergences for rank in wrong.ranks})),
        max_error=divergence.max_error,
        bound=divergence.bound,
        bound_derivation=divergence.derivation,
        sort=divergence.quantity.sort,
        fqn=divergence.quantity.fqn,
        mismatch=divergence.mismatch,
    )


def raised_finding(case: Case, errors: Mapping[int, RaisedError]) -> Finding:
    """Return the finding that ranks raised, reported by the earliest one."""
    _, error = min(errors.items(), key=lambda item: (item[1].index, item[0]))
    line = next(iter(error.message.strip().splitlines()), "")
    everyone = len(errors) == case.world.size
    # Which ranks notice that their collectives differ is a matter of moments: it is one failure, be it one rank or all.
    parted = error.type_name == f"{CollectiveMismatch.__module__}.{CollectiveMismatch.__qualname__}"
    who = "every rank" if everyone else ranks_text(tuple(sorted(errors)))
    statement = f"{who} raised {error.type_name}: {line}"
    if error.not_supported:
        # The capabilities that the failing operation, or the case as a whole, needs.
        inside = 0 <= error.index < len(case.program)
        needed = (case.program[error.index].required() if inside else frozenset()) or case.required()
        statement = f"it claims {', '.join(sorted(needed))}, but {statement}, at {_place(error.traceback)}"
    return finding(
        case,
        FailureKind.RAISED if everyone and not parted else FailureKind.ONE_RAISED,
        error.type_name,
        error.index,
        statement,
        ranks=tuple(sorted(errors)),
        message=error.message.strip(),
        refused=error.not_supported,
        detail="\n".join(f"--- rank {number}\n{item.traceback}" for number, item in sorted(errors.items())),
    )


def overrun_finding(case: Case, overrun: Overrun) -> Finding:
    """Return the finding that an operation takes more memory or communication than it may."""
    kind, quantity, ranks = overrun.kind, overrun.quantity, (overrun.rank,)
    return finding(case, kind, quantity, overrun.operation, overrun.sentence, ranks=ranks, overrun=overrun)


def finding(
    case: Case, kind: FailureKind, quantity: str, index: int, statement: str, explanation: str = "", **facts: Any
) -> Finding:
    """Return a finding, with the sentence that says where it was and what is wrong.

    Args:
        case: The case.
        kind: The kind of failure.
        quantity: The wrong quantity, in two or three words.
        index: The operation in or after which it fails.
        statement: The fault, without its place.
        explanation: The whole sentence; by default the statement, inside the operation.
        **facts: More fields of `Finding`, `ranks` among them.
    """
    text = operation_text(case, index)
    return Finding(
        kind=kind,
        quantity=quantity,
        operation=index,
        operation_text=text,
        explanation=explanation or f"in {text}: {statement}",
        case=case,
        statement=statement,
        **facts,
    )


def ranks_text(ranks: tuple[int, ...]) -> str:
    """Return ranks in words: rank 1, ranks 0 and 2."""
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {listed([str(rank) for rank in ranks])}"


def listed(words: Sequence[str], last: str = "and") -> str:
    """Return words as a list in a sentence: a, b and c."""
    return f" {last} ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def _statement(divergence: Divergence) -> str:
    sentence = f"{divergence.quantity} {divergence.sentence}"
    if divergence.quantity.rank < 0 and divergence.ranks and divergence.kind != FailureKind.DISAGREED:
        sentence += f", on {ranks_text(divergence.ranks)}"
    return sentence


def _place(account: str) -> str:
    """File and line of the innermost frame of a traceback."""
    frames = re.findall(r'^  File "([^"]+)", line (\d+)', account, re.MULTILINE)
    return f"{frames[-1][0]}:{frames[-1][1]}" if frames else "an unknown place"
