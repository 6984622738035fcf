"""`world.inject`: each kind of fault does what it says, at its place and on its rank, and leaves the world healthy."""

from __future__ import annotations

import zipfile
from collections.abc import Iterator

import fault_programs as programs
import pytest
import torch

from fsdp_testing import run_ranks
from fsdp_testing.errors import WorldFailed
from fsdp_testing.ranks.faults.fault import Fault
from fsdp_testing.ranks.pool import Fate, default_pool
from fsdp_testing.ranks.run import run_with_faults


@pytest.fixture(autouse=True, scope="module")
def _no_rank_is_left() -> Iterator[None]:
    yield
    default_pool().close()


def failure(function, *arguments, size=2, timeout=60.0, **named):
    with pytest.raises(WorldFailed) as caught:
        run_ranks(function, *arguments, size=size, timeout=timeout, **named)
    return caught.value


@pytest.mark.parametrize("size", [2, 3])
def test_a_crash_ends_its_rank_alone_at_its_collective(size):
    error = failure(programs.sums, "crash@rank=1,collective=2", size=size)
    assert str(error).startswith("rank 1 died by SIGKILL"), str(error)
    assert (
        "injected fault crash@rank=1,collective=2 is here: all_reduce(sum) float32[2] #2"
        in error.outcome.ranks[1].stderr
    )
    # Before it is issued: the ledger of the rank holds the first one only.
    assert [len(rank.collectives) for rank in error.outcome.ranks] == [2, 1, 2][:size]


@pytest.mark.parametrize("kind", ["hang", "stop"])
def test_a_rank_that_hangs_or_is_stopped_is_found_behind(kind):
    error = failure(programs.sums, f"{kind}@rank=0,collective=2", timeout=1.0)
    assert "hung after 1 s (rank 0 is behind the others)" in str(error)
    assert [rank.fate for rank in error.outcome.ranks] == [Fate.HUNG, Fate.HUNG]
    # The collective before is called where the user called it, not where the fault is.
    assert error.outcome.ranks[0].collectives[-1].call_site.endswith("in sums")


def test_a_delay_changes_no_number():
    assert run_ranks(programs.sums, "delay=0.05@rank=1,collective=2", size=3) == [[6.0] * 3] * 3


def test_a_corrupted_contribution_reaches_everybody():
    assert run_ranks(programs.sums, "corrupt@rank=1,collective=2") == [[3.0, 4.0, 3.0]] * 2


def test_what_a_rank_does_not_contribute_cannot_be_corrupted():
    assert run_ranks(programs.broadcasts, "corrupt@rank=0,collective=1") == [1.0, 1.0]
    error = failure(programs.broadcasts, "corrupt@rank=1,collective=1")
    assert "expected numbers that this rank contributes there, got none" in str(error)


def test_a_dropped_collective_is_found_by_the_next_one():
    error = failure(programs.sum_and_largest, "drop@rank=1,collective=1")
    assert "ranks disagree: collective #1 of the default group differs" in str(error)


def test_collectives_in_another_order_are_found_where_they_differ():
    error = failure(programs.sum_and_largest, "reorder@rank=1,collective=1")
    assert "ranks disagree: collective #1 of the default group differs" in str(error)


def test_collectives_alike_in_another_order_swap_their_numbers():
    # Rank 1 gives 10 where rank 0 gives 1.
    assert run_ranks(programs.two_sums_alike, "reorder@rank=1,collective=1") == [[11.0, 11.0]] * 2


def test_a_collective_that_comes_later_is_counted_once():
    # Rank 1 reads its first sum before it is issued.
    results = run_ranks(programs.sums, "reorder@rank=1,collective=1", "corrupt@rank=1,collective=3", count=4)
    assert results == [[3.0, 3.0, 4.0, 3.0], [2.0, 3.0, 4.0, 3.0]]


def test_a_collective_after_which_no_other_comes_is_not_reordered():
    error = failure(programs.sums, "reorder@collective=3")
    assert "fault reorder@collective=3: expected a place that is reached" in str(error)


def test_neighbours_that_both_come_later_keep_their_order():
    # Rank 1 issues its third sum first, then the two that it held back.
    results = run_ranks(programs.counted_sums, "reorder@rank=1,collective=1", "reorder@rank=1,collective=2")
    assert results == [[301.0, 102.0, 203.0], [102.0, 203.0, 301.0]]
    error = failure(programs.sums, "reorder@collective=2", "reorder@collective=3")
    assert "fault reorder@collective=2, reorder@collective=3: expected a place that is reached" in str(error)


@pytest.mark.parametrize(("at", "reached"), [(2, True), (3, False)])
def test_a_reordered_collective_is_reached_once_another_one_comes_before_it(at, reached):
    fault = Fault.parse(f"reorder@collective={at}")
    with default_pool().lend(2) as world:
        outcome = world.execute(run_with_faults, ((fault,), programs.sums))
    assert outcome.ok, outcome.describe()
    assert [fault.reached_in(rank.stderr) for rank in outcome.ranks] == [reached] * 2


def test_faults_at_one_place_come_about_in_their_order():
    place = "@rank=1,collective=2"
    assert run_ranks(programs.sums, f"corrupt{place}", f"corrupt{place}") == [[3.0, 5.0, 3.0]] * 2
    error = failure(programs.sums, f"delay=0{place}", f"crash{place}")
    written = error.outcome.ranks[1].stderr
    assert written.index(f"injected fault delay=0{place} is here") < written.index(
        f"injected fault crash{place} is here"
    )


