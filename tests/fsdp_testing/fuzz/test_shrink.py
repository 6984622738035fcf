"""Reductions are legal and simpler; shrinking keeps the signature and ends with what a failure needs."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from fuzz_cases import case, micro

from fsdp_testing.fuzz import reductions
from fsdp_testing.fuzz.batch import Watch
from fsdp_testing.fuzz.judge import CaseNote
from fsdp_testing.fuzz.lane import CaseResult, Lane
from fsdp_testing.fuzz.shrink import Shrinker
from fsdp_testing.fuzz.signature import Signature
from fsdp_testing.fuzz.tags import tags, tokens
from fsdp_testing.pool import default_pool
from fsdp_testing.records import Case, Clip, Forward, Step
from fsdp_testing.strategies import CaseDrawer, Scope, SeededChoices, legal_case

FAILS = Signature("diverged", "value", "step")
OTHER = Signature("diverged", "gradient", "clip")


class Pretended(Lane):
    """A lane that runs nothing: a case fails if `needed` of its tokens and tags are all there."""

    def __init__(self, *needed: str) -> None:
        super().__init__(default_pool(), "nobody")
        self.needed = frozenset(needed)
        self.ran = 0

    def run(self, cases: Sequence[Case], watch: Watch = Watch()) -> list[CaseResult]:
        self.ran += len(cases)
        results = []
        for one in cases:
            held = {*tokens(one), *tags(one)}
            # A case that has lost only the step fails in another way, which must not be taken.
            signature = FAILS if self.needed <= held else OTHER if self.needed - {"step"} <= held else None
            status = "passed" if signature is None else "suspect"
            results.append(CaseResult(one, CaseNote(0, status, signature=signature)))
        return results


def drawn(count: int) -> list[Case]:
    drawer = CaseDrawer(Scope())
    return [drawer.draw(SeededChoices(seed)) for seed in range(count)]


def test_every_reduction_of_every_part_is_legal():
    tried = 0
    for one in drawn(40):
        for kind in (
            reductions.leaps,
            reductions.programs,
            reductions.settings,
            reductions.trees,
            reductions.operations,
        ):
            for smaller in kind(one):
                legal = legal_case(smaller)
                assert legal_case(legal) == legal
                tried += 1
    assert tried > 1000


@pytest.mark.parametrize("needed", [("step", "clip"), ("step", "strategy:shard_grad_op"), ("step", "node:embed")])
def test_what_is_left_is_what_the_failure_needs(needed: tuple[str, ...]):
    found = 0
    for one in drawn(600):
        if found < 6 and set(needed) <= {*tokens(one), *tags(one)}:
            lane = Pretended(*needed)
            shrunk = Shrinker(lane, legal_case, lambda _: True, seconds=60).shrink(one, FAILS)
            assert shrunk.complete
            assert set(needed) <= {*tokens(shrunk.case), *tags(shrunk.case)}
            assert len(shrunk.case.program) == sum(1 for name in needed if ":" not in name)
            assert lane.ran < 300
            found += 1
    assert found == 6


def test_a_failure_of_another_signature_is_not_taken():
    lane = Pretended("step", "clip")
    shrunk = Shrinker(lane, legal_case, lambda _: True).shrink(case(micro(1), Step(), Clip(0.5)), FAILS)
    assert "step" in tokens(shrunk.case)


def test_what_the_implementation_does_not_claim_is_not_tried():
    lane = Pretended("step")
    start = case(micro(1), Step(), Forward(micro(2).batch))
    shrunk = Shrinker(lane, legal_case, lambda one: "forward[train]" in tokens(one)).shrink(start, FAILS)
    assert set(tokens(shrunk.case)) == {"step", "forward[train]"}


def test_time_ends_it():
    lane = Pretended("step")
    start = next(one for one in drawn(50) if "step" in tokens(one))
    shrunk = Shrinker(lane, legal_case, lambda _: True, seconds=0.0).shrink(start, FAILS)
    assert not shrunk.complete
    assert shrunk.case == start
