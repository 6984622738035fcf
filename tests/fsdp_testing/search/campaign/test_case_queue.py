"""Every drawn case runs once; the time is looked at before each; what may cost the ranks is rare, and never left out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from fuzz_cases import case, micro

from fsdp_testing.adapters import registry
from fsdp_testing.cases.drawing import Scope
from fsdp_testing.cases.records import Batch, Case, Clip, Forward, Step, WorldSpec
from fsdp_testing.judging.known import KnownFailures, Rule
from fsdp_testing.search.campaign.campaign import Campaign, Plan
from fsdp_testing.search.campaign.case_queue import BATCH, COSTLY_ONE_IN, CaseQueue

DIES = KnownFailures((Rule("dies", "why", signatures=(("died",),), operations=("clip",)),))
NOTHING = KnownFailures()


def numbered(number: int, costly: bool = False) -> Case:
    return case(micro(number), *((Clip(0.5),) if costly else (Step(),)))


def queue(
    draw: Any = numbered, limit: int | None = None, unfinished: tuple[int, ...] = (), over: Any = None
) -> CaseQueue:
    return CaseQueue(draw, 0, limit, unfinished, over or (lambda: False))


def run_all(one: CaseQueue, known: KnownFailures = NOTHING) -> list[list[int]]:
    """The numbers of all batches until there is none left."""
    batches = []
    while batch := one.next_batch(known):
        batches.append([asked.number for asked in batch if asked.number is not None])
        for asked in batch:
            one.finish(asked)
    return batches


def test_every_case_that_is_drawn_runs_once_and_the_last_batch_is_as_long_as_it_is():
    one = queue(limit=50)
    batches = run_all(one)
    assert [len(batch) for batch in batches] == [BATCH, BATCH, 50 - 2 * BATCH]
    assert sorted(number for batch in batches for number in batch) == list(range(50))
    assert one.unfinished == ()


def test_a_batch_has_one_size_of_world():
    one = queue(lambda number: case(micro(number), world=WorldSpec(2 + number % 2)), limit=60)
    while batch := one.next_batch(NOTHING):
        assert len({asked.case.world.size for asked in batch}) == 1


def test_what_costs_the_ranks_is_rare_while_there_is_other_work_and_comes_last_in_its_batch():
    one = queue(lambda number: numbered(number, number % 2 == 0), limit=200)
    first = one.next_batch(DIES)
    costly = [asked.number % 2 == 0 for asked in first if asked.number is not None]
    assert costly == sorted(costly)
    assert 1 <= sum(costly) <= 2
    assert len(costly) >= COSTLY_ONE_IN
    for asked in first:
        one.finish(asked)
    assert sorted([n for batch in run_all(one, DIES) for n in batch] + [a.number for a in first]) == list(range(200))
    assert one.postponed["dies"] == 100


def test_where_every_case_may_cost_the_ranks_some_run_all_the_same():
    one = queue(lambda number: numbered(number, True))
    assert one.next_batch(DIES)


def test_what_did_not_run_comes_first_next_time():
    one = queue(limit=30)
    batch = one.next_batch(NOTHING)
    assert one.unfinished == tuple(range(BATCH))
    one.finish(batch[3])
    later = CaseQueue(numbered, 30, 1, one.unfinished, lambda: False)
    assert run_all(later) == [[*(n for n in range(BATCH) if n != 3), 30]]


def test_time_is_looked_at_before_each_case():
    drawn: list[int] = []

    def draw(number: int) -> Case:
        drawn.append(number)
        return numbered(number)

    one = queue(draw, over=lambda: len(drawn) >= 7)
    assert one.next_batch(NOTHING) == []
    assert drawn == list(range(7))
    assert one.unfinished == tuple(range(7))


def test_a_variant_runs_besides_and_no_deeper_than_twice():
    rule = Rule("eval", "why", signatures=(("diverged",),), operations=("forward[eval]",), without="forward[eval]")
    one = queue(limit=1)
    (asked,) = one.next_batch(NOTHING)
    met = asked._replace(case=case(micro(1), Forward(Batch(1), "eval")))
    assert one.add_variant(met, rule, lambda c: c, lambda _: True)
    (variant,) = one.next_batch(NOTHING)
    assert (variant.depth, variant.number, variant.case.program) == (1, None, (micro(1),))
    assert not one.add_variant(met._replace(depth=2), rule, lambda c: c, lambda _: True)
    assert not one.add_variant(met, rule, lambda c: c, lambda _: False)


class NoPool:
    """Whoever asks for a world has drawn a whole batch."""

    def lend(self, *_: object, **__: object) -> Any:
        raise AssertionError("no batch was to be run")

    def expect(self, *_: str) -> None:
        """Nothing is started."""


@pytest.mark.parametrize("seconds", [5.0, 15.0])
def test_a_campaign_ends_in_time_although_a_batch_takes_longer_to_draw(tmp_path: Path, seconds: float):
    ticks = iter(range(1000))
    plan = Plan(registry.load("toy:UNBROKEN"), Scope(frozenset({"full_shard"})), tmp_path, seconds=seconds)
    run = Campaign(plan, NoPool(), lambda _: None, lambda *_: None, clock=lambda: float(next(ticks)))  # type: ignore[arg-type]  # nothing runs
    tally = run.run()
    assert tally.run == tally.discarded == 0
    assert 0 < tally.left == tally.drawn < BATCH
