"""Names the first module whose numbers are wrong, by the inputs and outputs of each module in the order of computation.

The inputs and parameters of each call, its outputs and their gradients are compared with those of one process. If all of them
are right, the fault is in the result of the operation: gradients of parameters, or parameters after a step. Only observed facts
are reported.
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
"""The quantities of a module call that a rank reports."""

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
    calls = {tensor: expectation for tensor, expectation in expected.items() if tensor.operation <= last}
    pairs = ((tensor, _compared(ranks, tensor, expectation)) for tensor, expectation in calls.items())
    compared = [(tensor, gap) for tensor, gap in pairs if gap is not None]
    if not any(tensor.what == OUTPUT for tensor, _ in compared):
        return ""
    beyond = [(tensor, gap) for tensor, gap in compared if gap.exceeded]
    if beyond:
        # Ranks compute in parallel: take the first wrong value on any rank.
        order = {
            tensor: position
            for rank in range(len(ranks))
            for position, tensor in enumerate(s for s in calls if s.rank == rank)
        }
        tensor, gap = min(beyond, key=lambda pair: (pair[0].operation, order[pair[0]], pair[0].rank))
        alike = tuple(
            sorted(sibling.rank for sibling, _ in beyond if sibling._replace(rank=0) == tensor._replace(rank=0))
        )
        own = {sibling.part for sibling, _ in compared if sibling[:5] == tensor[:5] and sibling.what == PARAMETER}
        more = "; its parameters are right" if own and tensor.what == OUTPUT else ""
        return _of_call(case, _Wrong(tensor, alike, gap), more or _like(tensor, ranks, calls))
    return _of_state(
        case, last, [tensor for tensor in calls if tensor.operation == last], {tensor for tensor, _ in compared}, wrong
    )


def _compared(ranks: Sequence[Shown], tensor: Seen, expectation: Expected) -> Difference | None:
    """The error of a tensor against one process; None if a rank did not show it, or showed it in another form."""
    got = ranks[tensor.rank].get(tensor)
    value = expectation.value
    if got is None or value is None or got.shape != value.shape or got.dtype != value.dtype:
        return None
    return difference(got, value, expectation.bound)


def _like(tensor: Seen, ranks: Sequence[Shown], calls: Mapping[Seen, Expected]) -> str:
    """The pattern of a parameter that a module computes with; empty if no pattern fits."""
    expectation = calls[tensor]
    if tensor.what not in (PARAMETER, INPUT) or expectation.value is None:
        return ""
    beside = {
        Quantity("value", _fqn(sibling)): expected
        for sibling, expected in calls.items()
        if sibling.what == PARAMETER and (sibling.operation, sibling.rank) == (tensor.operation, tensor.rank)
    }
    got, due = ranks[tensor.rank][tensor].reshape(-1), expectation.value.reshape(-1)
    quantity = Quantity("value" if tensor.what == PARAMETER else "result", _fqn(tensor))
    like = pattern_of([ComparedPiece(quantity, tensor.rank, (0, due.numel()), got, due, expectation.bound)], beside)
    return "" if like is None else f": {like.words}"


def _fqn(tensor: Seen) -> str:
    return f"{tensor.module}.{tensor.part}".lstrip(".")


def _of_call(case: Case, wrong: _Wrong, more: str) -> str:
    tensor, gap = wrong.seen, wrong.by
    where = f"on {ranks_text(wrong.ranks)} in operation {tensor.operation}, {case.program[tensor.operation].words()}"
    numbers = [f"{number:.6g}" for number in (gap.actual, gap.expected)]
    got, due = numbers if len(set(numbers)) > 1 else (repr(gap.actual), repr(gap.expected))
    size = f"(element {gap.position}: got {got}, expected {due})"
    name = module_text(tensor.module)
    if tensor.what == PARAMETER:
        return f"{name} is the first module that computes with wrong numbers: its {tensor.part} {where} {size}{more}"
    if tensor.what == INPUT:
        before = "; everything computed before it is right" if tensor.module else ""
        return f"the input of {name} is the first wrong value, {where} {size}{more}{before}"
    if tensor.what == OUTPUT:
        return f"{name} is the first module whose output is wrong, {where} {size}{more}"
    return f"every output is right; the gradient of the output of {name} is the first that is wrong, {where} {size}"


def _of_state(case: Case, last: int, now: Sequence[Seen], right: set[Seen], wrong: Sequence[Divergence]) -> str:
    """The quantities that are wrong although every call of every module was right."""
    sorts = {divergence.quantity.kind for divergence in wrong}
    sort = next((kind for kind in ("gradient", "value", "optimizer", "buffer") if kind in sorts), "")
    if not sort or "result" in sorts or last >= len(case.program):
        return ""
    divergences = [divergence for divergence in wrong if divergence.quantity.kind == sort]
    # Gradients are computed from the last module to the first.
    used = {_fqn(tensor): position for position, tensor in enumerate(now) if tensor.what == PARAMETER}
    first = divergences[0]
    if sort == "gradient":
        first = max(divergences, key=lambda divergence: used.get(divergence.quantity.fqn, -1))
    module, _, part = first.quantity.fqn.rpartition(".")
    what = STATE.get(sort, f"the {first.quantity.part} of its {{}}").format(part)
    count = len({divergence.quantity.fqn for divergence in divergences}) - 1
    more = f" (and that of {count} more)" if count and sort == "gradient" else ""
    ranks = first.ranks or (() if first.quantity.rank < 0 else (first.quantity.rank,))
    where = f" on {ranks_text(ranks)}" if ranks else ""
    own = [tensor for tensor in now if tensor.module == module]
    operation = f"operation {last}, {case.program[last].words()}"
    before = _what_is_right(own, right) if own else f"it is not called in {operation}, "
    if not now:
        before = f"its results before {operation}, are right, "
    return f"{module_text(module)}: {before}{what} is wrong{where}{more}"


def _what_is_right(own: Sequence[Seen], right: set[Seen]) -> str:
    """The quantities of a module that are right on every rank; empty if one was not compared."""
    whats = {tensor.what for tensor in own} - {tensor.what for tensor in own if tensor not in right}
    if OUTPUT not in whats:
        return ""
    return "its output and the gradient of its output are right, " if GRADIENT in whats else "its output is right, "


def module_text(module: str) -> str:
    """Return a module in words; the model itself has no name."""
    return f"`{module}`" if module else "the model itself"
