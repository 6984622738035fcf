"""What a collate_fn makes of rows: a statistic or a state of its own leaves a script unknown; what is made row by row passes."""

from __future__ import annotations

import functools
import random
import re
from pathlib import Path

import numpy as np
import pytest
import torch

from fsdp_testing.cases.records import Verdict
from fsdp_testing.train.collators import draws, has_numbers, is_alike, with_numbers
from fsdp_testing.train.script import Launch, examine

SCRIPT = str(Path(__file__).parent / "with_collators.py")


def judge(*arguments):
    return examine(Launch(SCRIPT, ("--collate", *arguments), steps=2, isolation="warm"), (2,))


@pytest.mark.parametrize(
    "arguments",
    [
        ("statistic",),
        ("statistic", "--stream"),
        ("running",),
        ("running", "--accumulate"),
        ("running", "--workers", "1"),
    ],
)
def test_a_statistic_of_each_ranks_rows_is_unknown(arguments):
    report = judge(*arguments)
    assert report.verdict is Verdict.UNKNOWN, str(report)
    says = r"on the ranks' own batches. But from the rows .* collate_fn makes other rows.*differs: .* at step .*own statistic"
    assert re.search(says, str(report)), str(report)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("row by row",), "the items of its DataLoader"),
        (("warm-up",), "the items of its DataLoader"),
        (("sorted", "--workers", "1"), "the items of its DataLoader"),
        (("drawn", "--marked"), "the line marked with"),
        (("drawn", "--uncounted"), "not compared: what collate_fn makes .*: it draws random numbers"),
        (("statistic", "--marked"), "the line marked with"),
    ],
)
def test_what_is_made_row_by_row_drawn_or_marked_passes(arguments, says):
    report = judge(*arguments)
    assert report.verdict is Verdict.PASS, str(report)
    assert re.search(says, str(report)), str(report)


def test_a_count_that_a_collator_gives_is_that_of_all_rows_or_leaves_the_script_unknown():
    report = judge("drawn")
    assert report.verdict is Verdict.UNKNOWN, str(report)
    assert "numbers beside their rows, such as a count" in str(report), str(report)


@pytest.mark.parametrize("arguments", [("statistic", "--summed"), ("row by row", "--summed")])
def test_another_mistake_is_named_beside_a_statistic(arguments):
    report = judge(*arguments)
    assert report.verdict is Verdict.FAIL, str(report)
    assert "batches as they are" not in str(report), str(report)


class Holder:
    """Draws by what it holds."""

    def __init__(self, held):
        self.held = {"deep": [held]}

    def __call__(self, rows):
        held = self.held["deep"][0]
        return torch.rand(1, generator=held) if isinstance(held, torch.Generator) else held.random()


class Shaken:
    """Draws by a generator that a method of its own makes each time."""

    def __call__(self, rows):
        return self.noise(rows)

    def noise(self, rows):
        return random.Random(len(rows)).random()


NUMPY = np.random.default_rng(0)


@pytest.mark.parametrize(
    ("collate", "wanted"),
    [
        (Holder(torch.Generator()), True),
        (Holder(random.Random(0)), True),
        (functools.partial(Holder(np.random.default_rng(0))), True),
        (Holder(torch.Generator()).__call__, True),
        (lambda _: NUMPY.random(), True),
        (lambda _: random.random(), True),
        (lambda rows: np.random.default_rng(len(rows)).random(), True),
        (Shaken(), True),
        (lambda rows: rows, False),
        (Holder, False),
    ],
)
def test_a_collator_that_draws_is_known_by_the_generators_that_it_holds_or_makes(collate, wanted):
    assert draws(collate, []) is wanted


def test_what_a_function_sets_while_it_is_watched_stays_and_makers_are_themselves_again():
    def draws_and_counts(rows):
        global RECENT
        RECENT = random.Random(len(rows))
        assert isinstance(RECENT, random.Random)
        return RECENT.random()

    maker = random.Random
    assert draws(draws_and_counts, [1])
    assert random.Random is maker
    assert RECENT.random() != random.Random(1).random()


def test_items_are_alike_but_for_roundings_and_order():
    rows = torch.rand(4, 3)
    count = torch.tensor(4)
    assert is_alike([rows * (1 + 1e-7), count], (rows, count))
    assert is_alike([rows.flip(0), count], [rows, count])
    assert not is_alike([rows.flip(0), count], [rows, count + 1])
    assert not is_alike([rows, count], [rows[:3], count])
    assert not is_alike([rows + 1e-3, count], [rows, count])
    assert not is_alike([rows.long(), count], [rows, count])


def test_what_is_no_row_is_as_the_collator_made_it():
    rows = torch.zeros(2, 3)
    item = {"x": rows, "n": torch.tensor(1), "all": [rows, 1], "text": ["a"], "odd": rows}
    made = {"x": rows + 1, "n": torch.tensor(2), "all": [rows + 1, 2], "text": ["a", "b"], "odd": 5}
    merged = with_numbers(item, made)
    assert merged["x"] is rows and merged["all"][0] is rows and merged["odd"] is rows
    assert (merged["n"].item(), merged["all"][1], merged["text"]) == (2, 2, ["a", "b"])
    assert (
        has_numbers(item) and has_numbers([rows, [torch.tensor(1.0)]]) and not has_numbers({"x": [rows], "text": "a"})
    )
