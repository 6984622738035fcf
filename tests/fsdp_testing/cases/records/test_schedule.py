"""Deleting any operation of any program leaves a case that runs."""

from __future__ import annotations

import itertools

import pytest

from fsdp_testing.cases.operations import OPERATIONS
from fsdp_testing.cases.operations.micro_batches import LocalMicroBatches
from fsdp_testing.cases.records import (
    Batch,
    BuildOptimizer,
    Case,
    Clip,
    Forward,
    ForwardBackward,
    ModelSpec,
    Observe,
    SetLr,
    Step,
    WorldSpec,
    ZeroGrad,
    check_case,
    plan,
)

MICRO, LOCAL = ForwardBackward(Batch(0)), ForwardBackward(Batch(0), no_sync=True)


def void_operations(case: Case) -> dict[int, str]:
    return {planned.index: planned.void for planned in plan(case) if planned.void}


def case(*program):
    return Case(ModelSpec("mlp"), WorldSpec(2), tuple(program))


def test_what_documentation_forbids_waits_for_reduced_gradients():
    voids = void_operations(case(LOCAL, Step(), Clip(1.0), Forward(Batch(1)), ZeroGrad(), Step(), LOCAL, MICRO, Step()))
    assert set(voids) == {1, 2}
    assert all("await reduction" in reason for reason in voids.values())


def test_only_what_documentation_forbids_is_void_and_its_link_is_given():
    forbidden = {kind for kind, operation in OPERATIONS.items() if operation.forbidden_while_pending}
    assert forbidden == {"step", "clip", "edit_gradients"}
    for kind in forbidden:
        assert "https://pytorch.org/docs/" in OPERATIONS[kind].forbidden_while_pending


def test_zeros_in_place_of_pending_gradients_are_compared_once_they_are_reduced():
    zeros = case(LOCAL, ZeroGrad(False), Step(), MICRO, Step())
    assert [planned.pending for planned in plan(zeros)] == [True, True, True, False, False]
    assert set(void_operations(zeros)) == {2}


def test_pending_gradients_are_marked():
    assert [planned.pending for planned in plan(case(LOCAL, Observe(), MICRO, Observe()))] == [True, True, False, False]


def test_without_an_optimizer_there_is_nothing_to_step():
    assert set(void_operations(case(MICRO, Step(), SetLr(0.1), BuildOptimizer(), Step()))) == {1, 2}
    assert not void_operations(case(MICRO, Step(), SetLr(0.1)))


def test_every_program_is_legal_whatever_is_deleted():
    operations = (MICRO, LOCAL, Step(), ZeroGrad(), Clip(1.0), BuildOptimizer())
    for program in itertools.permutations(operations, 4):
        whole = case(*program)
        check_case(whole)
        for index in range(4):
            smaller = whole.without_operation(index)
            check_case(smaller)
            assert len(list(plan(smaller))) == 3


@pytest.mark.parametrize(
    ("operation", "text"),
    [
        (MICRO, "operation 2 forward_backward(batch 0)"),
        (LOCAL, "operation 2 forward_backward(batch 0, no_sync=True)"),
        (Forward(Batch(3), "eval"), "operation 2 forward(batch 3, mode='eval')"),
        (LocalMicroBatches((Batch(3), Batch(4))), "operation 2 local_micro_batches(batches 3, 4)"),
        (Clip(0.5, float("inf")), "operation 2 clip(max_norm=0.5, norm_type=inf)"),
        (Step(), "operation 2 step()"),
    ],
)
def test_an_operation_is_told_in_one_line(operation, text):
    assert operation.text(2) == text


def test_requirements_follow_from_what_a_case_does():
    needs = case(
        ForwardBackward(Batch(0, (4, 0), ((True,), (False,))), no_sync=True), Forward(Batch(1), "inference"), Clip(1.0)
    ).required()
    assert needs == {
        "full_shard",
        "uneven_batches",
        "unused_parameters",
        "unused_parameters_differ",
        "no_sync",
        "forward_only",
        "inference_mode",
        "clip_grad_norm",
    }
