"""Much simpler cases that are worth a try before a failure is taken apart piece by piece.

Most failures need two operations, the simplest settings and hardly any model. Asking for that outright costs a few
attempts, where one part at a time costs dozens.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from fsdp_testing.cases.records import AXES, Case, ModelSpec, WrappingPlan
from fsdp_testing.explain.shrinking.ddmin import joined
from fsdp_testing.explain.shrinking.reductions import Node, operations, settings, with_width
from fsdp_testing.judging.signature import Signature

_SKELETONS: tuple[tuple[list[Node], tuple[str, ...]], ...] = (
    ([{"kind": "linear", "name": "a", "out": 2}], ()),
    ([{"kind": "linear", "name": "a", "out": 2}, {"kind": "linear", "name": "b", "out": 2}], ("a",)),
    ([{"kind": "linear", "name": "a", "out": 2}, {"kind": "linear", "name": "b", "out": 2}], ("a", "b")),
)
"""Small models to which many failures do not mind being moved, with the units that are wrapped."""

_LAYOUTS = ((("a", "colwise"), ("b", "rowwise")), (("a", "rowwise"), ("b", "colwise")))
"""What is made of them over a second axis."""


def on_small_models(case: Case) -> Iterator[Case]:
    """Yield the case on a very small model, and with all its settings at their simplest."""
    plain = _plain_settings(case)
    for nodes, units in _SKELETONS:
        model = ModelSpec("tree", dtype=case.model.dtype, tree={"width": 2, "nodes": [dict(node) for node in nodes]})
        if case.model.tree is None or len(case.model.tree["nodes"]) > len(nodes) or case.wrapping.units != units:
            for layouts in _LAYOUTS if case.world.tensor_parallel > 1 else ((),):
                small = replace(case, model=model, wrapping=WrappingPlan(units, layouts=layouts))
                yield _plain_settings(small)
                yield small
    if case.model.tree is not None:
        thin = replace(case.model, tree=with_width(case.model.tree, 2))
        yield _plain_settings(replace(case, model=thin))
        yield replace(case, model=thin)
    yield plain


def _plain_settings(case: Case) -> Case:
    for axis in AXES:
        case = axis.plain(case)
    return case


def beginnings(case: Case, signature: Signature) -> list[Case]:
    """Return the case up to each operation after which it may be that the failure shows; the shortest first."""
    length = len(case.program)
    ends = [index + 1 for index, operation in enumerate(case.program) if operation.kind == signature.operation]
    ends = ends or sorted({length // 4, length // 2, 3 * length // 4, length} - {0})
    return [replace(case, program=case.program[:end]) for end in ends]


def minimal_programs(case: Case) -> Iterator[Case]:
    """Yield the case with its last operation alone, and with one other before it."""
    if len(case.program) > 2:
        *before, last = case.program
        yield replace(case, program=(last,))
        for operation in reversed(before):
            yield replace(case, program=(operation, last))


def minimal_programs_of_beginnings(case: Case, signature: Signature) -> Iterator[Case]:
    """Yield the minimal programs of all beginnings, the smallest first."""
    candidates = [candidate for beginning in beginnings(case, signature) for candidate in minimal_programs(beginning)]
    yield from sorted(candidates, key=lambda candidate: len(candidate.program))


def simplest(case: Case) -> Case:
    """Return the case with all settings and all operations at their simplest."""
    for kind in (settings, operations):
        case = joined(kind, case, [step.key for step in kind(case)])
    return case
