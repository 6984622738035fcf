"""Outside, every tool sees one test with one result: selection, junit, durations, xdist, coverage, debuggers."""

from __future__ import annotations

import os
import pty
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import pytest

Runner = Callable[..., Any]

THREE = """
@pytest.mark.world(2)
def test_good(world, record_property):
    record_property("shape", 3)
    record_property("own", world.rank)

@pytest.mark.world(2)
def test_bad(world):
    assert world.rank == 0

@pytest.mark.world(2)
def test_late(world):
    threading.Event().wait(0.2)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the sessions over those three are."""
    made = tmp_path_factory.mktemp("three")
    (made / "conftest.py").write_text(
        "import sys\ndef pytest_terminal_summary(terminalreporter):\n"
        "    terminalreporter.line(f'torch in the controller: {\"torch\" in sys.modules}')\n"
    )
    (made / "test_ranks.py").write_text("import threading\nimport pytest\n" + THREE)
    return made


@pytest.fixture(scope="module")
def first(folder: Path, run_folder: Runner) -> Any:
    """One session with all that writes down what happened; in a new process, as the next one, which reads it."""
    words = ("-p", "cacheprovider", "--durations=0", "-vv", "--durations-min=0")
    return run_folder(folder, *words, "--junitxml=out.xml", "-o", "junit_family=xunit2")


def test_each_test_counts_once(first: Any) -> None:
    assert first.counts() == (2, 1, 0), first.text


def test_torch_is_left_to_the_ranks_by_tests_that_do_not_import_it(first: Any) -> None:
    assert "torch in the controller: False" in first.text


def test_selection_and_stopping(run: Runner) -> None:
    verdict = run(THREE, "-k", "bad or late", "-x")
    assert verdict.counts() == (0, 1, 0), verdict.text
    assert "1 deselected" in verdict.text
    assert "stopping after 1 failures" in verdict.text


def test_sizes_are_words_for_selection(tmp_path: Path, run_folder: Runner) -> None:
    marked = "import pytest\n@pytest.mark.world({})\ndef test_{}(world): ...\n"
    (tmp_path / "test_sizes.py").write_text(marked.format("[2, 3]", "listed") + marked.format(3, "single"))
    verdict = run_folder(tmp_path, "--collect-only", "-q", "-k", "world3")
    assert "test_listed[world=3]" in verdict.text
    assert "test_single" in verdict.text
    assert "2/3 tests collected (1 deselected)" in verdict.text


def test_a_plan_of_fixtures_runs_no_rank_and_is_no_pass(run: Runner) -> None:
    for option in ("--setup-plan", "--setup-only"):
        session = run(THREE, option)
        assert session.counts() == (0, 0, 0), session.text
        assert "::test_good (not run; on 2 ranks, fixtures there: record_property, request, world)" in session.text


def test_only_what_failed_last_and_how_to_debug_it(first: Any, folder: Path, run_folder: Runner) -> None:
    again = run_folder(folder, "-p", "cacheprovider", "--lf", "--pdb")
    assert again.counts() == (0, 1, 0), again.text
    assert "test_bad" in again.text
    assert "Run it again with --rank-pdb 1 to debug rank 1." in again.text


def test_the_time_until_a_rank_is_given_up_is_that_of_the_call(run: Runner) -> None:
    verdict = run(
        """
@pytest.mark.world(2, timeout=2)
def test_hangs(world):
    if world.rank:
        threading.Event().wait()
""",
        "--durations=1",
    )
    slowest = re.search(r"([\d.]+)s call +test_ranks.py::test_hangs", verdict.text)
    assert slowest is not None and float(slowest[1]) >= 2, verdict.text


def test_durations_are_those_of_the_slowest_rank(first: Any) -> None:
    late = re.search(r"([\d.]+)s call +test_ranks.py::test_late", first.text)
    assert late is not None, first.text
    assert float(late[1]) >= 0.2
    assert len(re.findall(r"s (?:setup|call|teardown) +test_ranks.py::test_good", first.text)) == 3


def test_junit_has_one_case_with_properties_and_every_ranks_account(first: Any, folder: Path) -> None:
    cases = {case.attrib["name"]: case for case in ET.parse(folder / "out.xml").getroot().iter("testcase")}
    assert set(cases) == {"test_good", "test_bad", "test_late"}
    properties = {(p.attrib["name"], p.attrib["value"]) for p in cases["test_good"].iter("property")}
    assert properties == {("shape", "3"), ("own[rank 0]", "0"), ("own[rank 1]", "1")}
    failure = cases["test_bad"].find("failure")
    assert failure is not None
    assert failure.attrib["message"].startswith("rank 1: AssertionError: assert 1 == 0")
    assert "rank 0 passed" in (failure.text or "")


