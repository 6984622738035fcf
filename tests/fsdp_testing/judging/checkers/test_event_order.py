"""Order comparison on written histories: what is equal, what differs, and where."""

from __future__ import annotations

from typing import Any

from fsdp_testing.cases.records.event import CollectiveEvent, Event, History, UnitEvent
from fsdp_testing.judging.checkers.event_order import (
    collective_steps,
    compare_steps,
    ranks_agree,
    transition_steps,
)


def collective(name: str, number: int, *, group: tuple[int, ...] = (0, 1), **more: Any) -> Event:
    fields: dict[str, Any] = {"dtype": "float64", "numel": 8} | more
    return CollectiveEvent(number, float(number), 0, name=name, group=group, **fields)


def unit(name: str, transition: str, number: int, operation: int = 0) -> Event:
    return UnitEvent(number, float(number), operation, unit=name, transition=transition)


def test_equal_sequences_have_only_equal_rows() -> None:
    found = compare_steps("memory", 0, ["a", "b"], ["a", "b"])
    assert found.equal
    assert [(row.left, row.right) for row in found.rows] == [("a", "a"), ("b", "b")]


def test_an_extra_step_is_shown_where_it_stands() -> None:
    found = compare_steps("memory", 0, ["a", "c"], ["a", "b", "c"])
    assert not found.equal
    assert (found.rows[1].left, found.rows[1].right) == ("", "b")
    assert found.rows[2].same


def test_swapped_steps_differ() -> None:
    assert not compare_steps("units", 0, ["a", "b"], ["b", "a"]).equal


def test_transitions_are_told_by_kind_and_operation() -> None:
    history = History(((unit("x", "gather", 0), unit("x", "reshard", 1), unit("", "gather", 2, operation=1)),))
    assert transition_steps(history, 0, frozenset({"gather"})) == (
        "— operation 0",
        "gather x",
        "— operation 1",
        "gather (root)",
    )


def test_ways_of_one_kind_of_collective_are_one_step() -> None:
    history = History(((collective("all_gather", 0), collective("all_gather_single", 1)),))
    first, second = collective_steps(history, 0)
    assert first == second == "all_gather float64[8] on 2 ranks"


def test_ranks_that_issue_the_same_agree_whatever_their_sizes() -> None:
    # Uneven splits are legal: sizes are each rank's own.
    history = History(((collective("all_to_all", 0, numel=8),), (collective("all_to_all", 0, numel=4),)))
    assert ranks_agree(history) == ""


def test_groups_of_other_ranks_do_not_count() -> None:
    alone = collective("all_reduce", 0, group=(0,))
    assert ranks_agree(History(((alone, collective("barrier", 1)), (collective("barrier", 0),)))) == ""


def test_a_skipped_collective_is_told() -> None:
    history = History(((collective("barrier", 0), collective("all_gather", 1)), (collective("barrier", 0),)))
    assert ranks_agree(history) == "rank 1 never issues all_gather (number 2)"


def test_another_reduce_op_is_told() -> None:
    left = collective("all_reduce", 0, reduce_op="sum")
    right = collective("all_reduce", 0, reduce_op="max")
    assert "number 1" in ranks_agree(History(((left,), (right,))))
