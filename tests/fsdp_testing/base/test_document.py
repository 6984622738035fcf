"""Every record survives a round trip, and every damage is named with its path."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path

import pytest

import fsdp_testing
from fsdp_testing.cases.records import (
    AssignData,
    Batch,
    BuildOptimizer,
    Case,
    CaseOutcome,
    CheckResult,
    Clip,
    EditFullParameters,
    Finding,
    Forward,
    ForwardBackward,
    Freeze,
    Interrupt,
    MixedPrecisionSpec,
    ModelSpec,
    Move,
    Observe,
    OptimizerSpec,
    PolicySpec,
    Reload,
    ReplaceParameters,
    RunReport,
    SetLr,
    SeveralForwards,
    Step,
    Thaw,
    UnshardFirst,
    Verdict,
    WorldSpec,
    WrappingPlan,
    ZeroGrad,
)
from fsdp_testing.errors import InvalidRecord

EVERYTHING = (
    ForwardBackward(Batch(1, (4, 0), ((True, False), (True, True)), 0.5), no_sync=True),
    Forward(Batch(2), "inference"),
    ZeroGrad(set_to_none=False),
    Step(),
    BuildOptimizer(),
    SetLr(0.25),
    Freeze(("a.*",)),
    Thaw(("*",)),
    Clip(1.0, math.inf),
    EditFullParameters(("*",), 0.5, writeback=False),
    Observe("here"),
    SeveralForwards((Batch(1), Batch(2, (1, 0))), reverse=True),
    Reload("full", optimizer=False, units=("a", "b")),
    Interrupt(Batch(3), 2, backward=True),
    UnshardFirst(Batch(4), ("", "a"), reshard=True),
    AssignData(("a.*",), 0.5, Batch(5)),
    ReplaceParameters(("a.*",), 0.5),
    Move(),
)


def full_case() -> Case:
    return Case(
        model=ModelSpec("mlp", {"depth": 3, "shape": (1, 2), "flag": True, "nothing": None}, "float32", None, ("a.*",)),
        world=WorldSpec(4, "gloo", (2, 2)),
        program=EVERYTHING,
        seed=7,
        wrapping=WrappingPlan(("layers.0",), PolicySpec("size", (), 100), ("layers.1",)),
        strategy="hybrid_shard",
        mixed_precision=MixedPrecisionSpec("bfloat16", None, "float16"),
        cpu_offload=True,
        optimizer=OptimizerSpec("adamw", {"lr": 0.1, "betas": (0.9, 0.99)}),
    )


def test_a_case_survives_the_round_trip():
    case = full_case()
    text = case.to_json()
    assert Case.from_json(text) == case
    assert Case.from_json(text).to_json() == text
    assert Case.from_json(text).identity == case.identity
    assert "Infinity" not in text


def test_a_case_without_a_second_axis_reads_as_before_there_was_one():
    case = replace(full_case(), world=WorldSpec(4))
    assert not {"tensor_parallel", "layouts"} & set(re.findall(r"\w+", case.to_json()))
    wrapping = replace(case.wrapping, layouts=(("up", "colwise"), ("norm", "sequence")))
    other = replace(case, world=WorldSpec(4, tensor_parallel=2), wrapping=wrapping)
    assert Case.from_json(other.to_json()) == other
    assert other.identity != case.identity
    assert (case.world.replicas, other.world.replicas) == (4, 2)
    assert other.required() == case.required() | {"tensor_parallel"}


def test_a_different_case_has_a_different_identity():
    case = full_case()
    assert case.without_operation(0).identity != case.identity
    assert replace(case).identity == case.identity


def test_a_report_survives_the_round_trip():
    finding = Finding(
        "diverged", "gradient of w", 3, "step()", (0, 1), "off", full_case(), math.inf, 1e-12, "16 roundings", "text"
    )
    result = CheckResult(
        "torch-ddp",
        "training.sgd",
        "meaning",
        ("no_shard",),
        Verdict.FAIL,
        "off",
        (finding,),
        (CaseOutcome("abc", Verdict.FAIL, 2, "no_shard", 0.1, 0.5, 12, ""),),
        "",
        1.5,
    )
    report = RunReport((result,), ("torch-ddp",), {"torch": "2.13"}, (2, 3), "gloo", 9.0)
    assert RunReport.from_json(report.to_json(indent=1)) == report


def change(**changes: object) -> str:
    data = json.loads(full_case().to_json())
    for path, value in changes.items():
        target = data
        *parents, last = path.split("__")
        for part in parents:
            target = target[int(part)] if isinstance(target, list) else target[part]
        if value is KeyError:
            del target[last]
        else:
            target[last] = value
    return json.dumps(data)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", r"^case: expected a JSON document"),
        ("[]", r"^case: expected a JSON object, got \[\]"),
        (change(version=2), r"^case\.version: expected at most 1, got 2\. It was written by a newer"),
        (change(version=0), r"^case\.version: expected a positive integer"),
        (change(version=True), r"^case\.version: expected a positive integer"),
        (change(format="other"), r"^case: expected format 'fsdp_testing/case', got 'other'"),
        (change(model__dtype=3), r"^case\.model\.dtype: expected str, got 3"),
        (change(model__dtype="int8"), r"model\.dtype: expected one of float64, .*, got 'int8'"),
        (change(world__size="2"), r"^case\.world\.size: expected int, got '2'"),
        (change(world__size=True), r"^case\.world\.size: expected int, got True"),
        (change(world__size=3), r"world\.mesh: expected 3 ranks in all, got shape \(2, 2\)"),
        (change(world__tensor_parallel=3), r"world\.tensor_parallel: expected a divisor of 4 ranks, got 3"),
        (change(world__tensor_parallel=2), r"world\.mesh: expected 2 ranks in all, got shape \(2, 2\)"),
        (change(wrapping__layouts=[["up", "diagonal"]]), r"layouts of 'up': expected one of colwise, .*'diagonal'"),
        (change(world=KeyError), r"missing \['world'\]"),
        (change(extra=1), r"unknown \['extra'\]"),
        (change(program__1__kind="jump"), r"^case\.program\[1\]\.kind: expected a known kind of operation, got 'jump'"),
        (change(program__0__batch__rows=[]), r"expected one or more sizes >= 0"),
        (change(program__1__mode="sleep"), r"Forward\.mode: expected one of"),
        (change(program="x"), r"^case\.program: expected an array, got 'x'"),
        (change(program__5__lr="fast"), r"^case\.program\[5\]\.lr: expected a number, got 'fast'"),
        (change(strategy="shard"), r"strategy: expected one of full_shard"),
        (change(optimizer__name="lion"), r"optimizer\.name: expected one of sgd"),
        (change(mixed_precision__param_dtype="half"), r"mixed_precision\.param_dtype: expected one of"),
        (change(wrapping__policy__kind="depth"), r"wrapping\.policy\.kind: expected one of"),
    ],
)
def test_damage_is_named_with_its_path(text, message):
    with pytest.raises(InvalidRecord, match=message):
        Case.from_json(text)


def test_all_problems_of_a_case_are_listed():
    with pytest.raises(InvalidRecord, match=r"strategy: .*optimizer\.name: "):
        Case.from_json(change(strategy="shard", optimizer__name="lion"))


def test_live_objects_do_not_enter_documents():
    with pytest.raises(InvalidRecord, match=r"expected JSON data, got a object"):
        Case(ModelSpec("mlp", {"thing": object()}), WorldSpec(1), ()).to_json()


def test_documents_keep_their_names_wherever_their_code_stands():
    """Files of earlier versions are read, or refused by their version; never taken for something else."""
    sources = Path(fsdp_testing.__file__).parent.rglob("*.py")
    names = {name for path in sources for name in re.findall(r'Format\("([^"]+)"', path.read_text(encoding="utf-8"))}
    assert names == {
        "fsdp_testing/case",
        "fsdp_testing/certificate",
        "fsdp_testing/checkpoints",
        "fsdp_testing/diagnosis",
        "fsdp_testing/fuzz_finding",
        "fsdp_testing/known_defects",
        "fsdp_testing/known_failures",
        "fsdp_testing/pairs",
        "fsdp_testing/report",
        "fsdp_testing/script",
        "fsdp_testing/search_state",
    }
