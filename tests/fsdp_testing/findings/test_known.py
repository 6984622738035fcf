"""Known failures are edited around, recognized by their looks, and kept as data."""

from __future__ import annotations

import json

import pytest
from fuzz_cases import case, micro

from fsdp_testing.errors import InvalidRecord
from fsdp_testing.findings.known import SHIPPED, KnownFailures, Rule, joined, read_known, shipped_known
from fsdp_testing.findings.tags import tokens
from fsdp_testing.implementations import registry
from fsdp_testing.judging.signature import Signature
from fsdp_testing.records import Batch, Forward, Step
from fsdp_testing.strategies import legal_case, needs_of_case

STALE = Rule("stale", "why", "link", ("forward[*", "step"), ("forward_backward*",), (), "forward[*")
EVAL = Forward(Batch(1), "eval")


def edited(rule: Rule, *program: object) -> tuple[str, ...] | None:
    around, _ = KnownFailures((rule,)).around(case(*program))  # type: ignore[arg-type]  # operations of several kinds
    return None if around is None else tokens(around)


def test_the_operation_that_brings_it_about_is_left_out():
    assert edited(STALE, micro(1), EVAL, Step()) == ("forward_backward", "step")
    assert edited(STALE, EVAL, EVAL, Step()) == ("step",)


def test_an_operation_between_that_mends_it_keeps_the_case():
    assert edited(STALE, EVAL, micro(1), Step()) == ("forward[eval]", "forward_backward", "step")


def test_the_other_order_is_left_alone():
    assert edited(STALE, micro(1), Step(), EVAL) == ("forward_backward", "step", "forward[eval]")


def test_a_rule_without_an_operation_to_leave_out_discards_the_case():
    rule = Rule("pair", "why", "", ("step",), (), ("strategy:no_shard",), "")
    assert edited(rule, micro(1), Step()) is None
    assert edited(rule, micro(1)) == ("forward_backward",)


def test_begin_stands_before_the_first_operation():
    rule = Rule("first", "why", "", ("begin", "forward[eval]"), ("forward_backward*",), (), "forward[eval]")
    assert edited(rule, EVAL, micro(1)) == ("forward_backward",)
    assert edited(rule, micro(1), EVAL) == ("forward_backward", "forward[eval]")


def test_a_failure_is_recognized_by_its_looks():
    known = KnownFailures((Rule("leak", "why", signature=("leaked", "model")),))
    assert known.recognize(Signature("leaked", "model"), case(micro(1))) is not None
    assert known.recognize(Signature("diverged", "model"), case(micro(1))) is None
    assert known.around(case(micro(1)))[1] == ()


def test_looks_may_count_only_after_certain_operations():
    rule = Rule("in vain", "why", operations=("forward[*", "forward_backward"), signature=("excess", "gathers"))
    known, looks = KnownFailures((rule,)), Signature("excess", "gathers", "forward_backward")
    assert known.recognize(looks, case(EVAL, micro(1))) is rule
    assert known.recognize(looks, case(micro(1), EVAL)) is None
    assert known.around(case(EVAL, micro(1)))[1] == ()


def test_rules_survive_their_document_and_join_by_name():
    known = KnownFailures((STALE, Rule("leak", "why", signature=("leaked",))))
    assert read_known(known.to_json(), "here") == known
    assert joined([known, known]) == known


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"version": 99}, "written by a newer"),
        ({"format": "else"}, "expected format"),
        ({"rules": [{"name": "a"}]}, "missing \\['reason'\\]"),
        ({"rules": [{"name": "a", "reason": "b", "drops": "c"}]}, "unknown \\['drops'\\]"),
        ({"rules": [{"name": "a", "reason": "b"}, {"name": "a", "reason": "c"}]}, "names of their own"),
    ],
)
def test_a_bad_file_is_refused(change: dict[str, object], told: str):
    document = json.dumps({**json.loads(KnownFailures((STALE,)).to_json()), **change})
    with pytest.raises(InvalidRecord, match=told):
        read_known(document, "here")


@pytest.mark.parametrize(
    "name", [path.stem for path in sorted(SHIPPED.glob("*.json")) if path.stem != "single-process"]
)
def test_shipped_examples_are_legal_claimed_and_hit_by_their_rule(name: str):
    claimed = registry.load(name).capabilities
    examples = shipped_known(name).examples()
    assert examples
    for rule, example in examples:
        assert rule.reason
        assert rule.signature or rule.applies(example), rule.name
        assert legal_case(example) == example, rule.name
        assert needs_of_case(example) <= claimed, rule.name
    assert not shipped_known("nobody").rules
