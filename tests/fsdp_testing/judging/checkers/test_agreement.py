"""Parity is a pure function of what was observed: each kind of divergence, alone, is found and reported."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from fsdp_testing.cases.records import (
    Batch,
    BufferObservation,
    Case,
    FailureKind,
    ForwardBackward,
    ModelSpec,
    ObservedPiece,
    OperationResult,
    OptimizerObservation,
    ParameterObservation,
    RaisedError,
    RankObservation,
    Snapshot,
    Step,
    WorldSpec,
)
from fsdp_testing.errors import HarnessError
from fsdp_testing.judging.checkers.agreement import compare, first, require_decided
from fsdp_testing.judging.checkers.divergence import Divergence
from fsdp_testing.judging.checkers.explain import explain, finding_of, raised_finding
from fsdp_testing.oracle.quantities import Comparison, Expectation, Expected, ExpectedPoint, Quantity

W = torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=torch.float64)
G = torch.tensor([0.5, 0.0, -0.5, 1.0], dtype=torch.float64)
M = G * 0.1
CASE = Case(ModelSpec("mlp"), WorldSpec(2), (ForwardBackward(Batch(0)), Step()))


def pieces(whole, rank):
    start, stop = (0, 3) if rank == 0 else (3, 4)
    return (ObservedPiece(start, stop, whole[start:stop].clone()),)


def snapshot(rank, **changes):
    parameter = ParameterObservation("w", (2, 2), "float64", True, pieces(W, rank), pieces(G, rank), "float64")
    return Snapshot(
        1,
        "",
        {"w": dataclasses.replace(parameter, **changes)},
        {"b": BufferObservation("b", "float64", torch.tensor([float(rank)], dtype=torch.float64))},
        {"w": OptimizerObservation("w", {"momentum_buffer": pieces(M, rank)}, {"step": 1.0})},
    )


def ranks(*snapshots, losses=(0.25, 0.75)):
    return [
        RankObservation(
            rank,
            (OperationResult(0, {"loss": torch.tensor(losses[rank], dtype=torch.float64)}),),
            (taken,),
        )
        for rank, taken in enumerate(snapshots)
    ]


def expectation(gradient=G, bound=1e-12, **fields):
    state = {
        Quantity("gradient", "w"): Expected(None if gradient is None else gradient.reshape(2, 2), bound, "why"),
        Quantity("value", "w"): Expected(W.reshape(2, 2), bound),
        Quantity("optimizer", "w", "momentum_buffer"): Expected(M.reshape(2, 2), bound),
        Quantity("optimizer", "w", "step"): Expected(torch.tensor(1.0)),
        Quantity("buffer", "b", "", 0): Expected(torch.tensor([0.0], dtype=torch.float64)),
        Quantity("buffer", "b", "", 1): Expected(torch.tensor([1.0], dtype=torch.float64)),
    }
    results = {
        Quantity("result", "loss", "", rank): Expected(torch.tensor(loss, dtype=torch.float64), bound)
        for rank, loss in enumerate((0.25, 0.75))
    }
    point = ExpectedPoint(1, state, {"w": True}, {"w": "float64"}, snapshot=True, **fields)
    return Expectation((ExpectedPoint(0, results), point), {"w": (2, 2)})


def said(tally):
    return [f"{found.kind}: {found.quantity} {found.sentence}" for found in tally.divergences]


def test_what_agrees_is_counted_and_passes():
    tally = compare(expectation(), ranks(snapshot(0), snapshot(1)), Comparison())
    assert said(tally) == []
    assert tally.comparisons == 9  # two losses, gradient, value, momentum, two step counters, two buffers


@pytest.mark.parametrize(("off", "undecided"), [(1.0 / 8, 1), (1.0 / 32, 0), (0.0, 0)])
def test_a_bound_that_admits_nearly_everything_decides_nothing(off, undecided):
    """A program may amplify roundings until its bound is larger than the numbers; what is equal there still is."""
    seen = ranks(snapshot(0, grad_pieces=pieces(changed(G, 0, off), 0)), snapshot(1))
    tally = compare(expectation(bound=50.0), seen, Comparison())
    assert said(tally) == []
    assert len(tally.undecided) == undecided
    if undecided:
        assert "gradient of w is off by 0.125 where no number is larger than 1" in (
            f"{tally.undecided[0].quantity} {tally.undecided[0].sentence}"
        )
        with pytest.raises(HarnessError, match="so this decides nothing"):
            require_decided(tally)
    else:
        require_decided(tally)


@pytest.mark.parametrize(
    ("value", "bound"), [(math.nan, 0.0), (math.nan, math.inf), (math.inf, 1.0), (math.inf, math.inf)]
)
def test_what_is_no_number_decides_nothing(value, bound):
    """NaN looks like every other NaN, and a bound that grew with an infinity admits anything."""
    wanted, seen = G.clone(), G.clone()
    wanted[0] = seen[0] = value
    seen[3] += 0.5 if value == math.inf else 0.0
    held = ranks(*(snapshot(rank, grad_pieces=pieces(seen, rank)) for rank in range(2)))
    tally = compare(expectation(gradient=wanted, bound=bound), held, Comparison())
    assert said(tally) == []
    (undecided,) = tally.undecided
    assert str(undecided.quantity) == "gradient of w"
    assert undecided.sentence.endswith("so this decides nothing")


def test_a_result_within_an_enormous_bound_is_not_decided_either():
    tally = compare(expectation(bound=50.0), ranks(snapshot(0), snapshot(1), losses=(0.25, 1.0)), Comparison())
    assert said(tally) == []
    assert [str(one.quantity) for one in tally.undecided] == ["loss on rank 1"]


def changed(whole, index, by):
    other = whole.clone()
    other[index] += by
    return other


@pytest.mark.parametrize(
    ("rank_one", "message"),
    [
        ({"pieces": pieces(changed(W, 3, 1e-9), 1)}, "diverged: parameter w is off by 1e-09 (bound 1e-12), element 3"),
        (
            {"grad_pieces": pieces(changed(G, 3, 1.0), 1)},
            "diverged: gradient of w is off by 1 (bound 1e-12), element 3",
        ),
        ({"grad_pieces": None, "grad_dtype": None}, "diverged: gradient of w is None, expected numbers (up to 1)"),
        ({"pieces": ()}, "missing: parameter w is held by no rank from element 3 on"),
        (
            {"grad_pieces": (ObservedPiece(3, 3, torch.empty(0, dtype=torch.float64)),)},
            "missing: gradient of w is held by no rank",
        ),
        ({"requires_grad": False}, "diverged: parameter w has requires_grad=False, expected True"),
        ({"dtype": "float32", "grad_dtype": "float32"}, "diverged: parameter w has dtype float32, expected float64"),
        ({"grad_dtype": "bfloat16"}, "diverged: gradient of w has dtype bfloat16, expected float64"),
        (
            {"pieces": (ObservedPiece(2, 4, torch.tensor([3.5, 4.0], dtype=torch.float64)),)},
            "disagreed: parameter w differs between ranks 0 and 1, first in element 2",
        ),
    ],
)
def test_each_divergence_of_a_parameter_is_found(rank_one, message):
    tally = compare(expectation(), ranks(snapshot(0), snapshot(1, **rank_one)), Comparison())
    assert any(line.startswith(message) for line in said(tally)), said(tally)


def held_whole(off):
    """Two ranks that hold the same whole gradient, the second one a little off in one element."""
    return ranks(*(snapshot(rank, grad_pieces=(ObservedPiece(0, 4, changed(G, 2, off * rank)),)) for rank in (0, 1)))


def test_ranks_that_hold_one_model_together_may_differ_within_the_bound():
    """Each place in the model reduces by itself: only ranks of one place must hold the same bits."""
    strictly, over_parts = Comparison(), Comparison(tensor_parallel=2)
    assert said(compare(expectation(), held_whole(1e-13), over_parts)) == []
    # Of one place, they contradict each other.
    torn = said(compare(expectation(), held_whole(1e-13), strictly))
    assert torn == ["disagreed: gradient of w differs between ranks 0 and 1, first in element 2"]
    # Beyond the bound the second one is wrong, although the whole is made of what the first holds.
    (wrong,) = compare(expectation(), held_whole(0.5), over_parts).divergences
    assert (wrong.kind, wrong.ranks) == (FailureKind.DIVERGED, (1,))
    assert wrong.max_error == pytest.approx(0.5)


def test_ranks_that_diverge_are_named():
    tally = compare(expectation(), ranks(snapshot(0), snapshot(1, pieces=pieces(W + 1, 1))), Comparison())
    assert tally.divergences[0].ranks == (1,)


def test_results_come_before_state_and_end_the_comparison():
    seen = ranks(snapshot(0), snapshot(1, pieces=pieces(W + 1, 1)), losses=(0.25, 0.5))
    tally = compare(expectation(), seen, Comparison())
    assert said(tally) == ["diverged: loss on rank 1 is off by 0.25 (bound 1e-12): got 0.5, expected 0.75"]
    tally = compare(expectation(), seen, Comparison(outputs=False))
    assert said(tally)[0].startswith("diverged: parameter w")


def test_a_gradient_that_must_be_none():
    seen = ranks(snapshot(0), snapshot(1))
    tally = compare(expectation(None), seen, Comparison())
    assert said(tally)[0] == "diverged: gradient of w holds numbers (up to 0.5), expected None"
    zeros = [snapshot(r, grad_pieces=pieces(G * 0, r)) for r in range(2)]
    assert said(compare(expectation(None), ranks(*zeros), Comparison()))
    assert not said(compare(expectation(None), ranks(*zeros), Comparison(none_is_zero=True)))
    none = [snapshot(r, grad_pieces=None, grad_dtype=None) for r in range(2)]
    assert not said(compare(expectation(None), ranks(*none), Comparison()))
    assert said(compare(expectation(G * 0), ranks(*none), Comparison()))
    assert not said(compare(expectation(G * 0), ranks(*none), Comparison(none_is_zero=True)))
    assert said(compare(expectation(G), ranks(*none), Comparison(none_is_zero=True)))


def test_a_gradient_that_is_not_a_number_is_no_zero_wherever_it_lies():
    nan = torch.full((2,), torch.nan, dtype=torch.float64)
    for parts in ((G[:2] * 0, nan), (nan, G[:2] * 0)):
        held = tuple(ObservedPiece(start, start + 2, part) for start, part in zip((0, 2), parts))
        one = snapshot(0, pieces=(ObservedPiece(0, 4, W.clone()),), grad_pieces=held)
        two = snapshot(1, pieces=(ObservedPiece(4, 4, W[:0]),), grad_pieces=None, grad_dtype=None)
        assert said(compare(expectation(None), ranks(one, two), Comparison(none_is_zero=True)))


def test_where_zeros_may_stand_for_none_numbers_of_other_ranks_are_compared_all_the_same():
    none = snapshot(1, grad_pieces=None, grad_dtype=None)
    allowed = Comparison(none_is_zero=True)
    assert not said(compare(expectation(G * 0), ranks(snapshot(0, grad_pieces=pieces(G * 0, 0)), none), allowed))
    wrong = compare(expectation(G * 0), ranks(snapshot(0, grad_pieces=pieces(G * 0 + 7, 0)), none), allowed)
    assert [(one.ranks, one.sentence.partition(",")[0]) for one in wrong.divergences] == [
        ((0,), "is off by 7 (bound 1e-12)")
    ]
    whole = (ObservedPiece(0, 4, W.clone()),)
    held = snapshot(0, pieces=whole, grad_pieces=(ObservedPiece(0, 4, G * 0 + 7),))
    torn = compare(
        expectation(G * 0),
        ranks(
            held, dataclasses.replace(none, parameters={"w": dataclasses.replace(none.parameters["w"], pieces=whole)})
        ),
        allowed,
    )
    assert [one.kind for one in torn.divergences] == ["disagreed", "diverged"]


def test_pending_gradients_are_not_compared():
    seen = ranks(snapshot(0, grad_pieces=pieces(G + 1, 0)), snapshot(1))
    assert not said(compare(expectation(pending=True), seen, Comparison()))


def test_a_rank_without_elements_may_have_no_gradient():
    one = snapshot(0, pieces=(ObservedPiece(0, 4, W.clone()),), grad_pieces=(ObservedPiece(0, 4, G.clone()),))
    two = snapshot(1, pieces=(ObservedPiece(4, 4, W[:0]),), grad_pieces=None, grad_dtype=None)
    tally = compare(expectation(), ranks(one, two), Comparison(optimizer=False))
    assert not said(tally)


def test_optimizer_state_is_compared():
    wrong = dataclasses.replace(
        snapshot(1), optimizer={"w": OptimizerObservation("w", {"momentum_buffer": pieces(M * 2, 1)}, {"step": 2.0})}
    )
    lines = said(compare(expectation(), ranks(snapshot(0), wrong), Comparison()))
    assert lines[0].startswith("diverged: optimizer state momentum_buffer of w is off by")
    assert lines[1].startswith("diverged: optimizer state step of w on rank 1 is off by 1")
    assert not said(compare(expectation(), ranks(snapshot(0), wrong), Comparison(optimizer=False)))
    silent = [dataclasses.replace(snapshot(r), optimizer=None) for r in range(2)]
    assert not said(compare(expectation(), ranks(*silent), Comparison()))


def test_optimizer_state_that_one_rank_does_not_have_is_missing():
    silent = dataclasses.replace(snapshot(1), optimizer=None)
    wrong = dataclasses.replace(
        snapshot(0), optimizer={"w": OptimizerObservation("w", {"momentum_buffer": pieces(M * 2, 0)}, {"step": 2.0})}
    )
    for other in (snapshot(0), wrong):
        tally = compare(expectation(), ranks(other, silent), Comparison())
        assert (
            said(tally)[0] == "missing: optimizer state momentum_buffer of w is missing, although other ranks have one"
        )
        assert tally.divergences[0].ranks == (1,)
    nothing = dataclasses.replace(silent, parameters={"w": snapshot(1, pieces=()).parameters["w"]})
    whole = snapshot(0, pieces=(ObservedPiece(0, 4, W.clone()),), grad_pieces=(ObservedPiece(0, 4, G.clone()),))
    whole = dataclasses.replace(
        whole,
        optimizer={
            "w": OptimizerObservation("w", {"momentum_buffer": (ObservedPiece(0, 4, M.clone()),)}, {"step": 1.0})
        },
    )
    nothing = dataclasses.replace(
        nothing, parameters={"w": dataclasses.replace(nothing.parameters["w"], grad_pieces=None, grad_dtype=None)}
    )
    assert not said(compare(expectation(), ranks(whole, nothing), Comparison()))


def test_buffers_are_each_ranks_own():
    swapped = dataclasses.replace(snapshot(1), buffers=snapshot(0).buffers)
    assert said(compare(expectation(), ranks(snapshot(0), swapped), Comparison())) == [
        "diverged: buffer b on rank 1 is off by 1 (bound 0): got 0.0, expected 1.0"
    ]
    gone = dataclasses.replace(snapshot(1), buffers={})
    assert said(compare(expectation(), ranks(snapshot(0), gone), Comparison())) == [
        "missing: buffer b on rank 1 is gone"
    ]


def test_a_rank_that_reports_nothing_is_missing():
    silent = RankObservation(1, (OperationResult(0, {"loss": torch.tensor(0.75, dtype=torch.float64)}),), ())
    tally = compare(expectation(), [ranks(snapshot(0), snapshot(1))[0], silent], Comparison())
    assert said(tally) == ["missing: state was not reported"]
    assert tally.divergences[0].ranks == (1,)


def test_comparison_ends_before_an_operation_that_raised():
    error = RaisedError(1, "RuntimeError", "no", "trace")
    seen = [dataclasses.replace(rank, error=error, snapshots=()) for rank in ranks(snapshot(0), snapshot(1))]
    tally = compare(expectation(), seen, Comparison())
    assert not tally.divergences
    assert tally.comparisons == 2
    finding = raised_finding(CASE, {0: error, 1: error})
    assert finding.explanation == "in operation 1 step(): every rank raised RuntimeError: no"


def test_ignored_parameters_are_left_out():
    seen = ranks(snapshot(0), snapshot(1, pieces=pieces(W + 1, 1)))
    assert not said(compare(expectation(), seen, Comparison(ignore=("w",))))


def test_the_leading_divergence_is_the_one_that_explains_most():
    quantity = Quantity("value", "w")
    small = Divergence("diverged", quantity, 0, (), "", max_error=2.0, bound=1.0)
    large = Divergence("diverged", quantity, 0, (), "", max_error=9.0, bound=1.0)
    torn = Divergence("disagreed", quantity, 0, (0, 1), "")
    gone = Divergence("missing", quantity, 0, (), "")
    assert first([small, large]) is large
    assert first([small, large, torn]) is torn
    assert first([torn, gone]) is gone


def test_explanations_name_operation_quantity_ranks_and_size():
    tally = compare(expectation(), ranks(snapshot(0), snapshot(1, pieces=pieces(W + 1, 1))), Comparison())
    sentence = explain(CASE, tally.divergences[0], 2)
    assert sentence == (
        "after operation 1 step(): parameter w is off by 1 (bound 1e-12), element 3: got 5.0, expected 4.0, on rank 1; "
        "2 more quantities diverge there"
    )
    finding = finding_of(CASE, tally.divergences[0], tally.divergences * 3)
    assert finding.explanation == sentence
    assert (finding.quantity, finding.operation, finding.ranks, finding.wrong_on) == ("parameter w", 1, (1,), (1,))
    assert finding.max_error == 1.0


def test_every_rank_on_which_something_diverges_is_named_whichever_quantity_leads():
    norms = [
        Divergence(
            FailureKind.DIVERGED, Quantity("result", "total_norm", rank=rank), 1, (rank,), "is off", max_error=1.0
        )
        for rank in (2, 0)
    ]
    finding = finding_of(CASE, norms[0], norms)
    assert (finding.quantity, finding.ranks, finding.wrong_on) == ("total norm on rank 2", (2,), (0, 2))
