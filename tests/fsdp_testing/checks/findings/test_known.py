"""The one list of known failures: its rules have examples, pages and causes, and each reader takes its part of it."""

from __future__ import annotations

import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
from fuzz_cases import LINEAR, case, micro

from fsdp_testing.adapters import registry
from fsdp_testing.cases.drawing import legal_case, needs_of_case
from fsdp_testing.cases.records import (
    Batch,
    Case,
    FailureKind,
    Forward,
    ForwardBackward,
    Measure,
    Overrun,
    ZeroGrad,
)
from fsdp_testing.checks.findings.known import shipped, shipped_known
from fsdp_testing.judging.batch import Watch
from fsdp_testing.judging.case_runner import CaseRunner, JudgedCase
from fsdp_testing.judging.known import CaseFeatures, KnownFailures, Rule
from fsdp_testing.judging.signature import Signature
from fsdp_testing.search.certificate.axes import Cell
from fsdp_testing.search.certificate.cases import case_of

NEAREST = tomllib.loads((Path(__file__).parent / "nearest_cases.toml").read_text(encoding="utf-8"))
NAMES = sorted({name for defect in shipped() for rule in defect.rules for name in rule.on})
WRONG_NUMBERS = {FailureKind.DIVERGED, FailureKind.DISAGREED, FailureKind.MISSING}
EVAL = Forward(Batch(1), "eval")
LOCAL = ForwardBackward(Batch(1), no_sync=True)


def test_gathers_in_excess_are_known_by_how_many():
    """A rule for one needless gather knows nothing of two."""
    shipped = shipped_known("torch-fsdp2")
    excess = Signature(FailureKind.EXCESS, "gathers", "forward_backward")
    met = case(EVAL, micro(1))

    def known_by(times: int) -> Rule | None:
        overrun = Overrun(Measure.UNIT_GATHERS, 1, 0, 2 + times, 2, (("a", 0),))
        return shipped.recognize(excess, CaseFeatures(met, 1), overrun.more)

    rule = known_by(1)
    assert rule is not None
    assert rule.name == "prefetch-after-lone-forward"
    variant = rule.variant(met)
    assert variant is not None and variant.program == (micro(1),), "what it may hide is looked at without it"
    assert known_by(2) is None


def test_full_parameters_that_stay_are_known_by_who_gathered_them():
    """A rule for what an earlier forward left gathered knows nothing of what the operation itself does not free."""
    shipped = shipped_known("torch-fsdp1")
    stays = Signature(FailureKind.KEPT, "full parameters", "forward_backward")
    unused = {"kind": "group", "dropped": True, "name": "g", "nodes": [{"kind": "linear", "name": "a"}]}
    met = case(EVAL, micro(1), nodes=(LINEAR, unused), strategy="full_shard")

    def known_by(*, before: bool) -> Rule | None:
        overrun = Overrun(Measure.KEPT_PARAMETERS, 1, 0, 96, 0, (("a", 96),), before)
        return shipped.recognize(stays, CaseFeatures(met, 1), overrun.more)

    assert known_by(before=False) is None
    assert getattr(known_by(before=True), "name", "") == "unused-unit-stays-gathered"


def test_full_parameters_that_stay_are_known_where_the_operation_itself_leaves_a_part_out():
    """What FSDP2 gathers ahead and then needs is freed: an earlier forward that needed less of it explains nothing."""
    rule = _shipped("torch-fsdp2", "prefetched-then-skipped-stays-gathered")
    stays = Signature(FailureKind.KEPT, "full parameters", "forward")
    example = Case.from_json(rule.example)
    met = replace(example, program=(*example.program, EVAL))
    assert rule.knows(stays, CaseFeatures(met, 0))
    assert not rule.knows(stays, CaseFeatures(met, 1))


@pytest.mark.parametrize(
    ("name", "rule"),
    [
        ("torch-fsdp1", "stale-weights-after-local-micro-batch-then-edit"),
        ("torch-fsdp2", "edit-of-kept-weights"),
        ("torch-fsdp2", "freeze-of-kept-parameters"),
    ],
)
def test_weights_that_no_sync_kept_explain_nothing_after_a_reduced_backward(name: str, rule: str):
    known = _shipped(name, rule)
    *before, last = Case.from_json(known.example).program
    freed = replace(Case.from_json(known.example), program=(*before, micro(2), last))
    assert legal_case(freed) == freed
    assert not known.fits(CaseFeatures(freed))
    assert known.fits(CaseFeatures(replace(freed, program=(*before, micro(2), *before, last))))


def test_a_micro_batch_that_trains_anything_explains_no_lost_edit():
    """Its backward frees what was gathered: an edit that is lost after it is another failure."""
    known = _shipped("torch-fsdp1", "frozen-micro-batch-stays-gathered-then-edit")
    example = Case.from_json(known.example)
    assert known.fits(CaseFeatures(example))
    frozen, *rest = example.program
    assert not known.fits(CaseFeatures(replace(example, program=(replace(frozen, patterns=("*bias",)), *rest))))


