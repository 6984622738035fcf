"""Ranks that use different branches: the loss of each must train something, or that of none."""

from __future__ import annotations

import pytest

from fsdp_testing.cases.drawing.normal_form import legal_case
from fsdp_testing.cases.records import Batch, Case, ForwardBackward, Freeze, ModelSpec, Operation, Thaw, WorldSpec

PARTS = ((True, False), (False, True))


def branch(name: str, number: int, **fields: object) -> dict[str, object]:
    inner = [{"kind": "linear", "name": "x", "out": 2}]
    return {"kind": "group", "name": name, "branch": number, "nodes": inner, "residual": True, **fields}


def case(*program: Operation, always: bool = False, **fields: object) -> Case:
    """Two branches and what a tree cannot be without, a part that always runs; it is frozen unless `always`."""
    nodes = [branch("a", 0), branch("b", 1, **fields), {"kind": "linear", "name": "last", "out": 2}]
    program = program if always else (Freeze(("last.*",)), *program)
    return Case(ModelSpec("tree", tree={"width": 2, "nodes": nodes}), WorldSpec(2), program)


def usages(given: Case) -> list[tuple[tuple[bool, ...], ...]]:
    return [batch.usage for operation in legal_case(given).program for batch in operation.batches()]


MICRO = ForwardBackward(Batch(1, usage=PARTS))


def test_a_branch_that_is_frozen_on_one_rank_only_runs_on_none() -> None:
    assert usages(case(MICRO, Freeze(("b.*",)), MICRO, Thaw(("b.*",)), MICRO)) == [PARTS, PARTS[:1], PARTS]


def test_a_part_that_always_trains_leaves_branches_as_they_are() -> None:
    assert usages(case(Freeze(("b.*",)), MICRO, always=True)) == [PARTS]


@pytest.mark.parametrize("field", ["dropped", "keeps"])
def test_what_the_loss_may_not_see_trains_nothing_for_certain(field: str) -> None:
    assert usages(case(MICRO, **{field: True})) == [PARTS[:1]]


def test_nothing_trains_anywhere() -> None:
    assert usages(case(Freeze(("*",)), MICRO)) == [PARTS]


def test_what_awaits_reduction_is_reduced() -> None:
    """A backward that trains nothing on any rank would leave it, and no implementation would be called."""
    local = ForwardBackward(Batch(1, usage=PARTS[:1]), no_sync=True)
    first = ForwardBackward(Batch(2, usage=PARTS[:1]))
    assert usages(case(local, Freeze(("a.*",)), first)) == [PARTS[:1], ()]
    assert usages(case(local, Freeze(("a.*",)), MICRO)) == [PARTS[:1], ()]  # rank 0's branch on every rank
    assert usages(case(local, Freeze(("a.*",)), local, first)) == [PARTS[:1], PARTS[:1], ()]
    assert usages(case(first, Freeze(("a.*",)), first)) == [PARTS[:1], PARTS[:1]]
    assert usages(case(local, Freeze(("a.*",)), MICRO, Thaw(("a.*",)), first, dropped=True)) == [PARTS[:1], PARTS[:1]]
    zoo = Case(ModelSpec("mlp"), WorldSpec(2), (local, Freeze(("*",)), first, Freeze(("*",)), first))
    assert [operation.kind for operation in legal_case(zoo).program] == [local.kind, first.kind, "freeze", first.kind]
