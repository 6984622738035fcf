"""A cause is named only where the implementation claims what its sentence presumes."""

from __future__ import annotations

import pytest
import torch

from fsdp_testing.cases.operations.optimizing import EditGradients, IdleStep
from fsdp_testing.cases.operations.reloading import Reload, TrainElsewhere
from fsdp_testing.cases.records import (
    Batch,
    Case,
    Forward,
    ForwardBackward,
    ModelSpec,
    ObservedPiece,
    Operation,
    OperationResult,
    ParameterObservation,
    RankObservation,
    Snapshot,
    Step,
    WorldSpec,
    ZeroGrad,
)
from fsdp_testing.explain.hypotheses import GRADIENT_IS_NONE, Hypothesis, Sources, WrongNumbers
from fsdp_testing.oracle.gradient_terms import ELSEWHERE, GradientTerm
from fsdp_testing.oracle.quantities import Comparison, Expectation, Expected, ExpectedPoint, Quantity


def output_of(*program: Operation, like: Operation, claimed: frozenset[str] | None) -> Hypothesis | None:
    """What a wrong output is equal to, where one process gives it with `like` in its program and else another."""
    case = Case(ModelSpec("mlp"), WorldSpec(1), program)
    index, quantity = len(program) - 1, Quantity("result", "loss", rank=0)

    def oracle(other: Case) -> Expectation:
        value = torch.tensor([3.5, 7.25] if like in other.program else [1.0, 2.0], dtype=torch.float64)
        index = len(other.program) - 1
        return Expectation((ExpectedPoint(index, {quantity: Expected(value, 1e-9)}),), {})

    wrong = OperationResult(index, {"loss": torch.tensor([3.5, 7.25], dtype=torch.float64)})
    sources = Sources(oracle, terms=lambda _case, _last: (), claimed=claimed)
    return WrongNumbers(case, [RankObservation(0, (wrong,))], Comparison(), sources).hypothesis(lambda _: {})


@pytest.mark.parametrize(
    ("claimed", "named"),
    [(None, True), (frozenset({GRADIENT_IS_NONE, "forward_only"}), True), (frozenset({"forward_only"}), False)],
)
def test_stale_weights_are_not_taken_for_gradients_of_zeros_where_these_are_as_good_as_none(
    claimed: frozenset[str] | None, named: bool
) -> None:
    zeros = ZeroGrad(set_to_none=False)
    found = output_of(ZeroGrad(), Step(), Forward(Batch(0)), like=zeros, claimed=claimed)
    assert (found is not None and "set_to_none=False" in found.happened) is named


@pytest.mark.parametrize(
    ("saving", "named"), [(Reload(), True), (Reload(optimizer=False), False), (TrainElsewhere(Batch(1)), True)]
)
def test_a_state_saved_as_if_a_step_had_been_made_is_named_where_a_state_is_saved(
    saving: Operation, named: bool
) -> None:
    found = output_of(ForwardBackward(Batch(0)), saving, Forward(Batch(1)), like=IdleStep(), claimed=None)
    assert (found is not None and found.happened.endswith("as if a step on zeros had been made")) is named


@pytest.mark.parametrize(("claimed", "named"), [(frozenset({"no_sync"}), True), (frozenset(), False)])
def test_no_sync_is_no_cause_where_nobody_claims_it(claimed: frozenset[str], named: bool) -> None:
    local = ForwardBackward(Batch(0), no_sync=True)
    found = output_of(ForwardBackward(Batch(0)), Step(), Forward(Batch(1)), like=local, claimed=claimed)
    assert (found is not None and "no_sync=True" in found.happened) is named


@pytest.mark.parametrize(
    ("claimed", "lenient", "named"),
    [
        (None, False, True),
        (frozenset({GRADIENT_IS_NONE}), False, True),
        (frozenset({GRADIENT_IS_NONE}), True, False),
        (frozenset(), False, False),
    ],
)
def test_zeros_for_none_explain_only_where_they_differ(
    claimed: frozenset[str] | None, lenient: bool, named: bool
) -> None:
    quantity, other = Quantity("gradient", "w"), Quantity("value", "w")
    case = Case(ModelSpec("mlp"), WorldSpec(1), (Step(),))
    value = Expected(torch.ones(2, dtype=torch.float64))
    point = ExpectedPoint(0, {quantity: Expected(None), other: value}, {"w": True}, {"w": "float64"}, snapshot=True)
    # A number beside zeros shows that a gradient of zeros alone is not what is looked at by the lenient comparison.
    pieces = (ObservedPiece(0, 2, torch.ones(2, dtype=torch.float64)),)
    zeros = (ObservedPiece(0, 2, torch.zeros(2, dtype=torch.float64)),)
    seen = ParameterObservation("w", (2,), "float64", True, pieces, zeros, "float64")
    ranks = [RankObservation(0, (OperationResult(0, {}),), (Snapshot(0, "", {"w": seen}, {}),))]
    sources = Sources(lambda _: Expectation((point,), {"w": (2,)}), terms=lambda _case, _last: (), claimed=claimed)
    found = WrongNumbers(case, ranks, Comparison(none_is_zero=lenient), sources).hypothesis(lambda _: {})
    assert (found is not None and "gradients of zeros" in found.happened) is named


@pytest.mark.parametrize(("edit", "named"), [("halved", True), ("replaced", True), ("given", True), ("zeros", False)])
def test_an_edit_that_had_no_effect_is_named_before_a_sum_in_place_of_a_mean(edit: str, named: bool) -> None:
    """What was cleared is named by what it still contains."""
    quantity, due = Quantity("gradient", "w"), torch.full((2,), 0.5, dtype=torch.float64)
    program = (ForwardBackward(Batch(0)), EditGradients(("*",), edit))

    def oracle(other: Case) -> Expectation:
        value = due if isinstance(other.program[1], EditGradients) else 2 * due
        point = ExpectedPoint(1, {quantity: Expected(value, 1e-9)}, {"w": True}, {"w": "float64"}, snapshot=True)
        return Expectation((point,), {"w": (2,)})

    terms = tuple(GradientTerm(0, 0, rank, {"w": {ELSEWHERE: due}}) for rank in range(2))
    seen = ParameterObservation("w", (2,), "float64", True, (), (ObservedPiece(0, 2, 2 * due),), "float64")
    ranks = [RankObservation(0, (), (Snapshot(1, "", {"w": seen}, {}),))]
    sources = Sources(oracle, terms=lambda _case, _last: terms, claimed=None)
    found = WrongNumbers(Case(ModelSpec("mlp"), WorldSpec(2), program), ranks, Comparison(), sources)
    cause = found.hypothesis(lambda _: {})
    assert cause is not None
    assert (cause.left_out == 1) is named
