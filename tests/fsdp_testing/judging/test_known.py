"""Known failures are recognised by what they look like in cases that have their features, and are kept as data."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from fuzz_cases import LINEAR, case, micro

from fsdp_testing.cases.operations.full_parameters import AssignData
from fsdp_testing.cases.operations.micro_batches import LocalMicroBatches
from fsdp_testing.cases.operations.optimizing import BuildOptimizer, EditGradients
from fsdp_testing.cases.operations.unusual_backwards import UnusualBackward
from fsdp_testing.cases.records import (
    Batch,
    FailureKind,
    Finding,
    Forward,
    ForwardBackward,
    Operation,
    Reload,
    Step,
    WrappingPlan,
    ZeroGrad,
)
from fsdp_testing.errors import InvalidRecord
from fsdp_testing.judging.known import CaseFeatures, KnownFailures, Rule, joined, read_known
from fsdp_testing.judging.signature import Signature, signature_of
from fsdp_testing.judging.tags import tokens

OFF = Signature(FailureKind.DIVERGED, "output", "forward")
STALE = Rule("stale", "why", "page", (tuple(OFF),), ("forward[*", "step"), ("forward_backward*",), without="forward[*")
WRONG_NUMBERS = {FailureKind.DIVERGED, FailureKind.DISAGREED, FailureKind.MISSING}
EVAL = Forward(Batch(1), "eval")
LOCAL = ForwardBackward(Batch(1), no_sync=True)
LOCALS = LocalMicroBatches((Batch(1), Batch(2)))
TWICE = UnusualBackward(Batch(1), "twice")
EDIT = AssignData(("*",), 0.5, Batch(1), in_place=True)
SKIPS = ForwardBackward(Batch(1, usage=((True, False, True),)), no_sync=True)


def known(rule: Rule, *program: Operation, signature: Signature = OFF) -> bool:
    return KnownFailures((rule,)).recognize(signature, case(*program)) is rule


def without(rule: Rule, *program: Operation) -> tuple[str, ...] | None:
    variant = rule.variant(case(*program))
    return None if variant is None else tokens(variant)


def test_operations_count_in_their_order_and_without_what_mends_it():
    assert known(STALE, micro(1), EVAL, Step())
    assert not known(STALE, EVAL, micro(1), Step())
    assert not known(STALE, micro(1), Step(), EVAL)


def test_begin_stands_before_the_first_operation():
    rule = Rule("first", "why", "", (("diverged",),), ("begin", "forward[eval]"), ("forward_backward*",))
    new = replace(rule, operations=("@new_model", "forward[eval]"))
    assert known(rule, EVAL, micro(1)) and known(new, EVAL, micro(1))
    assert not known(rule, micro(1), EVAL) and not known(new, micro(1), EVAL)
    assert known(new, micro(1), Reload(), EVAL) and not known(rule, micro(1), Reload(), EVAL)


@pytest.mark.parametrize(
    ("word", "met_by"),
    [
        ("@backward", (micro(1), LOCAL, LOCALS, TWICE, SKIPS)),
        ("@forward", (EVAL, EDIT)),
        ("@local", (LOCAL, LOCALS, SKIPS)),
        ("@reduced", (micro(1), TWICE)),
        ("@new_model", (Reload(), Reload(optimizer=False, form="sharded"))),
        ("@optimizer_saved", (Reload(),)),
        ("@skips", (SKIPS,)),
    ],
)
def test_operations_that_do_the_same_are_named_by_it(word: str, met_by: tuple[Operation, ...]):
    rule = Rule("same", "why", "", (("diverged",),), ("step", word), without=word)
    reloads = Reload(), Reload(optimizer=False, form="sharded")
    for operation in (micro(1), LOCAL, LOCALS, TWICE, SKIPS, *reloads, EVAL, EDIT, Step()):
        assert known(rule, Step(), operation) is (operation in met_by), operation
    assert without(rule, Step(), LOCAL, met_by[0]) is not None


def test_only_a_step_on_gradients_trains_an_optimizer():
    rule = Rule("new", "why", "", (("diverged",),), ("@new_optimizer", "@optimizer_saved"), ("@trained",))
    assert known(rule, Step(), micro(1), Reload())
    assert known(rule, micro(1), ZeroGrad(), Step(), Reload())
    assert known(rule, micro(1), Step(), Reload(optimizer=False), Step(), Reload())
    assert known(rule, micro(1), Step(), BuildOptimizer(), Reload())
    assert known(rule, micro(1), EditGradients(("*",), "none"), Step(), Reload())
    assert not known(rule, micro(1), Step(), Reload())
    assert not known(rule, micro(1), EditGradients(("*.bias",), "none"), Step(), Reload())
    assert not known(rule, micro(1), ZeroGrad(set_to_none=False), Step(), Reload())


@pytest.mark.parametrize(
    ("signatures", "met"),
    [
        ((("diverged",),), True),
        ((("diverged", "out"),), False),
        ((("diverged", "output", "forward"),), True),
        ((("diverged", "", "forward"),), True),
        ((("diverged", "output", "step"),), False),
        ((("diverged", "value"),), False),
        ((("raised",),), False),
        ((("raised",), ("diverged", "output")), True),
    ],
)
def test_a_failure_is_recognised_by_kind_quantity_and_operation(signatures: tuple[tuple[str, ...], ...], met: bool):
    assert known(Rule("any", "why", signatures=signatures), micro(1)) is met


def test_of_a_message_the_beginning_is_enough():
    rule = Rule("raises", "why", signatures=(("raised", "ValueError: expected"),))
    assert known(
        rule, micro(1), signature=Signature(FailureKind.RAISED, "ValueError: expected to be in states _", "step")
    )
    assert not known(rule, micro(1), signature=Signature(FailureKind.RAISED, "ValueError: no", "step"))


def test_what_comes_after_a_failure_did_not_bring_it_about():
    rule = KnownFailures((STALE,))
    met = case(micro(1), EVAL, Step(), EVAL)
    assert rule.recognize(OFF, CaseFeatures(met, 3)) is STALE
    assert rule.recognize(OFF, CaseFeatures(met, 1)) is None, "the step is still to come"
    assert rule.recognize(OFF, met) is STALE, "where it failed is not known"


def test_a_failure_is_known_by_its_cause_where_the_rule_names_one():
    looks = ("diverged", "output", "forward")
    caused = Rule("caused", "why", signatures=((*looks, "the weights from before operation *, step"),))
    rules, met = KnownFailures((caused,)), case(micro(1), EVAL)
    assert caused.asks_cause(OFF)
    assert rules.recognize(OFF, met) is caused, "as far as its looks say"
    assert (
        rules.recognize(OFF, met, cause="the weights from before operation 2, step, are still in use; `a` is wrong")
        is caused
    )
    assert rules.recognize(OFF, met, cause="the wrong values are half of the right values") is None
    assert rules.recognize(OFF, met, cause="") is None
    plain = Rule("plain", "why", signatures=(looks,))
    assert not plain.asks_cause(OFF)
    assert KnownFailures((caused, plain)).recognizing(OFF, met, cause="half") == [plain]
    assert read_known(rules.to_json(), "here") == rules


def test_a_rule_of_some_units_knows_what_fails_in_them_alone():
    rule = Rule("one", "why", signatures=(("diverged", "gradient"),), units="one_element")
    wrong = Signature(FailureKind.DIVERGED, "gradient", "forward_backward")
    single = {"kind": "scale", "shape": "one", "name": "s"}
    met = case(micro(1), nodes=(LINEAR, single), wrapping=WrappingPlan(units=("s",)))
    rules = KnownFailures((rule,))
    assert rules.recognize(wrong, CaseFeatures(met, units=("s",))) is rule
    assert rules.recognize(wrong, CaseFeatures(met, units=("",))) is None
    assert rules.recognize(wrong, CaseFeatures(met, units=("s", ""))) is None
    assert rules.recognize(wrong, met) is rule, "where it failed is not known"
    assert read_known(rules.to_json(), "here") == rules
    with pytest.raises(InvalidRecord, match="expected one of optional, frozen, one_element, got 'any'"):
        read_known(rules.to_json().replace('"one_element"', '"any"'), "here")


@pytest.mark.parametrize(
    ("link", "page", "issue"),
    [("https://x.org/a/issues/3", "", "https://x.org/a/issues/3"), ("docs/findings/a.md", "docs/findings/a.md", "")],
)
def test_a_link_of_an_earlier_version_is_a_page_or_an_issue(link: str, page: str, issue: str):
    text = KnownFailures((STALE,)).to_json().replace('"page": "page"', f'"link": "{link}"')
    (rule,) = read_known(text, "here").rules
    assert (rule.page, rule.issue, rule.link, rule.places) == (page, issue, "", link)


def test_an_operation_may_be_either_of_two_and_is_left_out_as_either():
    rule = Rule(
        "either", "why", "", (("diverged",),), ("forward[t*|forward[e*", "step"), without="forward[t*|forward[e*"
    )
    train = Forward(Batch(1), "train")
    assert known(rule, EVAL, Step()) and known(rule, train, Step())
    assert not known(rule, Forward(Batch(1), "no_grad"), Step())
    assert without(rule, EVAL, train, Step()) == ("step",)


def test_a_rule_of_a_parameter_knows_what_fails_in_it_alone():
    rule = Rule("named", "why", signatures=(("diverged", "gradient"),), parameter="a.*")
    wrong = Signature(FailureKind.DIVERGED, "gradient", "forward_backward")
    rules, met = KnownFailures((rule,)), case(micro(1))
    assert rules.recognize(wrong, CaseFeatures(met, parameter="a.weight")) is rule
    assert rules.recognize(wrong, CaseFeatures(met, parameter="b.weight")) is None
    assert rules.recognize(wrong, met) is None, "which it is is not known"


def test_a_rule_says_of_each_implementation_what_that_one_shows():
    ways = (
        ("diverged", "value"),
        ("raised", "KeyError", "", "", "torch-*"),
        ("raised", "ValueError", "step", "why", "ours"),
    )
    rule = Rule("several", "why", signatures=ways, on=("torch-ddp", "ours"))
    assert rule.of("torch-ddp") == Rule(
        "several", "why", signatures=(("diverged", "value"), ("raised", "KeyError", "", ""))
    )
    assert rule.of("ours").signatures == (("diverged", "value"), ("raised", "ValueError", "step", "why"))


@pytest.mark.parametrize("place", ["fsdp_testing.programs.ways.", "fsdp_testing.oracle.ways.", ""])
def test_a_rule_that_names_a_module_of_ours_knows_the_class_wherever_it_is(place: str):
    """Files of users say where a class was; it has moved since."""
    rule = Rule("moved", "why", signatures=(("raised", f"{place}DirectoryRefused: rank #"),))
    wrong = Finding(FailureKind.RAISED, "x", 0, "step", (0,), "it raised", case(micro(1)), message="rank 1: no")
    met = signature_of(replace(wrong, sort="fsdp_testing.somewhere.else_.DirectoryRefused"))
    assert met.quantity == "DirectoryRefused: rank #: no"
    assert known(rule, micro(1), signature=met)
    assert not known(rule, micro(1), signature=signature_of(replace(wrong, sort="other.DirectoryRefused")))


def test_features_alone_know_nothing():
    """A case that has all of a rule and fails in another way is a new failure."""
    assert not known(STALE, EVAL, Step(), signature=Signature(FailureKind.DIVERGED, "optimizer exp_avg", "step"))


def test_tags_narrow_a_rule():
    rule = Rule("tagged", "why", signatures=(("diverged",),), tags=("strategy:full*",))
    assert not known(rule, micro(1))
    assert KnownFailures((rule,)).recognize(OFF, case(micro(1), strategy="full_shard")) is rule


def test_the_variant_leaves_out_what_brings_it_about():
    assert without(STALE, micro(1), EVAL, Step()) == ("forward_backward", "step")
    assert without(STALE, EVAL, EVAL, Step()) == ("step",)
    assert without(Rule("plain", "why", signatures=(("diverged",),)), micro(1)) is None
    whole = Rule("whole", "why", signatures=(("diverged",),), operations=("forward[*",), without="forward[*")
    assert without(whole, EVAL) is None


def test_the_variant_keeps_what_the_failure_shows_in():
    """An edit is followed by a forward alone: it brings about what a later edit meets, and meets what an earlier one did."""
    rule = Rule("lost", "why", signatures=(("diverged",),), operations=("@forward", "assign_data*"), without="@forward")
    assert without(rule, micro(1), EVAL, EDIT) == ("forward_backward", "assign_data[in_place]")
    assert without(rule, micro(1), EDIT, EDIT, Step()) == ("forward_backward", "assign_data[in_place]", "step")
    ended = replace(rule, unless=("@backward",))
    assert without(ended, EDIT, micro(1), EVAL, EDIT) == tokens(case(EDIT, micro(1), EDIT)), "the first did no harm"


def test_a_rule_may_name_the_operation_in_which_a_failure_shows():
    """An earlier operation that leaves a branch out does not explain what is wrong in one that leaves none out."""
    stays = Signature(FailureKind.KEPT, "full parameters", "forward_backward")
    rule = Rule("ahead", "why", signatures=(tuple(stays),), operations=("@skips",), during="@skips")
    rules, met = KnownFailures((rule,)), case(SKIPS, LOCAL)
    assert rules.recognize(stays, CaseFeatures(met, 0)) is rule
    assert rules.recognize(stays, CaseFeatures(met, 1)) is None
    assert rules.recognize(stays, CaseFeatures(met, -1)) is None
    assert rules.recognize(stays, met) is rule, "where it failed is not known"
    assert read_known(rules.to_json(), "here") == rules


def test_the_variant_changes_what_is_named_where_no_operation_brings_it_about():
    rule = Rule(
        "sharded", "why", signatures=(("diverged",),), instead={"strategy": "no_shard", "world": {"mesh": [2, 1]}}
    )
    asked = case(micro(1), Step())
    mesh = replace(asked.world, mesh=(2, 1))
    assert rule.variant(asked) == replace(asked, strategy="no_shard", world=mesh)
    assert rule.variant(replace(asked, strategy="no_shard", world=mesh)) is None
    lower = replace(rule, instead={"mixed_precision": {"reduce_dtype": "float32"}})
    changed = lower.variant(asked)
    assert changed is not None and changed.mixed_precision is not None
    assert changed.mixed_precision.reduce_dtype == "float32"
    both = replace(STALE, instead={"strategy": "no_shard"}, tags=("strategy:no_shard",))
    assert without(both, EVAL, Step()) == ("step",)


def test_only_what_costs_the_ranks_is_asked_before_a_case_runs():
    dies = Rule("dies", "why", signatures=(("raised",), ("died",)), operations=("step",))
    rules = KnownFailures((STALE, dies))
    assert rules.may_end_ranks(case(EVAL, Step())) is dies
    assert rules.may_end_ranks(case(EVAL)) is None


def test_rules_survive_their_document_and_join_by_name():
    rules = KnownFailures((STALE, Rule("leak", "why", signatures=(("leaked",),))))
    assert read_known(rules.to_json(), "here") == rules
    assert joined([rules, rules]) == rules
    assert rules.with_rule(STALE).without_rules(["leak"]).rules == (STALE,)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"version": 99}, "written by a newer"),
        ({"version": 1}, "took operations out of cases"),
        ({"format": "else"}, "expected format"),
        ({"rules": [{"name": "a"}]}, "missing \\['reason'\\]"),
        ({"rules": [{"name": "a", "reason": "b", "drops": "c"}]}, "unknown \\['drops'\\]"),
        ({"rules": [{"name": "a", "reason": "b"}, {"name": "a", "reason": "c"}]}, "rules with unique names"),
        ({"rules": [{"name": "a", "reason": "b"}]}, "expected rules with `signatures`"),
        (
            {"rules": [{"name": "a", "reason": "b", "signatures": [["diverged"]], "instead": {"mesh": [1, 2]}}]},
            "a.instead: .*unknown \\['mesh'\\]",
        ),
    ],
)
def test_a_bad_file_is_refused(change: dict[str, object], said: str):
    document = json.dumps({**json.loads(KnownFailures((STALE,)).to_json()), **change})
    with pytest.raises(InvalidRecord, match=said):
        read_known(document, "here")
