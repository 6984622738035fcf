"""The rules over accounts find each promise that is not kept, and nothing in a program that keeps them all."""

from __future__ import annotations

import pytest

from fsdp_testing.cases.records import (
    AssignData,
    Batch,
    Case,
    EditFullParameters,
    Forward,
    ForwardBackward,
    Interrupt,
    Measure,
    ModelSpec,
    OperationAccount,
    Reload,
    SeveralForwards,
    Step,
    UnshardFirst,
    WorldSpec,
)
from fsdp_testing.judging.checkers.overruns import CommunicationBudget, first_overrun

BUDGET = CommunicationBudget(uses=1, padded_bytes=200, reductions=2)
MICRO = ForwardBackward(Batch(0))
LOCAL = ForwardBackward(Batch(0), no_sync=True)
LOOK = Forward(Batch(0), "eval")
ASSIGNED = AssignData(("*",), 0.5, Batch(0))
BY_HAND = UnshardFirst(Batch(0))
EDIT = EditFullParameters(("*",), 0.5)
SEVERAL = SeveralForwards((Batch(0), Batch(1)))


def case(*program, strategy="full_shard"):
    return Case(ModelSpec("mlp"), WorldSpec(2), program, strategy=strategy)


def account(index, *held, **expected):
    return OperationAccount(index, held=tuple((unit, 64) for unit in held), **expected)


def review(program, *accounts, strategy="full_shard", budget=BUDGET):
    """Rank 1 is the one that is looked at; rank 0 keeps everything."""
    return first_overrun(case(*program, strategy=strategy), [(), accounts], budget)


def passing(index, gathers=(100, 90, 100, 90), reductions=(100, 90), units=("a", "b", "b", "a"), held=()):
    """A micro-batch over two units under full_shard, as it should be."""
    return account(index, *held, backward=True, gathered=units, gather_bytes=gathers, reduction_bytes=(*reductions, 8))


def test_a_program_that_keeps_its_promises_breaks_none():
    program = (LOOK, MICRO, Step(), LOCAL, MICRO)
    looked = account(0, "", gathered=("a", "b"), gather_bytes=(100, 90))
    local = passing(3, reductions=())
    assert review(program, looked, passing(1), local, passing(4)) is None


KEPT = {
    "by a backward": ((MICRO,), (passing(0, held=("a",)),), "full_shard"),
    "by a backward inside no_sync": ((LOCAL,), (passing(0, reductions=(), held=("a",)),), "full_shard"),
    "by several forwards": ((SEVERAL,), (account(0, "a", backward=True),), "full_shard"),
    "by gathering first": ((UnshardFirst(Batch(0)),), (account(0, "", backward=True),), "full_shard"),
    "by a forward": ((LOOK,), (account(0, "a"),), "full_shard"),
    "by a forward in a mesh": ((LOOK,), (account(0, "a"),), "hybrid_shard"),
    "by a micro-batch without backward": ((MICRO,), (account(0, "a"),), "full_shard"),
    "by a backward, kept before": ((LOOK, MICRO), (account(0, "a"), passing(1, held=("a",))), "shard_grad_op"),
    "by a step": ((LOOK, Step()), (account(0, "a"), account(1, "a", "b")), "shard_grad_op"),
    "by a step, freed between": (
        (LOOK, MICRO, Step()),
        (account(0, "a"), passing(1, (100, 90), units=("a", "b")), account(2, "a")),
        "shard_grad_op",
    ),
    "by wrapping": ((MICRO,), (account(-1, "a"), passing(0)), "full_shard"),
    "by loading": ((LOOK, Reload()), (account(0, ""), account(1, "")), "full_shard"),
}


@pytest.mark.parametrize(("program", "accounts", "strategy"), KEPT.values(), ids=list(KEPT))
def test_full_parameters_that_are_kept_are_told(program, accounts, strategy):
    found = review(program, *accounts, strategy=strategy)
    assert found is not None
    assert (found.kind, found.quantity) == ("kept", "full parameters")
    assert found.operation == (-1 if accounts[0].index < 0 else len(program) - 1)
    assert "stay gathered on rank 1" in found.sentence
    assert "64 bytes" in found.sentence
    assert (found.rank, found.limit) == (1, 0)
    assert found.measured == sum(size for _, size in found.units) >= 64


HELD = {
    "the root after a forward": ((LOOK,), (account(0, ""),), "full_shard"),
    "everything after a forward": ((LOOK,), (account(0, "", "a", "b"),), "shard_grad_op"),
    "everything while gradients wait": ((LOCAL,), (account(0, "", "a", backward=True),), "shard_grad_op"),
    "what a forward left, after a step": (
        (LOOK, Step()),
        (account(0, ""), account(1, "", backward=False)),
        "full_shard",
    ),
    "what was open when the user's code raised": ((Interrupt(Batch(0)),), (account(0, "a"),), "full_shard"),
    "the same at the next look": ((Interrupt(Batch(0)), LOOK), (account(0, "a"), account(1, "a", "")), "full_shard"),
    "the root after a forward with new storage": ((ASSIGNED,), (account(0, ""),), "full_shard"),
    "units that were gathered by hand": (
        (UnshardFirst(Batch(0), ("", "a")),),
        (account(0, "a"),),
        "full_shard",
    ),
}


