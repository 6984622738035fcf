"""Every way in which a rank can end is reported in the verdict, and the next test passes on a new world."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

Runner = Callable[..., Any]

# name: (body of the test, what the report must say as regular expressions)
FATES: dict[str, tuple[str, list[str]]] = {
    "raise on one": (
        """
        if world.rank == 1:
            assert [1, 2] == [1, world.rank + 2], "planted"
        dist.all_reduce(torch.ones(4))
        """,
        [
            r"rank 1: AssertionError: planted",
            r"rank 0 waits in all_reduce\(sum\) #1 float32\[4\]",
            r"assert \[1, 2\] == \[1, 3\]",
            r"At index 1 diff: 2 != 3",
            r"^rank 1: AssertionError: planted",
        ],
    ),
    "raise on all": (
        """
        value = [world.size, 3]
        assert value == [2, 4]
        """,
        [r"ranks 0, 1: assert \[2, 3\] == \[2, 4\]", r"-+ ranks 0, 1: call failed -+", r"At index 1 diff: 3 != 4"],
    ),
    "differing raise": (
        """
        if world.rank == 0:
            raise KeyError("left")
        raise ValueError("right")
        """,
        [r"rank 0: KeyError: 'left'", r"rank 1: ValueError: right", r"-+ rank 0: call failed -+"],
    ),
    "SIGKILL": (
        """
        if world.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        dist.all_reduce(torch.ones(4))
        """,
        [r"^rank 1 died by SIGKILL"],
    ),
    "SIGKILL while the others finish": (
        """
        if world.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        """,
        [r"^rank 1 died by SIGKILL"],
    ),
    "os._exit": (
        """
        if world.rank == 0:
            os._exit(3)
        """,
        [r"^rank 0 died with exit code 3"],
    ),
    "os._exit(0)": (
        """
        if world.rank == 1:
            os._exit(0)
        """,
        [r"^rank 1 died with exit code 0"],
    ),
    "segfault": (
        """
        if world.rank == 1:
            import ctypes
            ctypes.string_at(0)
        dist.barrier()
        """,
        [r"^rank 1 died by SIGSEGV", r"in test_segfault"],
    ),
    "hang in a collective": (
        """
        if world.rank == 1:
            threading.Event().wait()
        dist.all_reduce(torch.ones(4))
        """,
        [r"hung after 3 s", r"rank 0 last issued all_reduce\(sum\) #1 float32\[4\]", r"in test_"],
    ),
    "hang in Python": (
        """
        while world.rank == 1:
            pass
        """,
        [r"rank 1 hung after 3 s", r"rank 1 issued no collective", r"test_ranks.py\", line \d+ in test_"],
    ),
    "hang while holding the GIL": (
        """
        if world.rank == 1:
            import ctypes
            ctypes.PyDLL(None).sleep(1000)
        """,
        [r"rank 1 hung after 3 s", r"test_ranks.py\", line \d+ in test_"],
    ),
    "mismatched collective": (
        """
        if world.rank == 0:
            dist.all_reduce(torch.ones(4))
        else:
            dist.all_reduce(torch.ones(4), op=dist.ReduceOp.MAX)
        """,
        [r"CollectiveMismatch", r"float32\[4\]"],
    ),
    "early return": (
        """
        dist.all_reduce(torch.ones(4))
        if world.rank == 1:
            return
        dist.all_reduce(torch.ones(8))
        """,
        [r"rank 0 waits in all_reduce\(sum\) #2 float32\[8\]", r"rank 1 returned after #1"],
    ),
    "skip on one rank only": (
        """
        if world.rank == 1:
            pytest.skip("no device here")
        """,
        [r"ranks disagree: rank 0 passed; rank 1 skipped \(no device here\)"],
    ),
    "skip on one rank, the other waits for it": (
        """
        if world.rank == 1:
            pytest.skip("no device here")
        dist.all_reduce(torch.ones(4))
        """,
        [r"rank 1 skipped \(no device here\); rank 0 waits in all_reduce\(sum\) #1 float32\[4\]"],
    ),
    "xfail on one rank only": (
        """
        if world.rank == 0:
            pytest.xfail("known")
        """,
        [r"ranks disagree: rank 0 xfailed \(.*known\); rank 1 passed"],
    ),
    "sys.exit": (
        """
        if world.rank == 1:
            sys.exit(4)
        """,
        [r"rank 1: SystemExit: 4"],
    ),
    "an unserialisable exception": (
        """
        class Odd(Exception):
            def __reduce__(self):
                raise TypeError("cannot be sent")
        raise Odd("odd")
        """,
        [r"ranks 0, 1: .*Odd: odd"],
    ),
}


@pytest.fixture(scope="module")
def fates(run_many: Callable[..., Any]) -> dict[str, Any]:
    """One session that meets every fate; junit's file says what became of each test."""
    return dict(run_many({name: body for name, (body, _) in FATES.items()}))