def _shipped(name: str, rule: str) -> Rule:
    return next(known for known in shipped_known(name).rules if known.name == rule)


@pytest.mark.parametrize("name", NAMES)
def test_pages_of_shipped_rules_are_there(name: str):
    pages = [rule.page for rule in shipped_known(name).rules if rule.page.startswith("docs/")]
    assert [page for page in pages if not (Path(__file__).parents[4] / page).is_file()] == []


@pytest.mark.parametrize("name", NAMES)
def test_shipped_examples_are_legal_claimed_and_have_the_features_of_their_rule(name: str):
    claimed = registry.load(name).capabilities
    rules = shipped_known(name)
    assert rules.rules
    assert len(rules.examples()) == len(rules.rules)
    for rule, example in rules.examples():
        assert rule.reason
        assert _recognised(rules, rule, example), rule.name
        assert legal_case(example) == example, rule.name
        assert needs_of_case(example) <= claimed, rule.name
    assert not shipped_known("nobody").rules


@pytest.mark.parametrize("name", NAMES)
def test_shipped_rules_that_ask_for_features_do_not_fit_the_nearest_case_that_passes(name: str):
    claimed = registry.load(name).capabilities
    rules = shipped_known(name)
    counter_examples = [
        (rule, passes) for rule, example in rules.examples() if (passes := _nearest(name, rule, example))
    ]
    asking = {rule.name for rule in rules.rules if rule.operations or rule.tags}
    assert {rule.name for rule, _ in counter_examples} == asking
    for rule, passes in counter_examples:
        assert legal_case(passes) == passes, rule.name
        assert needs_of_case(passes) <= claimed, rule.name
        assert not rule.fits(CaseFeatures(passes)), rule.name


@pytest.mark.parametrize("name", NAMES)
def test_a_shipped_rule_that_knows_wrong_numbers_says_how_to_see_what_they_hide(name: str):
    """What is judged before numbers, or only where all of them are right, hides none."""
    rules = shipped_known(name)
    for rule, example in rules.examples():
        if any(FailureKind(signature[0]) in WRONG_NUMBERS for signature in rule.signatures):
            assert rule.without or rule.instead, rule.name
        if rule.instead:
            variant = rule.variant(example)
            assert variant is not None and legal_case(variant).program == example.program, rule.name
            assert needs_of_case(legal_case(variant)) <= registry.load(name).capabilities, rule.name


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_each_example_fails_as_its_rule_says_and_the_nearest_case_does_not(name: str):
    """A defect that no case meets any more is either mended or no longer asked: nobody else would notice the second."""
    runner, problems = CaseRunner(), []
    for rule, example in shipped_known(name).examples():
        (judged,) = runner.judge_batch(name, [example], Watch(models=True))
        # Some say in which operation numbers first differ, which takes a second look.
        if not _known(rule, judged) and not _known(rule, runner.judge(name, example, closely=True)):
            problems.append((rule.name, "its example", judged.signature))
        if passes := _nearest(name, rule, example):
            (judged,) = runner.judge_batch(name, [passes], Watch(models=True))
            problems += [(rule.name, "the nearest case", judged.signature)] if _known(rule, judged) else []
    assert problems == []


def _nearest(name: str, rule: Rule, example: Case) -> Case | None:
    """Return the case that passes: the one that is given, else the example without the cause of its failure.

    A rule that asks for nothing of a case has none.
    """
    if not (rule.operations or rule.tags):
        return None
    given = NEAREST.get(name, {}).get(rule.name)
    variant = rule.variant(example) if given is None else Case.from_json(given)
    return None if variant is None else legal_case(variant)


def _known(rule: Rule, judged: JudgedCase) -> bool:
    return judged.signature is not None and rule.knows(judged.signature, judged.features)


def _recognised(rules: KnownFailures, rule: Rule, example: Case) -> bool:
    kind, quantity, operation = (*rule.signatures[0], "", "")[:3]
    return KnownFailures((rule,)).recognize(Signature(FailureKind(kind), quantity, operation), example) is rule


@pytest.mark.parametrize("name", ["torch-fsdp1", "torch-fsdp1-flat"])
def test_gradients_that_were_reduced_after_local_ones_are_not_what_zero_grad_left_behind(name: str):
    """The certificate gave one cause for another: S N S, a step, and the same again is wrong by what bfloat16 rounds."""
    wrong = Signature(FailureKind.DIVERGED, "gradient", "forward_backward")
    shipped = shipped_known(name)
    cell = Cell("full_shard", "2", "root", "plain", "SNS", "SNS", -1, "to none", "bfloat16, reduced in float32")
    sums = shipped.recognize(wrong, case_of(cell, registry.load(name).capabilities))
    assert sums is not None
    assert sums.name == "local-sums-in-low-precision"
    left = shipped.recognize(wrong, case(micro(1), LOCAL, ZeroGrad(), micro(2)))
    assert left is not None
    assert left.name == "zero-grad-keeps-reduced"
