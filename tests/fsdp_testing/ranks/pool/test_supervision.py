"""Every way in which a rank can end a call is reported, in time, and the next call runs on a whole world."""

from __future__ import annotations

import importlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fate_programs import (
    closes_descriptors,
    dies_slowly,
    ends_when_stacks_are_taken,
    exits,
    exits_quietly,
    generates,
    gloo_times_out,
    hangs_in_collective,
    hangs_in_python,
    hangs_with_the_gil,
    interrupted,
    killed,
    killed_when_collected,
    killed_while_others_return,
    leaves_a_collective_open,
    marks_itself_failed,
    mine,
    raise_differently,
    raise_late_on_one,
    raise_on_all,
    raise_on_one,
    raises_without_text,
    recurses,
    returns_a_lock,
    returns_early,
    returns_what_cannot_be_read,
    returns_what_raises,
    segfaults,
    skips_one_call,
    stops_itself,
    system_exit,
    writes_into_the_channel,
)
from small_programs import gone

from fsdp_testing.ranks.pool import Fate, Pool, WorldOutcome, supervision
from fsdp_testing.ranks.pool.cause import NotJoined
from fsdp_testing.ranks.pool.supervision import GRACE_SECONDS

R, A, D, H, S = Fate.RETURNED, Fate.RAISED, Fate.DIED, Fate.HUNG, Fate.STOPPED


def run(pool: Pool, function: Callable[..., Any], *args: Any, size: int = 2, timeout: float = 30.0) -> WorldOutcome:
    world = pool.world(size)
    try:
        return world.execute(function, args, timeout=timeout)
    finally:
        world.release()


def sum_of_ones() -> list[float]:
    total = torch.ones(4)
    dist.all_reduce(total)
    return total.tolist()


@pytest.fixture
def healthy(pool: Pool) -> Iterator[None]:
    """After each fate, the next call works."""
    yield
    outcome = run(pool, sum_of_ones)
    assert outcome.ok, outcome.describe()
    assert outcome.values == [[2.0] * 4, [2.0] * 4]


FATES: dict[Callable[..., Any], tuple[tuple[Fate, Fate], str]] = {
    raise_on_one: ((S, A), r"^rank 1 raised ValueError: planted; rank 0 waited in all_reduce\(sum\) #1 float32\[4\]$"),
    raise_on_all: ((A, A), r"^every rank raised KeyError: 'same'$"),
    raise_differently: ((A, A), r"^rank 0 raised KeyError: 'left'$"),
    killed: ((A, D), r"^rank 1 died by SIGKILL$"),
    killed_while_others_return: ((R, D), r"^rank 1 died by SIGKILL$"),
    killed_when_collected: ((R, D), r"^rank 1 died by SIGKILL$"),
    exits: ((R, D), r"^rank 1 died with exit code 7$"),
    exits_quietly: ((R, D), r"^rank 1 died with exit code 0 \(it sent no report\)$"),
    system_exit: ((R, A), r"^rank 1 raised SystemExit: 0$"),
    interrupted: ((R, A), r"^rank 1 raised KeyboardInterrupt$"),
    segfaults: ((A, D), r"^rank 1 died by SIGSEGV$"),
    returns_early: ((S, R), r"^rank 0 waits in all_reduce\(sum\) #2 float32\[4\] at .*fate_programs.py:\d+ in "
                            r"returns_early; rank 1 returned after #1$"),
    skips_one_call: ((S, A), r"^ranks disagree: collective #2 of the default group differs: rank [01] issued "
                             r"all_reduce\(sum\) float32\[[23]\] at .* in skips_one_call; rank [01] issues "
                             r"all_reduce\(sum\) float32\[[23]\]"),
    leaves_a_collective_open: ((R, R), r"^ranks disagree: they issued different numbers of collectives on the default "
                                       r"group \(rank 0: 1, rank 1: 2\)$"),
    marks_itself_failed: ((S, R), r"^rank 0 waits in all_reduce\(sum\) #1 float32\[4\] at .*; rank 1 failed without any"),
    raises_without_text: ((A, A), r"^every rank raised BadText: <str\(\) of it raised RuntimeError>$"),
    recurses: ((A, A), r"^every rank raised RecursionError: "),
    generates: ((A, A), r"^every rank raised TypeError: .* returned a generator that cannot be sent to the controller"),
    returns_a_lock: ((A, A), r"^every rank raised TypeError: .* returned a lock that cannot be sent"),
    returns_what_raises: ((A, A), r"^every rank raised TypeError: .* returned a ReducesBadly that cannot be sent"),
    returns_what_cannot_be_read: ((A, A), r"^every rank raised ResultUnreadable: .*OSError: only in the controller$"),
    gloo_times_out: ((A, S), r"^rank 0 gave up waiting in all_reduce\(sum\) #1 float32\[4\] on group .*rank 1 never joined"
                             r" it: it was stopped in or after new_group #1 \[0, 1\] on making of groups$"),
    # gloo aborts when its poller loses its descriptor first.
    closes_descriptors: ((R, D), r"^rank 1 died (by SIGABRT|with exit code 0 \(it sent no report\))$"),
    dies_slowly: ((A, D), r"^rank 0 raised ValueError: planted$"),
    writes_into_the_channel: ((R, A), r"^rank 1 raised ChannelGarbled: the rank sent no valid message"),
}  # fmt: skip