def _test(name: str) -> str:
    return "test_" + re.sub(r"\W+", "_", name)


@pytest.mark.parametrize("name", FATES)
def test_a_fate_is_told_and_the_next_test_passes(name: str, fates: dict[str, Any]) -> None:
    case, following = fates[_test(name)], fates[_test(name) + "_next"]
    assert case.outcome == "failure", case
    for pattern in FATES[name][1]:
        said = case.message if pattern.startswith("^") else case.text
        assert re.search(pattern, said), f"{pattern} is missing in:\n{case.message}\n{case.text}"
    assert following.outcome == "passed", following


def test_a_mismatch_ends_at_the_users_call(fates: dict[str, Any]) -> None:
    text = fates[_test("mismatched collective")].text
    assert not re.search(r"recorder\.py|interception\.py|c10d_logger\.py:\d+: in", text), text
    assert re.search(r"^> +dist.all_reduce", text, re.MULTILINE), text
    # Each rank that is refused is told of in the message and in its own account; the other one may still be waiting.
    assert text.count("default group differs") <= 2 * text.count("call failed"), text


# name: (body, what is reported); the test passes with a warning, and fails under --strict-hygiene.
LEAKS: dict[str, tuple[str, str]] = {
    "group": ("dist.new_group([0, 1])", r"ranks 0, 1 left process group: .* of ranks \[0, 1\] was not destroyed"),
    "thread": (
        "threading.Thread(target=threading.Event().wait, name='straggler', daemon=True).start()",
        r"ranks 0, 1 left thread: thread 'straggler' \(daemon\) still runs Event.wait",
    ),
    "child on one rank": (
        "import subprocess; world.rank == 1 and subprocess.Popen(['sleep', '987'])",
        r"rank 1 left child process: child process \d+ \(sleep 987\) \(put back\)",
    ),
    "file": (
        "import tempfile; os.close(tempfile.mkstemp(prefix='left')[0])",
        r"rank 0 left temporary file: .*/left\w+ \(put back\)",
    ),
    "environment": ("os.environ['LEFT'] = '1'", r"ranks 0, 1 left environment: LEFT='1' was added \(put back\)"),
    "default dtype": (
        "torch.set_default_dtype(torch.float64)",
        r"ranks 0, 1 left torch default: default dtype: torch.float32 -> torch.float64 \(put back\)",
    ),
}


@pytest.fixture(scope="module")
def leaks(run_many: Callable[..., Any]) -> dict[str, Any]:
    """One session of every leak, each a failure by option."""
    return dict(run_many({name: "\n    " + body for name, (body, _) in LEAKS.items()}, "--strict-hygiene"))


@pytest.mark.parametrize("name", LEAKS)
def test_a_leak_is_a_failure_when_asked_for(name: str, leaks: dict[str, Any]) -> None:
    case, following = leaks[_test(name)], leaks[_test(name) + "_next"]
    assert case.outcome == "failure", case
    assert "the test leaked state (--strict-hygiene)" in case.message
    assert re.search(LEAKS[name][1], case.text), case.text
    assert following.outcome == "passed", following