DIES = """
@pytest.mark.world(2)
def test_dies(world):
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_the_same_under_xdist_where_a_dead_rank_fails_its_test_alone(run: Runner) -> None:
    verdict = run(THREE + DIES + THREE.replace("def test_", "def test_more_"), "-n", "2", then_next=True)
    assert verdict.counts() == (5, 3, 0), verdict.text
    assert "rank 1: AssertionError: assert 1 == 0" in verdict.text
    assert "where 1 = World(rank=1, size=2" in verdict.text
    assert "died by SIGKILL" in verdict.text


TAKES_OVER = """
import pytest

class Other:
    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item, nextitem):
        from _pytest.runner import runtestprotocol
        runtestprotocol(item, nextitem=nextitem)
        return True

def pytest_collection_finish(session):
    manager = session.config.pluginmanager
    if manager.has_plugin("fsdp_testing.protocol"):  # in the controlling process alone, and after that plugin
        manager.register(Other())
"""


def test_a_plugin_that_takes_over_the_protocol_cannot_make_a_test_pass(run: Runner, tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(TAKES_OVER)
    verdict = run("@pytest.mark.world(2)\ndef test_it(): pass")
    assert verdict.counts() == (0, 0, 1), verdict.text
    assert "got another plugin that runs it in the controlling process" in verdict.text


def test_coverage_sees_code_that_only_ranks_run(run: Runner, tmp_path: Path) -> None:
    (tmp_path / "mylib.py").write_text(
        "def only_in_ranks(n):\n    total = 0\n    for i in range(n):\n        total += i\n    return total\n"
    )
    source = """
import mylib
@pytest.mark.world(2)
def test_covered(world):
    assert mylib.only_in_ranks(4) == 6
"""
    for extra in ((), ("-n", "2")):
        verdict = run(source, "--cov=mylib", "--cov-branch", "--cov-report=term-missing", *extra)
        assert verdict.counts() == (1, 0, 0), verdict.text
        assert re.search(r"mylib.py +\d+ +0 +\d+ +0 +100%", verdict.text), verdict.text


ENDED = """
import mylib

@pytest.mark.world(2)
def test_before(world):
    mylib.before()

@pytest.mark.world(2)
def test_killed(world):
    if world.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)

@pytest.mark.world(2)
def test_exits(world):
    if world.rank == 1:
        mylib.exits()

@pytest.mark.world(2)
def test_crashes(world):
    with world.inject("crash@rank=1,collective=1"):
        if world.rank == 1:
            mylib.crashes()
"""


def test_coverage_of_ranks_that_end_early_is_kept_up_to_their_end(run: Runner, tmp_path: Path) -> None:
    names = ("before", "exits", "crashes")
    ends = {"before": "pass", "exits": "os._exit(3)", "crashes": "dist.barrier()"}
    (tmp_path / "mylib.py").write_text(
        "import os\nimport torch.distributed as dist\n\n"
        + "".join(f"def {name}():\n    here = 1\n    {ends[name]}\n" for name in names)
    )
    verdict = run(ENDED, "--cov=mylib", "--cov-report=term-missing")
    assert verdict.counts() == (1, 3, 0), verdict.text
    assert re.search(r"mylib.py +11 +0 +100%", verdict.text), verdict.text


def test_breakpoint_in_a_rank_says_how_to_debug_it(run: Runner) -> None:
    verdict = run("@pytest.mark.world(2)\ndef test_stops(world):\n    breakpoint()\n")
    assert verdict.counts() == (0, 1, 0), verdict.text
    assert "Run this one test with --rank-pdb 0 to debug this rank." in verdict.text


def test_rank_pdb_without_a_terminal_is_a_usage_error(run: Runner) -> None:
    verdict = run(THREE, "--rank-pdb", "1")
    assert verdict.code == pytest.ExitCode.USAGE_ERROR
    assert "--rank-pdb: expected a terminal for the debugged rank, got none" in verdict.text


def test_rank_pdb_gives_one_rank_the_terminal(tmp_path: Path) -> None:
    (tmp_path / "test_ranks.py").write_text(
        "import pytest\n"
        "@pytest.mark.world(2, timeout=1)\n"
        "def test_bad(world):\n"
        "    secret = 40 + world.rank\n"
        "    assert secret == 0\n"
    )
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--rank-pdb", "1"],
        cwd=tmp_path,
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
    )
    os.close(theirs)
    shown = _read_until(ours, b"(rank 1 pdb) ")
    os.write(ours, b"p secret + 1\n")
    shown += _read_until(ours, b"(rank 1 pdb) ")
    os.write(ours, b"q\n")
    shown += _read_until(ours, None)
    process.wait(240)
    os.close(ours)
    text = shown.decode("utf-8", "replace").replace("\r", "")
    assert "\n42\n" in text, text
    assert "1 failed" in text, text


def _read_until(descriptor: int, mark: bytes | None) -> bytes:
    seen = b""
    while mark is None or mark not in seen:
        try:
            data = os.read(descriptor, 65536)
        except OSError:
            break
        if not data:
            break
        seen += data
    return seen


WAITING = """
import pathlib