HANGS: dict[Callable[..., Any], tuple[tuple[Fate, Fate], str]] = {
    hangs_in_collective: ((H, H), r"^ranks 0, 1 hung after 2 s \(rank 1 is behind the others\): rank 0 last issued "
                                  r"all_reduce\(sum\) #1 float32\[4\]; rank 1 issued no collective$"),
    hangs_in_python: ((H, H), r"^ranks 0, 1 hung after 2 s: rank 0 issued no collective; rank 1 issued no collective$"),
    hangs_with_the_gil: ((H, H), r"^ranks 0, 1 hung after 2 s \(rank 1 is behind"),
    stops_itself: ((R, H), r"^rank 1 hung after 2 s"),
}  # fmt: skip


@pytest.mark.usefixtures("healthy")
@pytest.mark.parametrize("function", FATES, ids=lambda function: function.__name__)
def test_every_fate_is_reported_at_once(pool: Pool, function: Callable[..., Any]) -> None:
    fates, cause = FATES[function]
    outcome = run(pool, function)
    assert not outcome.ok
    assert re.search(cause, outcome.cause.splitlines()[0]), outcome.describe()
    got = tuple(rank.fate for rank in outcome.ranks)
    if function is skips_one_call:
        # Whoever comes second refuses, and stops the other; when they come at once, each finds the other's entry.
        got = fates if got == (A, A) else tuple(sorted(got, reverse=True))
    # A rank whose peer has ended badly may be stopped before its own account has come through.
    late = {(got, fate) for got in (A, S, R) for fate in fates if D in fates} | ({(S, R)} if A in fates else set())
    assert all(pair[0] is pair[1] or pair in late for pair in zip(got, fates, strict=True)), outcome.describe()
    assert outcome.describe().startswith(outcome.cause)


@pytest.mark.usefixtures("healthy")
@pytest.mark.parametrize("function", HANGS, ids=lambda function: function.__name__)
def test_a_hang_ends_at_the_deadline_with_stacks(pool: Pool, function: Callable[..., Any]) -> None:
    fates, cause = HANGS[function]
    run(pool, sum_of_ones)
    outcome = run(pool, function, timeout=2.0)
    assert tuple(rank.fate for rank in outcome.ranks) == fates, outcome.describe()
    assert re.search(cause, outcome.cause), outcome.describe()
    assert outcome.seconds >= 2.0  # how much later: benchmarks/pool.py
    for rank in outcome.ranks:
        if rank.fate is H and function is not stops_itself:
            assert function.__name__ in rank.stack, rank.stack
    if function is stops_itself:
        assert "did not answer SIGUSR1" in outcome.describe()


class SlowStack:
    """A rank that a busy machine stops for longer than three looks between two lines of its stack."""

    rank = 0

    def __init__(self, *lines: str) -> None:
        self.looks = [text for line in lines for text in (line, *[""] * 5)]
        self.asked = False

    def request_stacks(self) -> None:
        self.asked = True

    def take_output(self, name: str) -> str:
        return self.looks.pop(0) if self.asked and name == "stacks" and self.looks else ""

    def read_exit(self) -> None:
        """It lives."""


