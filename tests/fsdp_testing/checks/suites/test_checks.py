"""Every check is well made: named, sourced, legal wherever it runs, and asks for what its cases need."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest

from fsdp_testing.adapters.adapter import Adapter, TorchStyle
from fsdp_testing.cases.drawing import Scope
from fsdp_testing.cases.models import MODELS
from fsdp_testing.cases.records import (
    CAPABILITIES,
    STRATEGIES,
    Case,
    FailureKind,
    ForwardBackward,
    Judgement,
    Step,
    Verdict,
    ZeroGrad,
    check_case,
    plan,
)
from fsdp_testing.checks.suites import CHECKS
from fsdp_testing.checks.suites.check import FLAT, Check, Place, accumulated, adapt, cases, check, micro_batch, needs_of
from fsdp_testing.checks.suites.run import Where, judge_check
from fsdp_testing.checks.suites.watched import StreamObservation, limited
from fsdp_testing.cli.fuzz import not_drawn
from fsdp_testing.errors import HarnessError
from fsdp_testing.judging.batch_judge import ask_here
from fsdp_testing.judging.case_runner import CaseRunner, JudgedCase
from fsdp_testing.judging.checkers.explain import finding
from fsdp_testing.ranks.streams.history import History, Work
from fsdp_testing.ranks.streams.races import StreamAccount

EVERYTHING = frozenset(CAPABILITIES)


def claiming(capabilities: frozenset[str]) -> Adapter:
    return Adapter.of(TorchStyle(name="x", wrap=lambda module, setup: module, capabilities=capabilities))


def cases_of(check: Check) -> list[tuple[Place, Case]]:
    places = check.places(EVERYTHING, (2, 3, 4), "gloo")
    assert places, "a check that runs nowhere"
    return [(place, case) for place in places for case in check.build(place)]


@cache
def units_of(model: str) -> frozenset[str]:
    return frozenset(name for name, _ in MODELS[model].build(0).named_modules())


@pytest.mark.parametrize("check", CHECKS.values(), ids=lambda each: each.name)
def test_every_check_is_described_and_its_cases_are_legal_asked_for_and_where_they_belong(check):
    suite, _, name = check.name.partition(".")
    assert suite.isidentifier()
    assert name.isidentifier()
    assert check.meaning.endswith(".")
    assert check.source
    assert check.needs <= EVERYTHING
    assert check.profile in ("default", "extended")
    strategies = set(STRATEGIES.values())
    for place, case in cases_of(check):
        check_case(case)
        assert not any(planned.void for planned in plan(case)), case
        assert Case.from_json(case.to_json()) == case
        assert set(case.wrapping.units) <= units_of(case.model.name)
        missing = needs_of(case) - check.needs - strategies
        assert not missing, f"{case.model.name} needs {sorted(missing)}"
        assert case.world.size == place.world_size
        assert case.strategy == place.strategy
        assert case.world.backend == place.backend


def test_needs_are_those_of_the_cases_and_what_is_said_besides():
    made = check(
        "some.name", "Buffers are updated.", cases("buffers", *accumulated(0, 1)), needs={"comm_hook"}, source="x"
    )
    assert made.needs == {"buffers", "no_sync", "comm_hook"}


def test_names_are_unique_and_told_by_suite():
    names = list(CHECKS)
    assert len(names) >= 80
    suites = [name.partition(".")[0] for name in names]
    assert len(set(suites)) >= 15


def test_every_model_of_the_zoo_is_used():
    used = {case.model.name for check in CHECKS.values() for _, case in cases_of(check)}
    assert used == set(MODELS)


def test_data_differ_between_ranks_and_micro_batches():
    for each in CHECKS.values():
        if each.name == "training.same_batch_twice":
            continue
        for _, case in cases_of(each):
            seeds = [operation.batch.seed for operation in case.program if isinstance(operation, ForwardBackward)]
            assert len(set(seeds)) == len(seeds), f"{each.name} trains twice on one batch"


def test_a_place_for_each_claimed_strategy_only():
    check = next(iter(CHECKS.values()))
    assert check.strategies == FLAT
    assert [p.strategy for p in check.places(frozenset({"no_shard"}), (2, 3), "gloo")] == ["no_shard", "no_shard"]
    assert check.places(frozenset(), (2,), "gloo") == []


def test_an_implementation_without_units_is_given_none():
    (case,) = cases("mlp")
    assert adapt(case, claiming(EVERYTHING)) == case
    assert adapt(case, claiming(frozenset())).wrapping.units == ()


def test_an_engine_that_owns_its_step_is_asked_in_its_own_words():
    """Gradients are cleared after each step, for the oracle too, and nothing is asked in a dtype it does not train in."""
    (asked,) = cases("mlp", micro_batch(0), Step(), micro_batch(1), Step())
    engine = replace(claiming(EVERYTHING), step_clears_gradients=True, widest_dtype="float32")
    got = adapt(asked, engine)
    assert got.program == (micro_batch(0), Step(), ZeroGrad(), micro_batch(1), Step(), ZeroGrad())
    assert got.model.dtype == "float32"
    assert adapt(got, engine) == got
    (low,) = cases("mlp", micro_batch(0), dtype="bfloat16")
    assert adapt(low, engine).model.dtype == "bfloat16"


def test_patterns_name_checks_and_suites():
    check = CHECKS["training.sgd_momentum"]
    assert check.matches(("training",))
    assert check.matches(("*.sgd*",))
    assert check.matches(("nothing", "training.sgd_momentum"))
    assert not check.matches(("train", "sgd_momentum"))


def test_a_case_that_crashes_its_check_takes_no_finding_of_an_earlier_one_back():
    first, second = cases_of(CHECKS["training.sgd_momentum"])[0][1], cases_of(CHECKS["training.sgd_momentum"])[1][1]
    wrong = finding(first, FailureKind.DIVERGED, "value", 0, "is off", ranks=(0,))

    def judge(_runner: Any, _adapter: Any, case: Case, _comparison: Any) -> JudgedCase:
        if case == second:
            raise KeyError("planted")
        return JudgedCase(case, Judgement(Verdict.FAIL, finding=wrong))

    check = replace(CHECKS["training.sgd_momentum"], cases=(first, second), strategies=("full_shard",), judge=judge)
    with patch.object(Place, "put", lambda _place, case: case):
        result = judge_check(CaseRunner(), claiming(EVERYTHING), check, Where())
    assert result.verdict is Verdict.FAIL
    assert result.findings == (wrong,)


def test_mixed_precision_is_not_judged_without_the_gradients_that_it_is_judged_by():
    blind = replace(claiming(frozenset({"mixed_precision", "full_shard"})), observes_gradients=False)
    assert blind.drawable() == {"full_shard"}
    case = next(case for _, case in cases_of(CHECKS["mixed_precision.param_bfloat16"]))
    with pytest.raises(HarnessError, match="judged step by step"):
        ask_here(blind, case, (), observe_all=False)


def test_a_limit_of_gathers_is_not_judged_where_no_gather_was_seen():
    case = cases_of(CHECKS["streams.limited_gathers"])[0][1]
    history = History([Work(0, "all_to_all", (), ())])
    ranks = [StreamObservation(rank, account=StreamAccount.of(history)) for rank in range(case.world.size)]
    with pytest.raises(HarnessError, match="nothing was counted"):
        limited(case, ranks, None)


def test_what_is_claimed_and_not_drawn_is_named_with_the_reason():
    adapter = claiming(frozenset({"mixed_precision", "full_shard"}))
    plans = [
        SimpleNamespace(implementation=each, scope=Scope(each.drawable()))
        for each in (adapter, replace(adapter, observes_gradients=False))
    ]
    told = [[line for line in not_drawn(plan) if "does claim" in line] for plan in plans]
    assert told[0] == []
    assert "x does claim some of these (mixed_precision): they are judged by gradients" in told[1][0]


@pytest.mark.parametrize("claims", [set(), {"unused_gradient_is_none"}])
@pytest.mark.parametrize("name", ["accumulation.cleared_then_unused", "training.sgd_momentum"])
def test_zeros_stand_for_none_where_a_part_is_unused_and_nothing_else_is_promised(name: str, claims: set[str]) -> None:
    heard: list[Any] = []
    runner: Any = SimpleNamespace(judge=lambda adapter, case, comparison, mode: heard.append(comparison))
    CHECKS[name].judged(runner, claiming(frozenset(claims)), CHECKS[name].cases[0])
    assert heard[0].none_is_zero == (not claims and name.startswith("accumulation"))


def test_an_engine_that_chooses_the_parameters_is_not_asked_for_groups_by_name() -> None:
    engine = Adapter.of(
        TorchStyle(
            name="x",
            wrap=lambda module, setup: module,
            capabilities=EVERYTHING,
            build_optimizer=lambda model, make: make([]),
        )
    )
    runner: Any = None
    result = judge_check(runner, engine, CHECKS["optim_state.groups"], Where())
    assert (result.verdict, "build_optimizer" in result.explanation) == (Verdict.NOT_CLAIMED, True)