@pytest.mark.parametrize(("program", "accounts", "strategy"), HELD.values(), ids=list(HELD))
def test_what_a_strategy_may_hold_is_no_failure(program, accounts, strategy):
    assert review(program, *accounts, strategy=strategy) is None


EXCESS = {
    "a third gather of a unit": (
        (MICRO,),
        passing(0, units=("a", "b", "b", "a", "b")),
        "full_shard",
        "gathered 3 times",
    ),
    "a second gather where all is kept": ((MICRO,), passing(0, gathers=()), "shard_grad_op", "gathered 2 times"),
    "bytes that no unit tells of": ((MICRO,), passing(0, gathers=(100, 90, 100, 90, 90)), "full_shard", "470 bytes"),
    "bytes of a forward": ((LOOK,), account(0, gather_bytes=(190, 90)), "full_shard", "280 bytes"),
    "bytes though nothing is sharded": ((MICRO,), passing(0, (32,), (100,), ()), "no_shard", "32 bytes"),
    "a third reduction": ((MICRO,), passing(0, reductions=(100, 90, 17)), "full_shard", "3 reductions"),
    "a reduction inside no_sync": ((LOCAL,), passing(0, reductions=(17,)), "full_shard", "1 reductions"),
    "a reduction of a forward": ((LOOK,), account(0, reduction_bytes=(64,)), "full_shard", "1 reductions"),
    "a gather of a step": ((Step(),), account(0, gather_bytes=(64,)), "full_shard", "64 bytes"),
    "a fifth gather for two forwards": ((SEVERAL,), passing(0, units=("a",) * 5), "full_shard", "gathered 5 times"),
    "reductions of more backwards": ((SEVERAL,), passing(0, reductions=(90,) * 5), "full_shard", "5 reductions"),
    "a fourth gather, one by hand": ((BY_HAND,), passing(0, units=("a",) * 4), "full_shard", "gathered 4 times"),
    "a second gather of an edit": ((EDIT,), account(0, gathered=("a", "a")), "full_shard", "gathered 2 times"),
    "a reduction of an edit": ((EDIT,), account(0, reduction_bytes=(64,)), "full_shard", "1 reductions"),
}


@pytest.mark.parametrize(("program", "expected", "strategy", "words"), EXCESS.values(), ids=list(EXCESS))
def test_communication_that_nobody_needs_is_told(program, expected, strategy, words):
    found = review(program, expected, strategy=strategy)
    assert found is not None
    assert found.kind == "excess"
    assert words in found.sentence
    assert "rank 1" in found.sentence
    assert (found.rank, found.operation) == (1, len(program) - 1)
    assert found.measured > found.limit
    assert str(found.measured) in words
    assert review(program, expected, strategy=strategy, budget=None) is None


def test_what_runs_several_times_may_be_gathered_as_often():
    expected = passing(0, (100, 90) * 4, (100, 90) * 2, ("a", "b") * 4)
    assert review((MICRO,), expected, budget=CommunicationBudget(2, 200, 2)) is None
    assert review((MICRO,), expected) is not None


def test_several_forwards_and_gathering_by_hand_cost_as_much_more():
    for strategy in ("full_shard", "shard_grad_op"):
        expected = passing(0, (100, 90) * 4, (100, 90) * 2, ("a", "b") * 4)
        assert review((SEVERAL,), expected, strategy=strategy) is None
    assert review((BY_HAND,), passing(0, units=("a",) * 3, gathers=(100, 90) * 3)) is None
    assert review((EDIT,), account(0, gathered=("a", "b"), gather_bytes=(100, 90))) is None


def test_flags_and_norms_are_no_communication_of_parameters():
    assert review((Step(),), account(0, gather_bytes=(16,), reduction_bytes=(16,))) is None


def test_a_whole_copy_that_is_cast_is_filled_and_moves_nothing():
    expected = account(0, backward=True, gathered=("a",) * 5, reduction_bytes=(100,))
    assert review((MICRO,), expected, strategy="no_shard") is None


def test_the_first_operation_is_told_whichever_rank_it_is_on():
    program = (MICRO, MICRO)
    late, early = (passing(0), passing(1, held=("a",))), (passing(0, held=("b",)), passing(1))
    found = first_overrun(case(*program), [late, early], BUDGET)
    assert found is not None
    assert (found.operation, "rank 1" in found.sentence) == (0, True)


def test_where_nothing_is_cast_a_copy_without_shards_is_one_too_many():
    expected = account(0, backward=True, gathered=("a",))
    found = review((MICRO,), expected, strategy="no_shard", budget=CommunicationBudget(1, 200, 2, casts=False))
    assert found is not None
    assert "gathered 1 times on rank 1, 0 would be enough" in found.sentence


def test_a_check_may_ask_for_some_of_the_rules():
    expected = passing(0, units=("a",) * 3, reductions=(90,) * 3)
    assert first_overrun(case(MICRO), [(expected,)], BUDGET, (Measure.REDUCTIONS,)).measure is Measure.REDUCTIONS
    assert first_overrun(case(MICRO), [(expected,)], BUDGET, (Measure.KEPT_PARAMETERS,)) is None