def test_faults_of_two_injections_count_the_same_collectives():
    # What the outer one drops is the first for the inner one, too.
    results = run_ranks(programs.sums_in_two_injections, "drop@collective=1", "corrupt@rank=1,collective=2")
    assert results == [[1.0, 4.0, 3.0], [2.0, 4.0, 3.0]]


@pytest.mark.parametrize("kind", ["drop", "reorder", "corrupt"])
def test_a_collective_of_cpp_cannot_be_changed_and_that_is_said(kind):
    error = failure(programs.in_ddp, f"{kind}@collective=1")
    assert f"fault {kind}@collective=1: expected a collective that Python calls, got all_reduce" in str(error)


def test_a_delay_comes_to_a_collective_of_cpp():
    run_ranks(programs.in_ddp, "delay=0.01@collective=1")


def test_steps_count_from_zero_and_a_corrupted_gradient_is_off_by_one():
    assert run_ranks(programs.steps, "corrupt@rank=1,step=2") == [(3, -3.0), (3, -4.0)]
    error = failure(programs.steps, "crash@rank=1,step=0")
    assert "injected fault crash@rank=1,step=0 is here: before step 0" in error.outcome.ranks[1].stderr


@pytest.mark.parametrize(
    "fault",
    [
        *(f"delay=0@rank=1,{p}" for p in ("step=3", "collective=1", "save=1", "load=1")),
        "full-disk@rank=1",
        "slow-disk=0@rank=1",
    ],
)
def test_a_fault_that_is_not_reached_fails_the_call(fault):
    error = failure(programs.steps, fault)
    assert f"fault {fault}: expected a place that is reached, but the run ended before it" in str(error)
    assert [rank.fate for rank in error.outcome.ranks] == [Fate.RETURNED, Fate.RAISED]


def test_a_rank_that_dies_while_it_saves_leaves_half_a_file(tmp_path):
    failure(programs.saves, str(tmp_path), "crash@rank=1,save=2")
    sizes = {path.name: path.stat().st_size for path in tmp_path.glob("1-*.pt")}
    assert sorted(sizes) == ["1-1.pt", "1-2.pt"]
    assert sizes["1-2.pt"] == sizes["1-1.pt"] // 2


def test_a_full_disk_stays_full_until_the_fault_ends(tmp_path):
    full = "No space left on device"
    assert run_ranks(programs.saves, str(tmp_path), "full-disk@rank=0,save=2", also_after=True) == [
        [f"2: {full}", f"3: {full}"],
        [],
    ]
    assert torch.equal(torch.load(tmp_path / "0-1.pt")["weight"], torch.arange(1000))
    assert torch.equal(torch.load(tmp_path / "after.pt"), torch.ones(1))


def test_a_corrupted_save_is_read_with_an_error(tmp_path):
    run_ranks(programs.saves, str(tmp_path), "corrupt@rank=1,save=1")
    assert not torch.equal(torch.load(tmp_path / "1-1.pt")["weight"], torch.arange(1000))
    with zipfile.ZipFile(tmp_path / "1-1.pt") as archive:
        assert archive.testzip() is not None
    with zipfile.ZipFile(tmp_path / "1-2.pt") as archive:
        assert archive.testzip() is None


def test_a_slow_disk_makes_each_save_and_load_take_longer(tmp_path):
    torch.save(torch.ones(1), tmp_path / "file.pt")
    seconds = run_ranks(programs.loads, str(tmp_path / "file.pt"), "slow-disk=0.3@rank=1")
    assert seconds[1] >= 0.3


def test_memory_is_limited_while_the_fault_lasts():
    assert all("memory" in refused for refused in run_ranks(programs.allocates, "memory=256MiB"))


def test_the_clock_jumps_and_comes_back():
    for off, afterwards in run_ranks(programs.clock):
        assert 3599 < off < 3700
        assert abs(afterwards) < 60


def test_the_next_call_on_the_same_ranks_is_healthy():
    before = run_ranks(programs.pid)
    run_ranks(programs.sums, "delay=0@collective=1", "corrupt@collective=2", "clock=+5", "memory=1GiB")
    # Nothing was left that would have the world replaced.
    assert run_ranks(programs.pid) == before
    assert run_ranks(programs.sums) == [[3.0] * 3] * 2
    failure(programs.sums, "crash@rank=1,collective=2")
    assert run_ranks(programs.sums) == [[3.0] * 3] * 2


def test_nothing_is_installed_where_no_fault_is():
    before = torch.save, torch.load
    assert run_ranks(programs.sums) == [[3.0] * 3] * 2
    assert (torch.save, torch.load) == before


def test_bad_text_is_refused_before_anything_happens():
    assert "fault: expected a rank from 0 to 1, got 2" in str(failure(programs.sums, "crash@rank=2,step=0"))


@pytest.mark.parametrize("new_format", [True, False], ids=["archive", "before torch 1.6"])
@pytest.mark.parametrize(
    "state",
    [torch.ones(1), {"a": torch.arange(5.0)}, torch.ones(8, dtype=torch.bool), torch.nn.Linear(4, 4).state_dict()],
    ids=["one number", "five", "flags", "a module"],
)
def test_a_corrupted_save_of_little_is_no_longer_what_was_saved(tmp_path, state, new_format):
    run_ranks(programs.saves_little, str(tmp_path / "x.pt"), state, new_format=new_format, size=1)
    loaded = torch.load(tmp_path / "x.pt")
    before, after = (list(each.values()) if isinstance(each, dict) else [each] for each in (state, loaded))
    assert not all(map(torch.equal, before, after))
