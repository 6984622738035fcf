"""Every examination gives an answer here, names a planted fault, and no fault of one hides the others."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from typing import Any

import pytest

from fsdp_testing.cli import examinations
from fsdp_testing.cli.examinations import Condition, Symptom
from fsdp_testing.errors import PoolBroken, WorldFailed
from fsdp_testing.ranks.pool import Pool
from fsdp_testing.ranks.pool.forkserver import COMMAND


def test_it_answers_every_question(verify: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(examinations, "_leftovers", lambda: iter(()))
    ended = verify("doctor")
    assert ended.code == 0, ended.out
    for examination in examinations.EXAMINATIONS:
        assert f"{examination.__name__.replace('_', ' ')}: " in ended.out


def test_a_broken_part_is_exit_code_1_and_the_rest_is_still_examined(
    verify: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def loopback() -> Symptom:
        raise OSError("no network")

    monkeypatch.setattr(examinations, "EXAMINATIONS", (loopback, examinations.python))
    ended = verify("doctor")
    assert ended.code == 1
    assert "broken  loopback: OSError: no network" in ended.out
    assert "python: Python 3" in ended.out
    assert "1 broken" in ended.out


@pytest.mark.parametrize(
    ("trial", "code", "said"),
    [
        (examinations.good("they ran"), 0, "odd     loopback: no network; ranks work anyway\n"),
        (examinations.odd("slowly"), 0, "odd     loopback: no network; ranks work anyway\n"),
        (examinations.broken("they did not run"), 1, "broken  loopback: no network\n"),
    ],
)
def test_nothing_is_broken_where_ranks_work(
    verify: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, trial: Symptom, code: int, said: str
) -> None:
    def loopback() -> Symptom:
        return examinations.broken("no network", "Fix it.")

    def trial_world() -> Symptom:
        return trial

    monkeypatch.setattr(examinations, "trial_world", trial_world)
    monkeypatch.setattr(examinations, "EXAMINATIONS", (loopback, trial_world))
    ended = verify("doctor")
    assert ended.code == code
    assert said in ended.out


# A fork server that does not notice the end of its controller: stopped in a system call, say.
LEFTOVER = """
import os, subprocess, sys
code = f"import sys; sys.stdin.read(); exit()\\n{sys.argv[1]}(3, 4, {os.getpid()})"
null = subprocess.DEVNULL
print(subprocess.Popen([sys.executable, "-c", code], stdout=null, stderr=null).pid)
"""
# The same below a process that adopts orphans, as container runtimes, systemd and test runners do.
SUBREAPER = """
import ctypes, subprocess, sys
ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER
found = subprocess.run([sys.executable, "-c", sys.argv[1], sys.argv[2]], stdin=sys.stdin, stdout=subprocess.PIPE).stdout
print(found.decode().strip(), flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("adopted", ["as it comes", "by a subreaper"])
def test_a_rank_that_lost_its_controller_is_found(adopted: str) -> None:
    """The controller ends at once and leaves its fork server to process 1, or to the subreaper that is nearest."""
    programs = [LEFTOVER, COMMAND] if adopted == "as it comes" else [SUBREAPER, LEFTOVER, COMMAND]
    reader, writer = os.pipe()
    try:
        with subprocess.Popen([sys.executable, "-c", *programs], stdin=reader, stdout=subprocess.PIPE) as started:
            assert started.stdout is not None
            orphan = int(started.stdout.readline())
            if adopted == "as it comes":
                started.wait(60)
            symptom = examinations.leftover_ranks()
            os.close(writer)  # ends the orphan and the subreaper, which read until now
            writer = -1
        assert symptom.condition is Condition.BROKEN
        assert str(orphan) in symptom.account
        assert str(orphan) in symptom.remedy
    finally:
        os.close(reader)
        if writer >= 0:
            os.close(writer)


def test_processes_that_have_their_controller_are_no_leftovers() -> None:
    pool = Pool()
    try:
        world = pool.world(2)
        found = dict(examinations._leftovers())
        assert not {*world.pids, pool.server().pid} & set(found)
        world.release()
    finally:
        pool.close()


def test_processes_of_others_are_no_leftovers() -> None:
    """Adopted by nobody, and merely named after the package: an editor, a test run that outlives its shell."""
    code = "import subprocess, sys; print(subprocess.Popen([sys.executable, '-c', sys.argv[1]]).pid)"
    reader, writer = os.pipe()
    try:
        bystander = "import sys; sys.stdin.read()  # tests/fsdp_testing"
        command = [sys.executable, "-c", code, bystander]
        with subprocess.Popen(command, stdin=reader, stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            number = int(process.stdout.readline())
            assert number not in dict(examinations._leftovers())
            os.close(writer)
            writer = -1
    finally:
        os.close(reader)
        if writer >= 0:
            os.close(writer)


def test_shared_memory_that_nothing_of_ours_needs_is_odd_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.access", lambda *_: False)
    symptom = examinations.shared_memory()
    assert symptom.condition is Condition.ODD
    assert "NCCL" in symptom.account


def test_a_system_without_forks_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("os.memfd_create")
    symptom = examinations.python()
    assert symptom.condition is Condition.BROKEN
    assert "os.memfd_create" in symptom.account


def test_an_unknown_host_name_is_odd(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "no-such-host.invalid")
    symptom = examinations.host_name()
    assert symptom.condition is Condition.ODD
    assert "GLOO_SOCKET_IFNAME" in symptom.remedy


@pytest.mark.parametrize(
    ("version", "condition"),
    [
        ("2.10.0", Condition.BROKEN),
        ("2.11.0", Condition.GOOD),
        ("2.15.1+cu130", Condition.GOOD),
        ("2.16.0", Condition.BROKEN),
    ],
)
def test_torch_versions(monkeypatch: pytest.MonkeyPatch, version: str, condition: Condition) -> None:
    monkeypatch.setattr("torch.__version__", version)
    assert examinations.torch().condition is condition


def test_variables_that_change_ranks_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    symptom = examinations.environment()
    assert symptom.condition is Condition.ODD
    assert "GLOO_SOCKET_IFNAME=eth7" in symptom.account


def test_half_a_torchrun_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "5")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(examinations, "EXAMINATIONS", (examinations.environment,))
    ((_, symptom),) = examinations.examine()
    assert symptom.condition is Condition.BROKEN
    assert "0 <= RANK < WORLD_SIZE" in symptom.account


def test_a_trial_world_that_fails_or_is_wrong_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(examinations, "EXAMINATIONS", (examinations.trial_world,))

    def lost(*args: object, **options: object) -> list[float]:
        raise WorldFailed("rank 1 died by SIGKILL\n  more")

    monkeypatch.setattr("fsdp_testing.ranks.run.run_ranks", lost)
    ((_, symptom),) = examinations.examine()
    assert symptom.condition is Condition.BROKEN
    assert symptom.account == "WorldFailed: rank 1 died by SIGKILL"
    monkeypatch.setattr("fsdp_testing.ranks.run.run_ranks", lambda *args, **options: [3.0, 2.0])
    assert examinations.trial_world().condition is Condition.BROKEN


def test_a_slow_trial_world_is_odd(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fsdp_testing.ranks.run.run_ranks", lambda *args, **options: [3.0, 3.0])
    assert examinations.trial_world().condition is Condition.GOOD
    monkeypatch.setattr(examinations, "SLOW_SECONDS", -1.0)
    assert examinations.trial_world().condition is Condition.ODD


def test_few_files_and_little_memory_are_odd(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("resource.getrlimit", lambda which: (256, 4096))
    assert "ulimit -n 4096" in examinations.limits().remedy
    monkeypatch.setattr(examinations, "MEMORY_BYTES_PER_RANK", 1 << 60)
    assert examinations.memory().condition is Condition.ODD
    monkeypatch.setattr(examinations, "SHARED_MEMORY_BYTES", 1 << 60)
    assert examinations.shared_memory().condition is Condition.ODD
    assert examinations.temporary_files().condition is Condition.ODD


def test_a_directory_for_temporary_files_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setenv("TMPDIR", "/absent")
    found = examinations.temporary_files()
    assert found.condition is Condition.ODD
    assert found.account.startswith("TMPDIR=/absent cannot be written to, /")


def test_without_temporary_files_no_rank_is_started_and_no_adapter_blamed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks could be made, and torch would then fail in each of them, somewhere in an adapter's call."""

    def none_usable() -> str:
        raise FileNotFoundError(2, "No usable temporary directory found in ['/absent']")

    monkeypatch.setattr(tempfile, "gettempdir", none_usable)
    pool = Pool()
    pool.start()
    with pytest.raises(
        PoolBroken,
        match="writable directory for temporary files, got No usable temporary .*Make room there, or set TMPDIR",
    ):
        pool.world(1)
    assert pool._server is None
