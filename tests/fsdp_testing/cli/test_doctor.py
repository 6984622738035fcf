"""Every examination gives an answer here, names a planted fault, and no fault of one hides the others."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fsdp_testing.cli import examinations
from fsdp_testing.cli.examinations import Condition, Symptom
from fsdp_testing.errors import WorldFailed


def test_it_answers_every_question(verify: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(examinations, "_orphans", lambda: iter(()))
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


def test_a_rank_that_lost_its_controller_is_found() -> None:
    """A child that ends at once leaves a grandchild behind, which process 1 (or a subreaper) adopts."""
    orphan_code = "import sys; sys.stdin.read()  # fsdp_testing rank"
    code = (
        "import subprocess, sys; null = subprocess.DEVNULL; "
        f"print(subprocess.Popen([sys.executable, '-c', {orphan_code!r}], stdout=null, stderr=null).pid)"
    )
    reader, writer = os.pipe()
    try:
        done = subprocess.run(
            [sys.executable, "-c", code], stdin=reader, capture_output=True, text=True, check=True, timeout=60
        )
        orphan = int(done.stdout)
        parent = int(Path(f"/proc/{orphan}/stat").read_text(encoding="ascii").rpartition(")")[2].split()[1])
        if parent != 1:
            pytest.skip("orphans are adopted by a subreaper here")
        symptom = examinations.leftover_ranks()
        assert symptom.condition is Condition.BROKEN
        assert str(orphan) in symptom.said
        assert str(orphan) in symptom.remedy
    finally:
        os.close(reader)
        os.close(writer)  # ends the orphan, which reads until now


def test_processes_of_others_are_no_leftovers() -> None:
    code = "import sys; print('up', flush=True); sys.stdin.read()  # fsdp_testing rank with a living parent"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert process.pid not in dict(examinations._orphans())
        process.communicate()


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
    assert "GLOO_SOCKET_IFNAME=eth7" in symptom.said


def test_half_a_torchrun_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "5")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(examinations, "EXAMINATIONS", (examinations.environment,))
    (symptom,) = examinations.examine()
    assert symptom.condition is Condition.BROKEN
    assert "0 <= RANK < WORLD_SIZE" in symptom.said


def test_a_trial_world_that_fails_or_is_wrong_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(examinations, "EXAMINATIONS", (examinations.trial_world,))

    def lost(*args: object, **options: object) -> list[float]:
        raise WorldFailed("rank 1 died by SIGKILL\n  more")

    monkeypatch.setattr("fsdp_testing.run.run_ranks", lost)
    (symptom,) = examinations.examine()
    assert symptom.condition is Condition.BROKEN
    assert symptom.said == "WorldFailed: rank 1 died by SIGKILL"
    monkeypatch.setattr("fsdp_testing.run.run_ranks", lambda *args, **options: [3.0, 2.0])
    assert examinations.trial_world().condition is Condition.BROKEN


def test_a_slow_trial_world_is_odd(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fsdp_testing.run.run_ranks", lambda *args, **options: [3.0, 3.0])
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
