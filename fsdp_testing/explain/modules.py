"""Which module is the first whose numbers are wrong? What each computes with and gives, in the order in which it arises.

The inputs and parameters of each call, its outputs and their gradients are compared with those of one process. Where all
of them are right, it is what the operation left: gradients of parameters, or what a step made of them. Only what was
seen is said.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from fsdp_testing.cases.records import Case
from fsdp_testing.explain.compared_pieces import ComparedPiece
from fsdp_testing.explain.patterns import pattern_of
from fsdp_testing.judging.checkers.divergence import Divergence
from fsdp_testing.judging.checkers.explain import ranks_text
from fsdp_testing.oracle.module_values import GRADIENT, INPUT, OUTPUT, PARAMETER, Seen
from fsdp_testing.oracle.quantities import Expected, Quantity
from fsdp_testing.oracle.tensors import Difference, difference

Shown = Mapping[Seen, torch.Tensor]
"""What a rank shows of the calls of its modules."""

STATE = {"gradient": "the gradient of its {}", "value": "its {}", "buffer": "its buffer {}"}


@dataclass(frozen=True, slots=True)
class _Wrong:
    """The first tensor of any call that is wrong, with the ranks on which it is."""

    seen: Seen
    ranks: tuple[int, ...]
    by: Difference


def first_wrong_module(
    case: Case, last: int, expected: Mapping[Seen, Expected], ranks: Sequence[Shown], wrong: Sequence[Divergence]
) -> str:
    """Return a sentence about the first module whose numbers are wrong; empty if the modules show none.

    Args:
        case: A case that diverges.
        last: Operation after which it does.
        expected: What every call of a module gives in one process, in order.
        ranks: What it gave on each rank.
        wrong: What diverges after the operation.
    """
    calls = {seen: one for seen, one in expected.items() if seen.operation <= last}
    compared = [(seen, found) for seen, one in calls.items() if (found := _compared(ranks, seen, one)) is not None]
    if not any(seen.what == OUTPUT for seen, _ in compared):
        return ""
    off = [(seen, found) for seen, found in compared if found.exceeded]
    if off:
        # Ranks compute side by side: first is what is first on any of them.
        order = {
            seen: place for rank in range(len(ranks)) for place, seen in enumerate(s for s in calls if s.rank == rank)
        }
        seen, found = min(off, key=lambda one: (one[0].operation, order[one[0]], one[0].rank))
        alike = tuple(sorted(other.rank for other, _ in off if other._replace(rank=0) == seen._replace(rank=0)))
        own = {one.part for one, _ in compared if one[:5] == seen[:5] and one.what == PARAMETER}
        more = "; its parameters are right" if own and seen.what == OUTPUT else ""
        return _of_call(case, _Wrong(seen, alike, found), more or _like(seen, ranks, calls))
    return _of_state(
        case, last, [seen for seen in calls if seen.operation == last], {seen for seen, _ in compared}, wrong
    )


def _compared(ranks: Sequence[Shown], seen: Seen, one: Expected) -> Difference | None:
    """How far a tensor is from one process; None where a rank did not show it, or in another form."""
    got = ranks[seen.rank].get(seen)
    value = one.value
    if got is None or value is None or got.shape != value.shape or got.dtype != value.dtype:
        return None
    return difference(got, value, one.bound)


def _like(seen: Seen, ranks: Sequence[Shown], calls: Mapping[Seen, Expected]) -> str:
    """What a parameter is like with which a module computes; empty if like nothing that is tried."""
    one = calls[seen]
    if seen.what not in (PARAMETER, INPUT) or one.value is None:
        return ""
    beside = {
        Quantity("value", _fqn(other)): expected
        for other, expected in calls.items()
        if other.what == PARAMETER and (other.operation, other.rank) == (seen.operation, seen.rank)
    }
    got, due = ranks[seen.rank][seen].reshape(-1), one.value.reshape(-1)
    quantity = Quantity("value" if seen.what == PARAMETER else "result", _fqn(seen))
    like = pattern_of([ComparedPiece(quantity, seen.rank, (0, due.numel()), got, due, one.bound)], beside)
    return "" if like is None else f": {like.words}"


def _fqn(seen: Seen) -> str:
    return f"{seen.module}.{seen.part}".lstrip(".")


def _of_call(case: Case, wrong: _Wrong, more: str) -> str:
    seen, by = wrong.seen, wrong.by
    where = f"on {ranks_text(wrong.ranks)} in operation {seen.operation}, {case.program[seen.operation].words()}"
    numbers = [f"{number:.6g}" for number in (by.actual, by.expected)]
    got, due = numbers if len(set(numbers)) > 1 else (repr(by.actual), repr(by.expected))
    size = f"(element {by.position}: got {got}, expected {due})"
    name = module_text(seen.module)
    if seen.what == PARAMETER:
        return f"{name} is the first module that computes with wrong numbers: its {seen.part} {where} {size}{more}"
    if seen.what == INPUT:
        before = "; what is computed before it is right" if seen.module else ""
        return f"what comes into {name} is the first that is wrong, {where} {size}{more}{before}"
    if seen.what == OUTPUT:
        return f"{name} is the first module whose output is wrong, {where} {size}{more}"
    return f"every output is right; the gradient of the output of {name} is the first that is wrong, {where} {size}"


def _of_state(case: Case, last: int, now: Sequence[Seen], right: set[Seen], wrong: Sequence[Divergence]) -> str:
    """What is wrong although every call of every module was right.

    Args:
        case: The case.
        last: The operation after which it is.
        now: What its calls compute, in order.
        right: What was compared, of all operations.
        wrong: What diverges after the operation.
    """
    sorts = {divergence.quantity.kind for divergence in wrong}
    sort = next((one for one in ("gradient", "value", "optimizer", "buffer") if one in sorts), "")
    if not sort or "result" in sorts or last >= len(case.program):
        return ""
    found = [divergence for divergence in wrong if divergence.quantity.kind == sort]
    # Gradients come into being from the last module to the first.
    used = {_fqn(seen): place for place, seen in enumerate(now) if seen.what == PARAMETER}
    first = max(found, key=lambda one: used.get(one.quantity.fqn, -1)) if sort == "gradient" else found[0]
    module, _, part = first.quantity.fqn.rpartition(".")
    what = STATE.get(sort, f"the {first.quantity.part} of its {{}}").format(part)
    others = len({divergence.quantity.fqn for divergence in found}) - 1
    more = f" (and that of {others} more)" if others and sort == "gradient" else ""
    ranks = first.ranks or (() if first.quantity.rank < 0 else (first.quantity.rank,))
    where = f" on {ranks_text(ranks)}" if ranks else ""
    own = [seen for seen in now if seen.module == module]
    operation = f"operation {last}, {case.program[last].words()}"
    before = _what_is_right(own, right) if own else f"it is not called in {operation}, "
    if not now:
        before = f"what it computed before {operation}, is right, "
    return f"{module_text(module)}: {before}{what} is wrong{where}{more}"


def _what_is_right(own: Sequence[Seen], right: set[Seen]) -> str:
    """What a module shows that is as in one process on every rank; empty where something was not compared."""
    whats = {seen.what for seen in own} - {seen.what for seen in own if seen not in right}
    if OUTPUT not in whats:
        return ""
    return "its output and the gradient of its output are right, " if GRADIENT in whats else "its output is right, "


def module_text(module: str) -> str:
    """Return a module in words; the model itself has no name."""
    return f"`{module}`" if module else "the model itself"