def test_a_stack_that_comes_line_by_line_is_waited_for() -> None:
    lines = ["Current thread:\n", '  File "a.py", line 1 in f\n', '  File "<string>", line 1 in <module>\n']
    rank = SlowStack(*lines)
    watch = supervision._RankWatch(rank)  # type: ignore[arg-type]  # what is used of it
    supervision.Supervision([], None, 1, "gloo", None)._take_stacks([watch])  # type: ignore[arg-type]  # no job
    assert watch.stack == "".join(lines)
    assert len(rank.looks) == 5, "the outermost line ends the waiting"


@pytest.mark.usefixtures("healthy")
def test_a_rank_that_ends_when_its_stacks_are_taken_hung_and_said_nothing_of_that(pool: Pool) -> None:
    """Python reads the frames of threads that run, without its lock, and now and then the process ends by that."""
    outcome = run(pool, ends_when_stacks_are_taken, timeout=2.0)
    assert [rank.fate for rank in outcome.ranks] == [H, H], outcome.describe()
    assert outcome.ranks[1].stderr == "before\n", outcome.describe()
    assert "[the process ended (SIGSEGV) while its stacks were taken]" in outcome.ranks[1].stack, outcome.describe()
    assert "Segmentation fault" not in outcome.describe()


def test_a_rank_that_still_computes_gives_its_own_account(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    outcome = run(pool, raise_late_on_one, 3 * GRACE_SECONDS)
    assert [rank.fate for rank in outcome.ranks] == [A, A], outcome.describe()
    assert outcome.cause.startswith("every rank raised ValueError: planted")
    monkeypatch.setattr(supervision, "_LATE_SECONDS", 0.2)
    endless = run(pool, raise_late_on_one, 600.0)
    assert [rank.fate for rank in endless.ranks] == [S, A], endless.describe()


def test_a_deadline_beyond_what_epoll_can_wait_for(pool: Pool) -> None:
    assert [rank.value for rank in run(pool, _rank, timeout=1e18).ranks] == [0, 1]


def _rank() -> int:
    return dist.get_rank()


def test_all_tracebacks_are_kept(pool: Pool) -> None:
    said = run(pool, raise_differently).describe()
    assert "KeyError: 'left'" in said
    assert "ValueError: right" in said
    assert said.count("in raise_differently") == 2
    assert "pool/worker.py" not in said


def issues_and_takes_back() -> float:
    """Rank 1 returns; rank 0 has a call refused by torch, catches it, and goes on for longer than the grace period."""
    if mine():
        return 0.0
    threading.Event().wait(0.2)
    try:
        dist.all_gather([torch.ones(4)], torch.ones(4))  # one output for two ranks
    except (ValueError, RuntimeError):
        pass
    else:
        raise AssertionError("torch took it")
    threading.Event().wait(GRACE_SECONDS + 0.3)
    return 1.0


def test_a_refused_collective_is_no_reason_to_stop(pool: Pool) -> None:
    outcome = run(pool, issues_and_takes_back)
    assert outcome.ok, outcome.describe()
    assert outcome.values == [1.0, 0.0]


def prints(lines: int) -> None:
    for _ in range(lines):
        print("x" * 99)
    os.write(2, b"raw\xff\n")
    sys.stdout.flush()
    dist.barrier()  # a rank that is slower than the grace period would be stopped while it prints
    if mine():
        raise ValueError("planted")


def test_long_output_is_kept_and_shown_in_part(pool: Pool) -> None:
    outcome = run(pool, prints, 100_000)
    assert len(outcome.ranks[0].stdout) == 10_000_000
    assert outcome.ranks[0].stderr == "raw\ufffd\n"
    assert "9979999 characters are left out" in outcome.describe()
    assert len(outcome.describe()) < 60_000


def raises_hostile_text() -> None:
    print("out \x1b[2J\x1b]0;title\x07")
    raise ValueError("\x1b[1A\x1b[31mall passed\x9b\u202e")


def test_what_a_rank_says_cannot_steer_the_terminal(pool: Pool) -> None:
    text = run(pool, raises_hostile_text).describe()
    assert "\\x1b[31mall passed\\x9b\\u202e" in text
    assert "out \\x1b[2J" in text
    assert not set("\x1b\x07\x9b\u202e") & set(text)


def test_output_belongs_to_its_call(pool: Pool) -> None:
    world = pool.world(1)
    for lines in (20_000, 1, 3):
        outcome = world.execute(prints_plain, (lines,))
        assert outcome.ranks[0].stdout == "y\n" * lines * 50
    world.release()


def prints_plain(lines: int) -> None:
    for _ in range(lines):
        sys.stdout.write("y\n" * 50)


def double(value: Any) -> Any:
    return value * 2


def test_huge_arguments_and_results(pool: Pool) -> None:
    sent = torch.arange(25_000_000, dtype=torch.float32)
    outcome = run(pool, double, sent, timeout=120)
    assert outcome.ok, outcome.cause
    for value in outcome.values:
        assert torch.equal(value, sent * 2)


def leaves_children() -> list[int]:
    plain = subprocess.Popen(["sleep", "600"])
    detached = subprocess.Popen(["sleep", "600"], start_new_session=True)
    threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
    return [os.getpid(), plain.pid, detached.pid]


def leaves_children_and_dies() -> None:
    print(*leaves_children())
    sys.stdout.flush()
    os.kill(os.getpid(), signal.SIGKILL)


def test_what_a_rank_leaves_running_is_named_and_ended(pool: Pool) -> None:
    outcome = run(pool, leaves_children)
    assert all(rank.dirt for rank in outcome.ranks)
    assert {"thread", "child process"} <= {dirt.kind for dirt in outcome.ranks[0].dirt}
    assert gone([pid for pids in outcome.values for pid in pids])


def test_what_a_dead_rank_leaves_running_is_ended(pool: Pool) -> None:
    outcome = run(pool, leaves_children_and_dies)
    pids = [int(word) for rank in outcome.ranks for word in rank.stdout.split()]
    assert len(pids) == 6, outcome.describe()
    assert gone(pids)


def forks_and_both_return() -> str:
    pid = os.fork()
    if pid == 0:
        return "child"
    os.waitpid(pid, 0)
    return "parent"


def test_a_child_that_comes_out_of_the_call_does_not_report(pool: Pool) -> None:
    for _ in range(3):
        outcome = run(pool, forks_and_both_return)
        assert outcome.values == ["parent", "parent"], outcome.describe()


def sets_the_clock() -> float:
    return time.monotonic()


def test_the_clock_starts_when_all_are_in_the_world(pool: Pool) -> None:
    world = pool.world(3, isolation="fresh")
    outcome = world.execute(sets_the_clock, timeout=2.0)
    world.release()
    assert outcome.ok, outcome.describe()


LATE = """
from fsdp_testing.base.backends import Backend, register_backend


def prepare(place):
    if place.rank == 1:
        open({pipe!r}).read()


register_backend(Backend("one-is-late", "cpu", lambda size: None, "", prepare=prepare, makes_group=False))
"""


def test_no_rank_begins_before_all_are_in_the_world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the death of an early rank breaks the joining of a late one, which is then reported as the cause."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "one_is_late.py").write_text(LATE.format(pipe=str(tmp_path / "pipe")))
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.import_module("one_is_late")
    monkeypatch.setattr(supervision, "_JOIN_SECONDS", 2.0)
    mine = Pool(("one_is_late",))
    try:
        outcome = mine.world(2, "one-is-late").execute(exits, timeout=30.0)
    finally:
        mine.close()
    assert not any(rank.began for rank in outcome.ranks), outcome.describe()
    assert outcome.diagnosis == NotJoined((1,), 2.0), outcome.describe()
    assert [rank.fate for rank in outcome.ranks] == [S, H]


@pytest.mark.parametrize("timeout", [0, -1, float("nan"), "5", True])
def test_a_timeout_that_is_none_is_refused(pool: Pool, timeout: Any) -> None:
    from fsdp_testing.errors import InvalidArgument

    world = pool.world(1)
    with pytest.raises(InvalidArgument, match="timeout: expected seconds above 0"):
        world.execute(double, (1,), timeout=timeout)
    world.release()
