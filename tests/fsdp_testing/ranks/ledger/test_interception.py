"""Programs that are legal are left alone, and what they issue is counted and named."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from legal_programs import LEGAL, NOTHING_STAYS, ddp, fsdp1, fsdp2, me, one_way_sends, run
from torch.distributed.distributed_c10d import GatherOptions

from fsdp_testing.ranks.ledger import interception
from fsdp_testing.ranks.ledger.readers import METHODS
from fsdp_testing.ranks.ledger.records import WAITS_FOR_ALL
from fsdp_testing.ranks.pool import Fate, Pool
from fsdp_testing.ranks.pool.world import current_world


@pytest.mark.parametrize("function", LEGAL, ids=lambda function: function.__name__)
def test_a_legal_program_is_left_alone(pool: Pool, function: Callable[[], Any]) -> None:
    outcome = run(pool, function, size=LEGAL[function], timeout=60)
    assert outcome.ok, outcome.describe()
    assert all(r.fate is Fate.RETURNED for r in outcome.ranks)
    recorded = any(sum(rank.issued.values()) for rank in outcome.ranks)
    assert recorded is (function not in NOTHING_STAYS), "what is left alone because nobody looked proves nothing"


def many_groups() -> int:
    """More groups than the ledger has room for, in another order on each rank."""
    names = []
    for index in range(1100):
        recorder = interception._active
        assert recorder is not None
        from fsdp_testing.ranks.ledger.records import group_identity

        identity = group_identity(f"made-{index if not me() else 1099 - index}", (0, 1), 2, True)
        names.append(recorder.line(identity))
    from fsdp_testing.ranks.ledger.calls import call_for

    for line in names:
        interception._active.record(line, call_for(("barrier", (), None, None)), False)  # type: ignore[union-attr]
    return len(names)


def test_a_full_ledger_accuses_nobody(pool: Pool) -> None:
    outcome = run(pool, many_groups)
    assert outcome.ok, outcome.describe()
    assert all(r.uncompared > 0 for r in outcome.ranks)
    assert all(sum(r.issued.values()) >= 1000 for r in outcome.ranks), "there was room for these"


def gather_of_one_tensor() -> tuple[Any, bool, bool]:
    """What the ledger reads in torch 2.14's `gather_single`, which older ones lack: the call, and what this rank waits for."""
    options = GatherOptions()
    options.rootRank, options.asyncOp = 1, True
    read = METHODS["gather_single"](current_world().group, torch.empty(4), torch.ones(2), options)
    assert read is not None
    call, blocking = read
    return call.what, call.waits_for == WAITS_FOR_ALL, blocking


def test_the_root_alone_waits_for_a_gather_of_one_tensor(pool: Pool) -> None:
    outcome = run(pool, gather_of_one_tensor)
    assert outcome.ok, outcome.describe()
    (what, waits, blocking), of_root = outcome.values
    assert (waits, blocking, of_root[1:]) == (False, False, (True, False))
    assert what == of_root[0]
    assert what[0] == "gather_single"


def seen(function: Callable[[], Any]) -> int:
    before = sum(interception._active.issued().values())  # type: ignore[union-attr]
    function()
    return sum(interception._active.issued().values()) - before  # type: ignore[union-attr]


def counts_of_everything() -> dict[str, int]:
    value = torch.ones(4)
    return {
        "method": seen(lambda: dist.all_reduce(value)),
        "functional": seen(lambda: funcol.all_reduce(value, "sum", current_world().group) + 0),
        "point to point": seen(one_way_sends),
        "DDP": seen(ddp),
        "FSDP2": seen(fsdp2),
        "FSDP1": seen(fsdp1),
        "after C++ callers": seen(lambda: dist.all_reduce(value)),
        "functional after C++ callers": seen(lambda: funcol.all_reduce(value, "sum", current_world().group) + 0),
        "overload": seen(lambda: current_world().group.allreduce(value).wait()),
        "broadcast of a module": seen(
            lambda: dist._broadcast_coalesced(current_world().group, [value.clone(), value.clone()], 1 << 20, 0)
        ),
    }


def test_collectives_are_counted_once_whichever_way_they_come(pool: Pool) -> None:
    outcome = run(pool, counts_of_everything)
    assert outcome.ok, outcome.describe()
    counted = outcome.values[0]
    ways = ("method", "functional", "after C++ callers", "functional after C++ callers", "overload")
    assert {way: counted[way] for way in ways} == dict.fromkeys(ways, 1)
    assert counted["point to point"] == 0
    assert counted["DDP"] >= 3 + 3  # three backwards, three broadcasts of buffers
    assert counted["FSDP1"] >= 2 * 2
    assert counted["FSDP2"] >= 2 * 4
    assert counted["broadcast of a module"] == 1


def entry_of_the_next_line() -> str:
    dist.all_reduce(torch.ones(2, 3))
    return "done"


def test_a_record_names_what_and_where(pool: Pool) -> None:
    outcome = run(pool, entry_of_the_next_line)
    (record,) = outcome.ranks[1].collectives
    assert str(record) == "all_reduce(sum) #1 float32[2, 3]"
    assert re.search(r"test_interception.py:\d+ in entry_of_the_next_line$", record.call_site)
    assert outcome.ranks[0].digests == outcome.ranks[1].digests


def entry_of_a_deprecated_function() -> str:
    dist.reduce_scatter_tensor(torch.empty(1), torch.ones(2))
    return "done"


def test_a_deprecated_function_is_no_caller(pool: Pool) -> None:
    (record,) = run(pool, entry_of_a_deprecated_function).ranks[1].collectives
    assert record.call_site.endswith("in entry_of_a_deprecated_function")
