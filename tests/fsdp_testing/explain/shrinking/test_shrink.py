"""Reductions are legal and simpler; shrinking keeps the signature and ends with what a failure needs."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from fuzz_cases import case, micro

from fsdp_testing.cases.drawing import CaseDrawer, Scope, SeededChoices, legal_case
from fsdp_testing.cases.records import Case, Clip, Forward, ModelSpec, Step
from fsdp_testing.explain.shrinking import reductions
from fsdp_testing.explain.shrinking import shrink as shrink_module
from fsdp_testing.explain.shrinking.ddmin import Kind, joined
from fsdp_testing.explain.shrinking.shrink import KINDS, Shrunk, shrink
from fsdp_testing.judging.batch import Watch
from fsdp_testing.judging.case_runner import CaseRunner
from fsdp_testing.judging.signature import Signature
from fsdp_testing.judging.tags import tags, tokens
from fsdp_testing.ranks.pool import default_pool
from fsdp_testing.search.investigation import attempts_on

FAILS = Signature("diverged", "value", "step")
OTHER = Signature("diverged", "gradient", "clip")


class Pretended(CaseRunner):
    """A runner that runs nothing: a case fails if `needed` of its tokens and tags are all there."""

    def __init__(self, *needed: str, fails: Signature = FAILS) -> None:
        super().__init__(default_pool())
        self.needed = frozenset(needed)
        self.fails = fails
        self.ran = self.batches = self.failed = 0
        self.deadlines: set[float | None] = set()

    def impatient(self, timeout: float | None = None) -> Pretended:
        self.deadlines.add(timeout)
        return self

    def judge_batch(  # type: ignore[override]  # a judged case, as far as it is looked at
        self, name: str, cases: Sequence[Case], watch: Watch = Watch(), *, until: Signature | None = None
    ) -> list[SimpleNamespace]:
        self.batches += 1
        results: list[SimpleNamespace] = []
        for one in cases:
            if until is not None and results and results[-1].signature == until:
                break
            self.ran += 1
            held = {*tokens(one), *tags(one)}
            # A case that has lost only the step fails in another way, which must not be taken.
            signature = self.fails if self.needed <= held else OTHER if self.needed - {"step"} <= held else None
            self.failed += signature == self.fails
            results.append(SimpleNamespace(case=one, signature=signature))
        return results


@functools.cache  # drawing takes longer than what is asked of the cases
def drawn(count: int, scope: Scope = Scope()) -> list[Case]:
    drawer = CaseDrawer(scope)
    return [drawer.draw(SeededChoices(seed)) for seed in range(count)]


def test_every_reduction_of_every_part_is_legal():
    tried = 0
    for one in [*drawn(40), *drawn(20, Scope(world_sizes=(4,), tensor_parallel=2))]:
        smaller = [step.case for kind in KINDS for step in kind(one)]
        smaller += [*reductions.on_small_models(one), *reductions.minimal_programs(one)]
        smaller += [*reductions.minimal_programs_of_beginnings(one, FAILS), reductions.simplest(one)]
        for candidate in smaller:
            legal = legal_case(candidate)
            assert legal_case(legal) == legal
            tried += 1
    assert tried > 1000


@pytest.mark.parametrize("kind", KINDS)
def test_steps_have_keys_of_their_own_that_can_be_joined(kind: Kind):
    for one in drawn(40):
        steps = list(kind(one))
        assert len({step.key for step in steps}) == len(steps)
        assert joined(kind, one, []) == one
        for step in steps:
            assert joined(kind, one, [step.key]) == step.case


def test_operations_left_out_together_are_those_that_were_left_out_one_by_one():
    one = next(one for one in drawn(40) if len(one.program) > 5)
    left = joined(reductions.deletions, one, [(0,), (3,), (4,)])
    assert left.program == (one.program[1], one.program[2], *one.program[5:])


def test_parts_of_a_tree_left_out_together_are_those_that_were_left_out_one_by_one():
    nodes = [{"kind": "linear", "name": name} for name in "abc"] + [
        {"kind": "group", "name": "d", "nodes": [{"kind": "norm", "name": "a"}, {"kind": "norm", "name": "b"}]}
    ]
    start = replace(case(micro(1)), model=ModelSpec("tree", tree={"width": 4, "nodes": nodes}))
    left = joined(reductions.cuts, start, [(0,), (1,), (3, 0)])
    assert left.model.tree == {
        "width": 4,
        "nodes": [nodes[2], {"kind": "group", "name": "d", "nodes": [{"kind": "norm", "name": "b"}]}],
    }


@pytest.mark.parametrize("needed", [("step", "clip"), ("step", "strategy:shard_grad_op"), ("step", "node:embed")])
def test_what_is_left_is_what_the_failure_needs(needed: tuple[str, ...]):
    found = 0
    for one in drawn(600):
        if found < 6 and set(needed) <= {*tokens(one), *tags(one)}:
            lane = Pretended(*needed)
            shrunk = shrink(one, FAILS, attempts_on(lane, "single-process"), legal_case, lambda _: True, seconds=60)
            assert shrunk.complete
            assert set(needed) <= {*tokens(shrunk.case), *tags(shrunk.case)}
            assert len(shrunk.case.program) == sum(1 for name in needed if ":" not in name)
            assert lane.ran < 300
            assert lane.batches < 60
            found += 1
    assert found == 6


@pytest.mark.parametrize(
    ("needed", "layouts", "ranks"),
    [
        (("step", "layout:rowwise"), {"rowwise"}, 4),
        (("step", "layout:colwise_cut"), {"colwise_cut", "rowwise_cut"}, 4),
        (("step", "tensor_parallel:2"), set(), 4),
        (("step", "node:embed"), set(), 2),
    ],
)
def test_layouts_that_a_failure_does_not_need_are_left_out(needed: tuple[str, ...], layouts: set[str], ranks: int):
    found = 0
    for one in drawn(400, Scope(world_sizes=(4,), tensor_parallel=2)):
        if found < 2 and set(needed) <= {*tokens(one), *tags(one)}:
            shrunk = shrink(
                one, FAILS, attempts_on(Pretended(*needed), "single-process"), legal_case, lambda _: True, seconds=60
            )
            assert shrunk.complete
            left = [layout for _, layout in shrunk.case.wrapping.layouts]
            assert (set(left), len(left)) == (layouts, len(layouts))
            assert shrunk.case.world.size == ranks
            assert len(shrunk.case.model.tree["nodes"]) <= max(1, len(layouts))
            found += 1
    assert found == 2


@pytest.mark.parametrize("kind", ["died", "hung"])
def test_a_failure_that_costs_the_ranks_is_met_rarely(kind: str):
    """Deleting one part at a time would meet it once for each of them."""
    signature = Signature(kind, "", "step")
    met = parts = found = 0
    for one in drawn(2500):
        if (
            found < 6
            and {"step", "clip", "node:embed"} <= {*tokens(one), *tags(one)}
            and len(str(one.model.tree)) > 600
        ):
            lane = Pretended("step", "clip", "node:embed", fails=signature)
            shrunk = shrink(one, signature, attempts_on(lane, "single-process"), legal_case, lambda _: True, seconds=60)
            assert sorted(tokens(shrunk.case)) == ["clip", "step"]
            met += lane.failed
            parts += len(one.program) + len(list(reductions.cuts(one))) + len(one.wrapping.units)
            assert (5.0 in lane.deadlines) is (kind == "hung")
            found += 1
    assert found == 6
    assert met < 0.4 * parts  # one part at a time: nearly half


def test_what_a_failure_needs_three_times_is_left_three_times():
    """No core of two operations has it: it is left by what may go and what may not, one by one, then at once."""

    class Thrice(Pretended):
        def judge_batch(self, name: str, cases: Sequence[Case], *_: Any, **__: Any) -> list[SimpleNamespace]:
            self.batches += 1
            kept = [sum(isinstance(o, Step) for o in one.program) >= 3 for one in cases]
            return [
                SimpleNamespace(case=one, signature=FAILS if bad else None)
                for one, bad in zip(cases, kept, strict=True)
            ]

    program = [
        micro(1),
        Step(),
        Clip(0.5),
        micro(2),
        Step(),
        Clip(1.0),
        micro(3),
        Step(),
        Clip(2.0),
        Forward(micro(4).batch),
    ]
    lane = Thrice()
    shrunk = shrink(case(*program), FAILS, attempts_on(lane, "single-process"), lambda one: one, lambda _: True)
    assert shrunk.case.program == (Step(), Step(), Step())
    assert lane.batches < 20


def test_a_failure_of_another_signature_is_not_taken():
    lane = Pretended("step", "clip")
    shrunk = shrink(
        case(micro(1), Step(), Clip(0.5)), FAILS, attempts_on(lane, "single-process"), legal_case, lambda _: True
    )
    assert "step" in tokens(shrunk.case)


def test_what_the_implementation_does_not_claim_is_not_tried():
    lane = Pretended("step")
    start = case(micro(1), Step(), Forward(micro(2).batch))
    shrunk = shrink(
        start, FAILS, attempts_on(lane, "single-process"), legal_case, lambda one: "forward[train]" in tokens(one)
    )
    assert set(tokens(shrunk.case)) == {"step", "forward[train]"}


def test_a_busy_machine_finds_the_same_case_later(monkeypatch: pytest.MonkeyPatch):
    """A rule knows a failure by what is left of its case: of more than that it would say that it is new."""
    idle = _shrunk_while_each_look_at_the_clock_takes(0.0, monkeypatch)
    busy = _shrunk_while_each_look_at_the_clock_takes(5.0, monkeypatch)
    assert busy.complete
    assert busy.seconds > shrink_module.SECONDS > idle.seconds
    assert tokens(busy.case) == ("step",)
    assert (busy.case, busy.attempts) == (idle.case, idle.attempts)


def test_a_machine_that_is_far_too_busy_ends_it(monkeypatch: pytest.MonkeyPatch):
    """A campaign of a minute may not run for hours."""
    stuck = _shrunk_while_each_look_at_the_clock_takes(100.0, monkeypatch)
    assert not stuck.complete
    assert stuck.seconds < 20 * shrink_module.SECONDS


def _shrunk_while_each_look_at_the_clock_takes(seconds: float, monkeypatch: pytest.MonkeyPatch) -> Shrunk:
    clock = itertools.count(step=seconds)
    monkeypatch.setattr(shrink_module, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    start = next(one for one in drawn(50) if "step" in tokens(one) and len(one.program) > 3)
    return shrink(start, FAILS, attempts_on(Pretended("step"), "single-process"), legal_case, lambda _: True)


@pytest.mark.parametrize(("kind", "allowed"), [("hung", 4), ("died", 37), ("diverged", 400)])
def test_candidates_that_cost_the_ranks_in_another_way_use_up_its_budget(kind: str, allowed: int):
    """A budget of 400 runs is so many of them; up to 12 are run at once."""
    tried: list[Case] = []

    def attempt(cases: Sequence[Case], _: Signature) -> list[tuple[Case, Signature | None]]:
        tried.extend(cases)
        return [(one, Signature(kind, "", "clip")) for one in cases]

    start = max(drawn(50), key=lambda one: len(one.to_json()))
    shrunk = shrink(start, FAILS, attempt, legal_case, lambda _: True, seconds=20.0)
    assert shrunk.attempts == len(tried) < allowed + 12
    assert shrunk.complete is (kind == "diverged")


def test_its_budget_ends_it():
    lane = Pretended("step")
    start = next(one for one in drawn(50) if "step" in tokens(one))
    shrunk = shrink(start, FAILS, attempts_on(lane, "single-process"), legal_case, lambda _: True, seconds=0.0)
    assert not shrunk.complete
    assert shrunk.case == start