OUTLIVING = """
@pytest.mark.world(2)
def test_fate(world):
    import subprocess
    child = subprocess.Popen(["setsid", "sleep", "986"])
    print("child", child.pid)
"""


def test_a_leak_is_a_warning_by_default_and_does_not_outlive_the_session(run: Runner) -> None:
    tests = [f"@pytest.mark.world(2)\ndef {_test(name)}(world):\n    {body}\n" for name, (body, _) in LEAKS.items()]
    verdict = run("\n".join([*tests, OUTLIVING]), "-rP", then_next=True)
    assert verdict.counts() == (len(LEAKS) + 2, 0, 0), verdict.text
    assert verdict.warnings == len(LEAKS) + 1, verdict.text
    for _, expected in LEAKS.values():
        assert re.search(r"WorldHygieneWarning: .*" + expected, verdict.text), verdict.text
    pids = re.findall(r"child (\d+)\n", verdict.text)
    assert len(pids) == 2, verdict.text
    assert [pid for pid in pids if _runs_sleep(pid)] == []


def _runs_sleep(pid: str) -> bool:
    from pathlib import Path

    try:
        return b"986" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


INJECTED = """
@pytest.mark.world(2)
def test_for_the_rest_of_the_test(world):
    world.inject("delay=0@collective=1", "clock=+5", "memory=4GiB", "full-disk", "slow-disk=0")
    dist.all_reduce(torch.ones(4))
    with pytest.raises(OSError, match="No space left"):
        torch.save(1, "file.pt")

@pytest.mark.world(2)
def test_not_reached(world):
    world.inject("crash@rank=1,step=7")

@pytest.mark.world(2)
def test_skips_before_it(world):
    world.inject("crash@rank=1,step=8")
    pytest.skip("on both ranks")

@pytest.mark.world(2)
def test_crash(world):
    with world.inject("crash@rank=1,collective=1"):
        dist.all_reduce(torch.ones(1))

def reduces(fault):
    from fsdp_testing import current_world
    current_world().inject(fault)
    dist.destroy_process_group(dist.new_group([0, 1]))  # making it is no collective that a fault counts
    dist.all_reduce(torch.ones(1))

def test_of_a_function(worlds):
    worlds(size=2).run(reduces, "corrupt@rank=1,collective=1")

def test_not_reached_by_a_function(worlds):
    worlds(size=2).run(reduces, "corrupt@rank=1,collective=2")
"""

EXPECTED_TO_FAIL = """
@pytest.mark.world(2)
@pytest.mark.xfail(strict=True)
def test_misspelled(world):
    world.inject("crahs@rank=1,collective=1")

@pytest.mark.world(2)
@pytest.mark.xfail(strict=True)
def test_not_reached(world):
    world.inject("crash@rank=1,step=7")
    assert 0

@pytest.mark.world(2)
@pytest.mark.xfail(strict=True)
def test_known(world):
    assert 0
"""


def test_a_mark_for_an_expected_failure_does_not_hide_a_fault_that_was_not_injected(run: Runner) -> None:
    verdict = run(EXPECTED_TO_FAIL, "-rA")
    assert "XFAIL" in verdict.text
    assert (verdict.xfailed, *verdict.counts()) == (2, 0, 1, 1), verdict.text
    assert "fault: expected KIND@rank=R" in verdict.text
    assert "fault crash@rank=1,step=7: expected a place that is reached" in verdict.text


def test_what_a_test_injects_ends_with_it_and_has_to_be_reached(run: Runner) -> None:
    verdict = run(INJECTED, "--strict-hygiene", "-rA", then_next=True)
    assert (verdict.skipped, *verdict.counts()) == (1, 4, 2, 2), verdict.text
    assert "ERROR test_ranks.py::test_skips_before_it" in verdict.text
    assert "fault corrupt@rank=1,collective=2: expected a place that is reached" in verdict.text
    assert "fault crash@rank=1,step=7: expected a place that is reached, but the run ended before it" in verdict.text
    assert "rank 1 died by SIGKILL" in verdict.text