@pytest.mark.world(2)
def test_waits(world):
    here = pathlib.Path(__file__).parent
    (here / f"pid{world.rank}").write_text(str(os.getpid()))
    threading.Event().wait()
"""


@pytest.mark.parametrize("ending", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_nothing_is_left_when_pytest_is_ended(tmp_path: Path, ending: signal.Signals) -> None:
    (tmp_path / "test_ranks.py").write_text("import os, threading, pytest\n" + WAITING)
    process = subprocess.Popen(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider"], cwd=tmp_path, stdout=subprocess.PIPE
    )
    pids = [_wait_for(tmp_path / f"pid{rank}") for rank in (0, 1)]
    server = int(Path(f"/proc/{pids[0]}/stat").read_text().rpartition(")")[2].split()[1])
    shared = _shared_files([process.pid, server, *pids])
    process.send_signal(ending)
    process.communicate(timeout=240)
    assert _gone([*pids, server]), "ranks or their fork server outlived pytest"
    assert [path for path in shared if path.exists()] == []


def _shared_files(pids: list[int]) -> set[Path]:
    """Files in shared memory that these processes have open or mapped; other programs' files are not ours to judge."""
    names: set[str] = set()
    for pid in pids:
        names.update(re.findall(r"/dev/shm/\S+", Path(f"/proc/{pid}/maps").read_text()))
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            target = str(entry.readlink()) if entry.is_symlink() else ""
            names.update([target] if target.startswith("/dev/shm/") else [])
    return {Path(name) for name in names}


def _wait_for(path: Path) -> int:
    waiting = threading.Event()
    limit = time.monotonic() + 240
    while time.monotonic() < limit:
        if path.exists() and path.read_text():
            return int(path.read_text())
        waiting.wait(0.01)
    raise AssertionError(f"{path} was not written")


def _gone(pids: list[int]) -> bool:
    waiting = threading.Event()
    limit = time.monotonic() + 60
    while time.monotonic() < limit:
        if not any(Path(f"/proc/{pid}").exists() for pid in pids):
            return True
        waiting.wait(0.01)
    return False


def test_ordinary_tests_after_tests_on_ranks_find_nothing_set_up(run_folder: Runner, tmp_path: Path) -> None:
    """A folder that an ordinary test set up is left when a test on ranks was the last one in it."""
    marked = "import pytest\n\n@pytest.mark.world(2)\ndef test_on_ranks(world): pass\n"
    mixed = f"def test_here(): pass\n\nclass TestGroup:\n    def test_here(self): pass\n\n{marked}"
    sources = {"one/test_mixed.py": mixed, "one/test_ranks.py": marked, "two/test_plain.py": "def test_here(): pass\n"}
    for name, source in sources.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(source)
    verdict = run_folder(tmp_path)
    assert verdict.counts() == (5, 0, 0), verdict.text


ENDED_FROM_OUTSIDE = """
os.environ.setdefault("CONTROLLER", str(os.getpid()))

def limit(*_):
    pytest.fail("the time limit of another plugin")

signal.signal(signal.SIGUSR2, limit)

def stop_the_controller(world, name):
    torch.distributed.barrier()  # else the controller may be stopped before rank 0 is here
    if world.rank == 1:
        os.kill(int(os.environ["CONTROLLER"]), name)
    threading.Event().wait()

@pytest.mark.world(2)
def test_with_a_limit(world):
    stop_the_controller(world, signal.SIGUSR2)

@pytest.mark.world(2)
def test_interrupted(world):
    stop_the_controller(world, signal.SIGINT)
"""


