"""A traced run as stretches, bytes and shards: of two ranks of torch's FSDP, and of a history made by hand."""

from __future__ import annotations

import pytest

from fsdp_testing.cases.records import (
    AutogradEvent,
    CollectiveEvent,
    History,
    OperationEvent,
    Portrait,
    RunReport,
    UnitEvent,
    WaitEvent,
)
from fsdp_testing.explain.trace.portrait import portrait_case, portrait_of, take
from fsdp_testing.explain.trace.run import Trace
from fsdp_testing.ranks.run import run_ranks


def by_hand(strategy: str = "full_shard") -> Portrait:
    events = (
        OperationEvent(0, 9.0, -1),
        OperationEvent(1, 10.0, 0),
        AutogradEvent(2, 10.0, 0, "", "pre_forward"),
        CollectiveEvent(3, 11.0, 0, "all_gather_single", (0, 1), "float64", 8),
        WaitEvent(4, 12.0, 0, 1.0),
        UnitEvent(5, 13.0, 0, "a", "gather"),
        AutogradEvent(6, 13.0, 0, "a", "pre_forward"),
        AutogradEvent(7, 15.0, 0, "a", "post_forward"),
        AutogradEvent(8, 16.0, 0, "", "post_forward"),
        AutogradEvent(9, 17.0, 0, "a", "pre_backward"),
        UnitEvent(10, 18.0, 0, "a", "free"),
        OperationEvent(11, 19.0, 1),
        OperationEvent(12, 20.0, 2),
    )
    units = ((("a", ("a.weight",)), ("", ("weight",))),)
    return portrait_of(Trace("hand", portrait_case(strategy, 2), History((events,)), units))


def test_stretches_of_a_history_made_by_hand() -> None:
    portrait = by_hand()
    assert portrait.seconds == 10.0
    found = {(s.lane, s.start, s.stop, s.what) for s in portrait.ranks[0].stretches}
    assert found == {
        ("operation", 0.0, 9.0, "forward-backward"),
        ("operation", 9.0, 10.0, "step"),
        ("operation", 10.0, 10.0, "zero_grad"),
        ("forward", 0.0, 3.0, ""),
        ("forward", 3.0, 5.0, "a"),
        ("forward", 5.0, 6.0, ""),
        ("backward", 7.0, 9.0, "a"),
        ("collective", 1.0, 3.0, "all_gather float64[8]"),
        ("wait", 2.0, 3.0, "for the other ranks"),
        ("gathered", 3.0, 8.0, "a"),
    }


@pytest.mark.parametrize("name", ["torch-fsdp1", "torch-fsdp2", "fsdp_ref-wrapper"])
@pytest.mark.parametrize("strategy", ["full_shard", "shard_grad_op"])
def test_what_a_real_run_holds(name: str, strategy: str) -> None:
    portrait = take(name, portrait_case(strategy, 2), run_ranks)
    assert not portrait.remark
    assert len(portrait.ranks) == 2
    for unit in portrait.units:
        assert sum(unit.shard(rank) for rank in range(2)) == unit.elements > 0
    shards = min(point.amount for point in portrait.ranks[0].live)
    for rank in portrait.ranks:
        assert {s.lane for s in rank.stretches} >= {"operation", "forward", "backward", "collective", "gathered"}
        assert all(0.0 <= s.start <= s.stop <= portrait.seconds + 1e-9 for s in rank.stretches)
        most = max(point.amount for point in rank.live)
        assert shards < most <= portrait.bound_bytes, "gathered units are counted, and the strategy keeps its bound"
    assert RunReport.from_json(RunReport((), portraits=(portrait,)).to_json()).portraits == (portrait,)


def test_a_run_that_fails_leaves_a_remark() -> None:
    portrait = take("torch-ddp", portrait_case("full_shard", 2), run_ranks)
    assert portrait.remark.startswith("torch-ddp did not run")
    assert portrait.ranks == ()
