"""The environment is read and put back exactly."""

from __future__ import annotations

import os
import subprocess

import pytest

from fsdp_testing.base import env
from fsdp_testing.errors import InvalidArgument

TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in TORCHRUN:
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


def test_without_torchrun_there_is_no_launch(bare: pytest.MonkeyPatch) -> None:
    assert env.torchrun() is None
    bare.setenv("RANK", "0")
    assert env.torchrun() is None


def test_a_launch_is_read(bare: pytest.MonkeyPatch) -> None:
    for name, value in zip(TORCHRUN, ("3", "4", "1", "2", "10.0.0.1", "29400"), strict=True):
        bare.setenv(name, value)
    assert env.torchrun() == env.Launch(3, 4, 1, 2, "10.0.0.1", 29400)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"RANK": "4", "WORLD_SIZE": "4", "MASTER_PORT": "1"}, "0 <= RANK < WORLD_SIZE"),
        ({"RANK": "-1", "WORLD_SIZE": "4", "MASTER_PORT": "1"}, "0 <= RANK < WORLD_SIZE"),
        ({"RANK": "zero", "WORLD_SIZE": "4", "MASTER_PORT": "1"}, "integer in RANK, got 'zero'"),
        ({"RANK": "0", "WORLD_SIZE": "4"}, "integer in MASTER_PORT, got None"),
        ({"RANK": "0", "WORLD_SIZE": "4", "MASTER_PORT": "99999999"}, "at most 65535 in MASTER_PORT, got 99999999"),
    ],
)
def test_a_damaged_launch_is_refused(bare: pytest.MonkeyPatch, values: dict[str, str], said: str) -> None:
    for name, value in values.items():
        bare.setenv(name, value)
    with pytest.raises(InvalidArgument, match=said):
        env.torchrun()


def test_restore_names_and_undoes_every_change(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEPT", "1")
    monkeypatch.setenv("CHANGED", "old")
    monkeypatch.setenv("REMOVED", "here")
    monkeypatch.delenv("ADDED", raising=False)
    saved = env.snapshot()
    env.update({"CHANGED": "new", "REMOVED": None, "ADDED": "x"})
    env.restore(saved)
    assert env.snapshot() == saved


def test_temporary_puts_back_its_own_variables_also_after_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINE", "before")
    monkeypatch.delenv("NEW", raising=False)
    monkeypatch.delenv("OTHER", raising=False)

    def change_and_fail() -> None:
        with env.temporary({"MINE": "during", "NEW": "1"}):
            assert (env.get("MINE"), env.get("NEW")) == ("during", "1")
            env.update({"OTHER": "set inside"})
            raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        change_and_fail()
    assert (env.get("MINE"), env.get("NEW"), env.get("OTHER")) == ("before", None, "set inside")
    env.update({"OTHER": None})


@pytest.mark.parametrize(
    ("values", "found"),
    [
        (
            {"SLURM_PROCID": "3", "SLURM_STEP_NUM_TASKS": "4", "SLURM_LOCALID": "1", "SLURM_NODEID": "1"},
            env.Launch(3, 4, 1, 4, "host-a", 1234, "srun", node="1"),
        ),
        # The batch script itself is one process.
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "4"}, None),
        ({"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"}, None),
        (
            {
                "OMPI_COMM_WORLD_RANK": "1",
                "OMPI_COMM_WORLD_SIZE": "2",
                "OMPI_COMM_WORLD_LOCAL_RANK": "0",
                "OMPI_COMM_WORLD_LOCAL_SIZE": "1",
            },
            env.Launch(1, 2, 0, 1, "host-a", 1234, "mpirun"),
        ),
        ({"PMI_RANK": "1", "PMI_SIZE": "2"}, env.Launch(1, 2, 1, 2, "host-a", 1234, "mpiexec")),
        (
            {"RANK": "1", "WORLD_SIZE": "2", "GROUP_RANK": "1", "TORCHELASTIC_USE_AGENT_STORE": "True"},
            env.Launch(1, 2, 1, 2, "host-a", 1234, store_is_there=True, node="1"),
        ),
    ],
)
def test_every_launcher_is_read_and_forgotten(
    bare: pytest.MonkeyPatch, values: dict[str, str], found: env.Launch | None
) -> None:
    for name, value in {"MASTER_ADDR": "host-a", "MASTER_PORT": "1234", **values}.items():
        bare.setenv(name, value)
    assert env.launched() == found
    saved = env.snapshot()
    env.forget_launch()
    try:
        assert env.launched() is None
        assert not {"MASTER_ADDR", "MASTER_PORT", "RANK", "GROUP_RANK"} & set(env.snapshot())
    finally:
        env.restore(saved)


def test_a_launcher_that_does_not_say_where_to_meet_is_refused(bare: pytest.MonkeyPatch) -> None:
    for name, value in {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "4"}.items():
        bare.setenv(name, value)
    with pytest.raises(InvalidArgument, match="srun: expected MASTER_ADDR and MASTER_PORT"):
        env.launched()


def test_a_variable_that_is_set_in_place_is_seen_in_python_in_c_and_in_child_processes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MINE", "before")
    for value in ("first, the longest", "second", "", "w\u00e4hrend", "x" * 5000, "last"):
        env.set_in_place("MINE", value)
        show = subprocess.run(["/bin/sh", "-c", 'printf %s "$MINE"'], check=True, capture_output=True)
        assert (env.get("MINE"), env.snapshot()["MINE"], os.fsdecode(show.stdout)) == (value, value, value)
    env.set_in_place("MINE", None)
    show = subprocess.run(["/bin/sh", "-c", 'printf %s "${MINE-none}"'], check=True, capture_output=True)
    assert (env.get("MINE"), show.stdout) == (None, b"none")
