"""Every way in which a rank can end is told in the verdict, and the next test passes on a new world."""

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
            r"rank 0 waits in all_reduce #1 float32\[4\]",
            r"assert \[1, 2\] == \[1, 3\]",
            r"At index 1 diff: 2 != 3",
            r"FAILED test_ranks.py::test_fate - rank 1: AssertionError: planted",
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
        [r"FAILED test_ranks.py::test_fate - rank 1 died by SIGKILL"],
    ),
    "SIGKILL while the others finish": (
        """
        if world.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        """,
        [r"FAILED test_ranks.py::test_fate - rank 1 died by SIGKILL"],
    ),
    "os._exit": (
        """
        if world.rank == 0:
            os._exit(3)
        """,
        [r"FAILED test_ranks.py::test_fate - rank 0 died with exit code 3"],
    ),
    "os._exit(0)": (
        """
        if world.rank == 1:
            os._exit(0)
        """,
        [r"FAILED test_ranks.py::test_fate - rank 1 died with exit code 0"],
    ),
    "segfault": (
        """
        if world.rank == 1:
            import ctypes
            ctypes.string_at(0)
        dist.barrier()
        """,
        [r"FAILED test_ranks.py::test_fate - rank 1 died by SIGSEGV", r"Fatal Python error: Segmentation fault"],
    ),
    "hang in a collective": (
        """
        if world.rank == 1:
            threading.Event().wait()
        dist.all_reduce(torch.ones(4))
        """,
        [r"hung after 3 s", r"rank 0 last issued all_reduce #1 float32\[4\]", r"in test_fate"],
    ),
    "hang in Python": (
        """
        while world.rank == 1:
            pass
        """,
        [r"rank 1 hung after 3 s", r"rank 1 issued no collective", r"test_ranks.py\", line \d+ in test_fate"],
    ),
    "hang while holding the GIL": (
        """
        if world.rank == 1:
            import ctypes
            ctypes.PyDLL(None).sleep(1000)
        """,
        [r"rank 1 hung after 3 s", r"test_ranks.py\", line \d+ in test_fate"],
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
        [r"rank 0 waits in all_reduce #2 float32\[8\]", r"rank 1 returned after #1"],
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
        [r"rank 1 skipped \(no device here\); rank 0 waits in all_reduce #1 float32\[4\]"],
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


@pytest.mark.parametrize("name", FATES)
def test_a_fate_is_told_and_the_next_test_passes(name: str, run: Runner) -> None:
    body, expected = FATES[name]
    verdict = run(f"@pytest.mark.world(2, timeout=3)\ndef test_fate(world):{body}", "-rA", then_next=True)
    assert verdict.counts() == (1, 1, 0), verdict.text
    for pattern in expected:
        assert re.search(pattern, verdict.text), f"{pattern} is missing in:\n{verdict.text}"
    assert "PASSED test_ranks.py::test_next" in verdict.text


# name: (body, what is told); the test passes with a warning, and fails under --strict-hygiene.
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


@pytest.mark.parametrize("name", LEAKS)
def test_a_leak_is_a_warning_and_the_next_test_passes(name: str, run: Runner) -> None:
    body, expected = LEAKS[name]
    verdict = run(f"@pytest.mark.world(2)\ndef test_fate(world):\n    {body}\n", then_next=True)
    assert verdict.counts() == (2, 0, 0), verdict.text
    assert verdict.warnings == 1, verdict.text
    assert re.search(r"WorldHygieneWarning: .*" + expected, verdict.text), verdict.text


@pytest.mark.parametrize("name", LEAKS)
def test_a_leak_is_a_failure_when_asked_for(name: str, run: Runner) -> None:
    body, expected = LEAKS[name]
    verdict = run(
        f"@pytest.mark.world(2)\ndef test_fate(world):\n    {body}\n", "--strict-hygiene", then_next=True
    )
    assert verdict.counts() == (1, 1, 0), verdict.text
    assert re.search(expected, verdict.text), verdict.text
    assert "the test left something behind (--strict-hygiene)" in verdict.text


def test_a_clean_test_is_silent_under_strict_hygiene(run: Runner) -> None:
    verdict = run("", "--strict-hygiene", then_next=True)
    assert (verdict.counts(), verdict.warnings) == ((1, 0, 0), 0), verdict.text


def test_what_leaked_does_not_outlive_the_session(run: Runner) -> None:
    verdict = run(
        """
@pytest.mark.world(2)
def test_fate(world):
    import subprocess
    child = subprocess.Popen(["setsid", "sleep", "986"])
    print("child", child.pid)
        """,
        "-rP",
    )
    pids = re.findall(r"child (\d+)", verdict.text)
    assert len(pids) == 2, verdict.text
    assert [pid for pid in pids if _runs_sleep(pid)] == []


def _runs_sleep(pid: str) -> bool:
    from pathlib import Path

    try:
        return b"986" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False
