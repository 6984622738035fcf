"""What campaigns on torch took for failures, and what was the fuzzer's own fault, stays mended."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from fuzz_cases import case, micro

from fsdp_testing.adapters.protocol import Division
from fsdp_testing.cases.drawing import legal_case
from fsdp_testing.cases.records import (
    AssignData,
    Batch,
    Case,
    Clip,
    EditFullParameters,
    FailureKind,
    Forward,
    ForwardBackward,
    Freeze,
    MixedPrecisionSpec,
    ModelSpec,
    OptimizerSpec,
    Reload,
    Step,
    Thaw,
    UnshardFirst,
    Verdict,
    WorldSpec,
    WrappingPlan,
)
from fsdp_testing.checks.findings.known import shipped_known
from fsdp_testing.judging.batch import Watch
from fsdp_testing.judging.case_runner import CaseRunner
from fsdp_testing.judging.signature import Signature
from fsdp_testing.oracle.oracle import expect_lockstep
from fsdp_testing.ranks.pool import default_pool

Node = dict[str, Any]


def group(name: str, *nodes: Node, **fields: Any) -> Node:
    return {"kind": "group", "name": name, "nodes": list(nodes), **fields}


LAYER: Node = {"kind": "linear", "name": "b", "out": 3}

# The output of the first layer is used three times: around both groups, and by the layer inside.
RESIDUALS = (LAYER, group("c", group("a", group("a", LAYER, residual=True)), residual=True))


def mixed(found: Case, *units: str, dtype: str | None = None) -> Case:
    precision = MixedPrecisionSpec(param_dtype=dtype)
    return replace(found, mixed_precision=precision, wrapping=WrappingPlan(units), strategy="full_shard")


ADDED_TWICE = mixed(case(micro(1), nodes=RESIDUALS, dtype="float32"), "c.a")
CALLED_THRICE = mixed(
    replace(
        case(ForwardBackward(Batch(1), no_sync=True), micro(1), nodes=(group("a", LAYER, calls=3),), dtype="float32"),
        seed=52694,
    ),
    "a",
    dtype="bfloat16",
)
# The gradients of both micro-batches nearly cancel; torch reduces each by itself.
CANCELS = Case(
    ModelSpec("called_twice", dtype="float32"),
    WorldSpec(2),
    (ForwardBackward(Batch(1, (4,)), no_sync=True), ForwardBackward(Batch(2, (3,)))),
    seed=51160,
    wrapping=WrappingPlan(("again",)),
    strategy="full_shard",
    mixed_precision=MixedPrecisionSpec(param_dtype="bfloat16"),
)
# What is left of the first gradient is so small that its cast to float16 rounds to the next of the smallest numbers.
UNDERFLOWS = Case(
    ModelSpec("moe", dtype="float32"),
    WorldSpec(2),
    (micro(1, rows=(2,)), Clip(0.01, 3.0), micro(5, rows=(0, 2), scale=8.0)),
    strategy="no_shard",
    mixed_precision=MixedPrecisionSpec(param_dtype="float16"),
)
# The third parameter begins four numbers after an aligned address; in FSDP1's flat parameter it does not.
UNALIGNED = mixed(
    case(
        micro(5, rows=(4, 1)),
        nodes=({"kind": "offset", "name": "a"}, {"kind": "embed", "name": "ax", "rows": 5}, {**LAYER, "out": 5}),
        width=5,
        dtype="float32",
    )
)


def _found(name: str) -> Case:
    return Case.from_json((Path(__file__).parent / "cases" / f"{name}.json").read_text(encoding="utf-8"))


# The weight of a module that is used four times: of the orders of three additions torch has one more.
USED_FOUR_TIMES = _found("used_four_times")
# One disturbed replay was by luck closer to the undisturbed one than DDP is.
CANCELS_IN_PENALTY = _found("gradients_that_cancel_in_penalty")
# A 16-bit element is stepped with other roundings at the end of a tensor than inside a flat parameter.
STEPPED = _found("stepped_in_a_flat_parameter")
# DDP puts a node of the graph behind the model: gradients of a penalty meet in another order there.
PENALTY_IN_BFLOAT16 = _found("penalty_in_low_precision")
# Without a backward after the last forward FSDP2 keeps the root gathered, whatever ran before in the same operation.
TRAINS_NOTHING_LAST = _found("last_micro_batch_trains_nothing")


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("torch-fsdp1-flat", UNALIGNED),
        ("torch-fsdp1-flat", USED_FOUR_TIMES),
        ("torch-fsdp2", ADDED_TWICE),
        ("torch-fsdp1", CALLED_THRICE),
        ("torch-fsdp2", CANCELS),
        ("torch-fsdp1", UNDERFLOWS),
        ("torch-fsdp1-flat", STEPPED),
        ("torch-ddp", PENALTY_IN_BFLOAT16),
    ],
    ids=[
        "a product whose operands are not aligned",
        "uses of one parameter",
        "gradients added up where a unit begins",
        "local additions of a part called several times",
        "gradients that cancel",
        "casts that underflow",
        "a step of a flat parameter on fewer ranks",
        "gradients of a penalty in low precision",
    ],
)
def test_another_order_of_additions_is_no_failure(name: str, found: Case):
    assert legal_case(found) == found
    (result,) = CaseRunner(default_pool()).judge_batch(name, [found], Watch(operations=True))
    assert result.verdict is Verdict.PASS, result.judgement.why
    assert result.judgement.tally.comparisons > 3


@pytest.mark.parametrize(("name", "found"), [("torch-ddp", CANCELS_IN_PENALTY), ("torch-fsdp2", TRAINS_NOTHING_LAST)])
def test_neither_luck_nor_a_loss_that_trains_nothing_is_a_failure(name: str, found: Case):
    assert legal_case(found) == found
    (result,) = CaseRunner(default_pool()).judge_batch(name, [found])
    assert result.verdict is Verdict.PASS, result.judgement.why


def bound_of(found: Case) -> float:
    """The largest bound of a gradient of the first layer when nothing of an implementation is adopted."""
    points = expect_lockstep(found, Division(before=1, after=2), {}).points
    bounds = [e.bound for p in points for q, e in p.quantities.items() if (q.kind, q.name) == ("gradient", "b.weight")]
    assert bounds
    return max(float(torch.as_tensor(bound).max()) for bound in bounds)


def test_only_where_a_unit_parts_three_uses_the_bits_may_differ():
    parted = bound_of(ADDED_TWICE)
    assert 0 < parted < 1e-4
    assert bound_of(replace(ADDED_TWICE, wrapping=WrappingPlan())) == 0.0


@pytest.mark.parametrize(
    ("program", "operation"),
    [
        ((Forward(Batch(1), "inference"), Thaw(("*",))), "thaw"),
        ((Forward(Batch(1), "train"), Freeze(("*",))), "freeze"),
    ],
)
def test_what_torch_says_of_the_parameters_that_it_shows_is_a_failure_and_not_unjudged(program: Any, operation: str):
    frozen = {"kind": "norm", "name": "a", "frozen": "weight"}
    found = replace(case(*program, nodes=(frozen,)), strategy="shard_grad_op")
    (result,) = CaseRunner(default_pool()).judge_batch("torch-fsdp1", [found], Watch(operations=True))
    assert result.verdict is Verdict.FAIL, result.judgement.why
    assert result.signature is not None
    assert (result.signature.kind, result.signature.operation) == ("raised", operation)


@pytest.mark.parametrize("name", ["torch-fsdp1", "torch-fsdp1-flat", "torch-fsdp2"])
def test_a_directory_that_does_not_load_is_a_failure_and_not_unjudged(name: str):
    """What torch.distributed.checkpoint refuses is no Exception, and what reports it instead is raised by this harness."""
    rules = {rule.name: example for rule, example in shipped_known(name).examples()}
    example = rules["directory-saved-before-the-first-step"]
    (result,) = CaseRunner(default_pool()).judge_batch(name, [example], Watch(operations=True))
    assert result.signature is not None, result.judgement.why
    assert shipped_known(name).recognize(result.signature, example) is not None, result.judgement.why


def test_ranks_that_would_wait_for_ever_are_a_failure_and_not_unjudged():
    found = _found("ranks_that_wait_for_ever")
    (result,) = CaseRunner(default_pool()).judge_batch("torch-ddp", [found], Watch(operations=True))
    assert result.signature == Signature(FailureKind.UNCOORDINATED, "collectives", "end"), result.judgement.why
    assert "waits in all_reduce" in result.judgement.why
    rule = shipped_known("torch-ddp").recognize(result.signature, found)
    assert rule is not None
    assert rule.name == "forward-then-unreduced-backward"


def test_units_gathered_by_hand_are_those_of_the_plan_in_force():
    nodes = (group("a", LAYER), group("c", LAYER))
    by_hand = UnshardFirst(Batch(1), ("", "a", "c"), False)
    found = replace(
        case(by_hand, Reload("full", False, ("c",)), by_hand, nodes=nodes),
        wrapping=WrappingPlan(("a",)),
        strategy="full_shard",
    )
    first, _, last = legal_case(found).program
    assert isinstance(first, UnshardFirst) and first.units == ("", "a")
    assert isinstance(last, UnshardFirst) and last.units == ("", "c")
    # Also while gradients await reduction.
    waiting = replace(found, program=(ForwardBackward(Batch(1), no_sync=True), *found.program[1:]))
    last = legal_case(waiting).program[-1]
    assert isinstance(last, UnshardFirst) and last.units == ("", "c")


def test_a_reload_that_names_no_plan_keeps_the_one_in_force():
    nodes = (group("a", LAYER), group("c", LAYER))
    program = (Reload("full", False, ("c",)), Reload("full", False), UnshardFirst(Batch(1), ("", "c"), False))
    found = replace(case(*program, nodes=nodes), wrapping=WrappingPlan(("a",)), strategy="full_shard")
    assert legal_case(found) == found
    (result,) = CaseRunner(default_pool()).judge_batch("torch-fsdp2", [found], Watch(operations=True))
    assert result.verdict is Verdict.PASS, result.judgement.why


def test_what_ranks_counted_for_themselves_passes_through_no_single_process():
    program = (micro(1), Reload("full", False, through=Batch(2)), micro(3))
    counter = {"kind": "buffer", "name": "n", "style": "counter"}
    assert legal_case(case(*program, nodes=(LAYER,))).program == program
    reload = legal_case(case(*program, nodes=(LAYER, counter))).program[1]
    assert isinstance(reload, Reload)
    assert reload.through is None


def test_what_is_thawed_or_edited_for_a_while_is_not_ignored():
    frozen = {"kind": "scale", "name": "s", "frozen": "all"}
    found = replace(case(Thaw(("s.*",)), micro(1), Clip(0.5, 2.0), nodes=(frozen, LAYER)), strategy="full_shard")
    found = replace(found, wrapping=WrappingPlan((), None, ("s",)))
    assert legal_case(found).wrapping.ignored == ()
    assert legal_case(replace(found, program=(micro(1), Thaw(("b.*",))))).wrapping.ignored == ("s",)
    edits = {flag: replace(found, program=(EditFullParameters(("*",), 0.5, flag), micro(1))) for flag in (True, False)}
    assert legal_case(edits[False]).wrapping.ignored == ()
    assert legal_case(edits[True]).wrapping.ignored == ("s",)


def test_a_part_that_the_loss_goes_past_meets_plain_sgd_where_none_is_zero():
    model = ModelSpec("cached_intermediate", arguments={"bypass": True})
    decaying = OptimizerSpec("sgd", {"lr": 0.1, "weight_decay": 0.1})
    found = Case(model, WorldSpec(2), (micro(1), Step()), optimizer=decaying)
    assert legal_case(found, frozenset()).optimizer.arguments == {"lr": 0.1}
    assert legal_case(found).optimizer == decaying


def test_storage_is_not_assigned_from_parameters_that_may_be_shown_rounded():
    """Gathered in low precision: what `p.data * factor` reads there is not what is stored."""
    program = (micro(1), AssignData(("*",), 0.5, Batch(2)), micro(3))
    low = case(*program, strategy="shard_grad_op", dtype="float32", mixed_precision=MixedPrecisionSpec("float16"))
    assert [type(o) for o in legal_case(low).program] == [ForwardBackward, ForwardBackward]
    assert legal_case(replace(low, mixed_precision=None)).program == program
