"""`benchmarks/soak.py` itself: each kind of wrong end is told, and the same seed gives the same inputs."""

from __future__ import annotations

import json
import os
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import soak
import soak_damage
import soak_faults
import soak_hostile

from fsdp_testing.ranks.pool import WorldOutcome
from fsdp_testing.ranks.pool.cause import EndedBadly
from fsdp_testing.ranks.pool.outcome import Fate, RankOutcome

DOOR = soak_hostile.Door("a door", lambda at: [str(at)], "a.json", "{}", {})


def endless(_: Any) -> int:
    while True:
        pass


def raises(_: Any) -> int:
    raise KeyError("a")


def executes(_: Any) -> int:
    Path("MARK").mkdir()
    return 0


def says(code: int, text: str) -> Callable[[Any], int]:
    def end(_: Any) -> int:
        print(text, file=sys.stderr)
        return code

    return end


@pytest.mark.parametrize(
    ("end", "told"),
    [
        (raises, "KeyError at test_soak.py"),
        (endless, "no end within"),
        (executes, "executed"),
        (says(4, ""), "exit code 4"),
        (says(3, "Traceback (most recent call last):"), "a traceback"),
        (says(2, "fsdp-verify: expected one\nand two"), "2 lines"),
        (says(2, "fsdp-verify: expected " + "a " * 5000), "characters"),
        (says(2, "fsdp-verify: expected \x1b[2J"), "control characters"),
        (says(2, "fsdp-verify: no"), "no word of what was expected"),
        (says(2, "fsdp-verify: expected one, got two"), ""),
        (says(1, ""), ""),
    ],
)
def test_an_end_that_is_wrong_is_told(
    end: Callable[[Any], int], told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(soak_hostile, "main", end)
    monkeypatch.setattr(soak_hostile, "LIMIT_S", 0.3)
    complaint = soak_hostile.wrong(DOOR, b"{}", tmp_path / "place")
    assert complaint.startswith(told) if told.startswith("Key") else told in complaint
    assert bool(complaint) == bool(told)


def test_every_door_takes_its_sound_file_and_so_reads_it(tmp_path: Path) -> None:
    doors = soak_hostile.doors(tmp_path / "sound")
    assert {door.name: soak_hostile.refused(door, tmp_path / "place") for door in doors} == dict.fromkeys(
        (door.name for door in doors), ""
    )


def test_a_door_that_refuses_a_sound_file_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(soak_hostile, "main", says(2, "fsdp-verify: expected names of checks, got one"))
    assert soak_hostile.refused(DOOR, tmp_path / "place").startswith(
        "refuses a sound file: fsdp-verify: expected names"
    )


def outcome(culprit: int) -> WorldOutcome:
    ranks = tuple(RankOutcome(rank, Fate.RAISED if rank == culprit else Fate.STOPPED) for rank in (0, 1))
    return WorldOutcome("a test", 2, "gloo", ranks, EndedBadly((culprit,), ranks[culprit]))


def test_a_wrong_blame_and_a_wrong_pass_are_told() -> None:
    passed = WorldOutcome("a test", 2, "gloo", tuple(RankOutcome(rank, Fate.RETURNED) for rank in (0, 1)))
    assert list(soak_faults.complaints(outcome(1), "ends", 1)) == []
    assert "blames (1,)" in next(soak_faults.complaints(outcome(1), "ends", 0))
    assert list(soak_faults.complaints(passed, "hangs", 0)) == ["passed"]
    assert "leaked state on ranks []" in next(soak_faults.complaints(passed, "leaves", 0))
    assert "not told to disagree" in next(soak_faults.complaints(outcome(1), "disagrees", 1))


def test_shared_memory_that_a_process_holds_is_no_leak(tmp_path: Path) -> None:
    name = Path("/dev/shm") / f"soak-{tmp_path.name}-{os.getpid()}"
    with name.open("wb"):
        assert str(name) not in soak_faults.left_in_shared_memory()
    assert str(name) in soak_faults.left_in_shared_memory()
    name.unlink()
    assert str(name) not in soak_faults.left_in_shared_memory()


def test_an_error_of_the_controller_is_told_and_the_run_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(soak, "_settled", lambda _: soak_faults.held())
    monkeypatch.setattr(soak_faults, "orphans", lambda _: [])
    part, run = soak.Part(), soak.Soak(0, Path(), pool=None)  # type: ignore[arg-type]  # `lend` of None is the error
    run.faults(part, range(2))
    assert part.done == 2
    assert [text.partition("AttributeError at soak_faults.py")[1] for text in part.wrong] == [
        "AttributeError at soak_faults.py"
    ] * 2


def test_each_part_has_its_turn_however_short_the_time_is() -> None:
    class Quick:
        def __getattr__(self, _name: str) -> Callable[..., None]:
            return lambda part, numbers: part.take("one", numbers[-1], "")

    parts = {name: soak.Part() for name in soak.COUNTS}
    soak.run(Quick(), parts, soak.COUNTS, 1e-9, lambda: None)  # type: ignore[arg-type]  # its methods alone are asked for
    assert {name: part.done for name, part in parts.items()} == soak.AT_A_TIME


@pytest.mark.parametrize("form", ["json", "pickle"])
def test_the_same_seed_damages_alike_whatever_came_before(form: str) -> None:
    sound = json.dumps({"a": [1, {"b": "c"}], "d": {"e": None}})
    numbers = range(300)
    first = [soak_damage.hostile(random.Random(f"0 {number}"), sound, form) for number in numbers]
    again = [soak_damage.hostile(random.Random(f"0 {number}"), sound, form) for number in reversed(numbers)]
    assert first == again[::-1]
    assert len(set(first)) > 200
