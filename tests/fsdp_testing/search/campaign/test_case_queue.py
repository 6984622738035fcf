"""Every drawn case runs once; the time is looked at before each; what may cost the ranks is rare, and never left out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from fuzz_cases import case, micro

from fsdp_testing.adapters import registry
from fsdp_testing.cases.drawing import Scope
from fsdp_testing.cases.records import Batch, Case, Clip, Forward, Step, Verdict, WorldSpec
from fsdp_testing.judging.known import KnownFailures, Rule
from fsdp_testing.search.campaign.campaign import Campaign, Plan
from fsdp_testing.search.campaign.case_queue import BATCH, COSTLY_ONE_IN, CaseQueue, QueuedCase
from fsdp_testing.search.loop import Budget
from fsdp_testing.search.state import Verdicts

DIES = KnownFailures((Rule("dies", "why", signatures=(("died",),), operations=("clip",)),))
NOTHING = KnownFailures()


def numbered(number: int, costly: bool = False) -> Case:
    return case(micro(number), *((Clip(0.5),) if costly else (Step(),)))


class Record(Verdicts):
    """Verdicts, with the queue that works on them."""

    def __init__(self, draw: Any = numbered, limit: int | None = None, letters: str = "", seconds: Any = None) -> None:
        super().__init__(letters)
        clock = seconds or (lambda: 0.0)
        self.queue = CaseQueue(draw, self, Budget(5.5 if seconds else None, limit, clock))

    def next_batch(self, known: KnownFailures = NOTHING) -> list[QueuedCase]:
        return self.queue.next_batch(known)

    def finish(self, batch: list[QueuedCase]) -> None:
        for queued in batch:
            if queued.number is not None:
                self.take(queued.number, Verdict.PASS)

    def run_all(self, known: KnownFailures = NOTHING) -> list[list[int]]:
        """The numbers of all batches until there is none left."""
        batches = []
        while batch := self.next_batch(known):
            batches.append([queued.number for queued in batch if queued.number is not None])
            self.finish(batch)
        return batches


def test_every_case_that_is_drawn_runs_once_and_the_last_batch_is_as_long_as_it_is():
    record = Record(limit=50)
    batches = record.run_all()
    assert [len(batch) for batch in batches] == [BATCH, BATCH, 50 - 2 * BATCH]
    assert sorted(number for batch in batches for number in batch) == list(range(50))
    assert record.letters == "p" * 50


def test_a_batch_has_one_size_of_world():
    record = Record(lambda number: case(micro(number), world=WorldSpec(2 + number % 2)), limit=60)
    while batch := record.next_batch():
        assert len({queued.case.world.size for queued in batch}) == 1


def test_what_costs_the_ranks_is_rare_while_there_is_other_work_and_comes_last_in_its_batch():
    record = Record(lambda number: numbered(number, number % 2 == 0), limit=200)
    first = record.next_batch(DIES)
    costly = [queued.number % 2 == 0 for queued in first if queued.number is not None]
    assert costly == sorted(costly)
    assert 1 <= sum(costly) <= 2
    assert len(costly) >= COSTLY_ONE_IN
    record.finish(first)
    record.run_all(DIES)
    assert record.letters == "p" * 200
    assert record.queue.postponed["dies"] == 100


def test_where_every_case_may_cost_the_ranks_some_run_all_the_same():
    assert Record(lambda number: numbered(number, True)).next_batch(DIES)


def test_what_did_not_run_comes_first_next_time():
    record = Record(limit=30)
    batch = record.next_batch()
    assert record.numbers(None) == list(range(BATCH))
    record.finish(batch[3:4])
    assert Record(limit=1, letters=record.letters).run_all() == [[*(n for n in range(BATCH) if n != 3), BATCH]]


def test_time_is_looked_at_before_each_case():
    drawn: list[int] = []

    def draw(number: int) -> Case:
        drawn.append(number)
        return numbered(number)

    record = Record(draw, seconds=lambda: float(len(drawn)))
    assert record.next_batch() == []
    assert drawn == record.numbers(None) == list(range(6))


def test_a_variant_runs_besides_and_no_deeper_than_twice():
    rule = Rule("eval", "why", signatures=(("diverged",),), operations=("forward[eval]",), without="forward[eval]")
    record = Record(limit=1)
    queue = record.queue
    (queued,) = record.next_batch()
    met = queued._replace(case=case(micro(1), Forward(Batch(1), "eval")))
    assert queue.add_variant(met, rule, lambda c: c, lambda _: True)
    (variant,) = record.next_batch()
    assert (variant.depth, variant.number, variant.case.program) == (1, None, (micro(1),))
    assert not queue.add_variant(met._replace(depth=2), rule, lambda c: c, lambda _: True)
    assert not queue.add_variant(met, rule, lambda c: c, lambda _: False)


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