def test_another_plugins_time_limit_and_an_interrupt_say_where_each_rank_waits(run: Runner) -> None:
    verdict = run(ENDED_FROM_OUTSIDE)
    assert verdict.code == pytest.ExitCode.INTERRUPTED
    assert "the time limit of another plugin" in verdict.text
    assert verdict.text.count("::test_interrupted: 2 of 2 ranks were running") == 1, "told once"
    for test in ("test_with_a_limit", "test_interrupted"):
        account = verdict.text.partition(f"::{test}: 2 of 2 ranks were running\n")[2]
        for part in ("rank 0 was stopped", "in stop_the_controller", "rank 1 was stopped", "in stop_the_controller"):
            assert part in account, verdict.text
            account = account.partition(part)[2]


def test_reruns_that_nobody_makes_are_warned_of(tmp_path: Path, run_folder: Runner) -> None:
    """A stand-in registers under the name of pytest-rerunfailures, with its option."""
    plugin = "def pytest_addoption(parser): parser.addoption('--reruns', type=int)\n"
    plugin += "def pytest_configure(config):\n    config.pluginmanager.register(object(), 'rerunfailures')\n"
    (tmp_path / "conftest.py").write_text(plugin)
    (tmp_path / "test_one.py").write_text("import pytest\n@pytest.mark.world(2)\ndef test_one(): ...\n")
    warned = run_folder(tmp_path, "--collect-only", "--reruns", "2").text
    assert warned.count("is not run again when it fails on ranks: this release does") == 1, warned
    assert "is not run again" not in run_folder(tmp_path, "--collect-only").text


STAND_INS = """
import pytest
from fsdp_testing.ranks.pool.world import inside_rank

class Rerunfailures:
    def get_reruns_count(self, item): return 0 if item.get_closest_marker("timeout") else item.config.option.reruns
    def get_reruns_delay(self, item): return 0

class Timeout:
    @pytest.hookspec(firstresult=True)
    def pytest_timeout_set_timer(self, item, settings): ...
    @pytest.hookspec(firstresult=True)
    def pytest_timeout_cancel_timer(self, item): ...

class Settings:
    timeout = 4.0

def pytest_addoption(parser, pluginmanager):
    parser.addoption("--reruns", type=int)
    pluginmanager.add_hookspecs(Timeout)

def pytest_configure(config):
    config.pluginmanager.register(Rerunfailures(), "rerunfailures")

@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    if item.get_closest_marker("timeout") and not inside_rank():
        assert item.ihook.pytest_timeout_set_timer(item=item, settings=Settings()) is True
        result = yield
        assert item.ihook.pytest_timeout_cancel_timer(item=item) is True
        return result
    return (yield)

def pytest_report_teststatus(report):
    return ("rerun", "R", "RERUN") if report.outcome == "rerun" else None
"""
ASKED = """
import os, pathlib, pytest, torch
import torch.distributed as dist

@pytest.mark.timeout(4)
@pytest.mark.world(2)
def test_hangs(world):
    while world.rank == 1:
        pass
    dist.all_reduce(torch.ones(4))

@pytest.fixture(scope="module")
def attempt(world):
    mine = pathlib.Path(__file__).with_name(f"attempts{world.rank}")
    with mine.open("a") as stream:
        stream.write(f"{os.getpid()}\\n")
    return len(set(mine.read_text().split()))

@pytest.mark.world(2)
def test_fails_once(world, attempt):
    dist.barrier()
    assert attempt > 1 or world.rank == 0

@pytest.mark.world(2)
def test_fails():
    assert False

@pytest.mark.world(2)
def test_passes(): ...
"""


def test_limits_of_pytest_timeout_end_ranks_and_reruns_get_new_ones(tmp_path: Path, run_folder: Runner) -> None:
    """Stand-ins with the hooks and functions of both plugins, in the place of pytest-timeout: what they ask of a test is done."""
    (tmp_path / "conftest.py").write_text(STAND_INS)
    (tmp_path / "test_asked.py").write_text(ASKED)
    found = run_folder(tmp_path, "-p", "no:timeout", "--reruns", "1", "-v").text
    assert "ranks 0, 1 hung after 4 s" in found and "stack of rank 1" in found, found
    for name, words in {"hangs": "F", "fails_once": "RP", "fails": "RF", "passes": "P"}.items():
        told = re.findall(rf"::test_{name} (RERUN|PASSED|FAILED)", found)
        assert "".join(word[0] for word in told) == words, found
    # Two attempts of two ranks each, in processes of their own.
    assert len({*(tmp_path / "attempts0").read_text().split(), *(tmp_path / "attempts1").read_text().split()}) == 4
