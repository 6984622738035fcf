"""Trainings under settings that a device reads once, each in a process of its own: late or not, and torch's own sanitizer."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.gpu
PROGRAM = Path(__file__).with_name("bits_of_a_training.py")
BACKENDS = {"cuda": "gloo-cuda"}


def digests(device: str, **settings: str) -> list[str]:
    """Digests of the two ranks."""
    command = [sys.executable, str(PROGRAM), BACKENDS.get(device, device)]
    done = subprocess.run(
        command, env={**os.environ, **settings}, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    ranks = done.stdout.split()
    assert len(ranks) == 2
    return ranks


def test_a_device_that_is_late_gives_the_bits_of_one_that_is_not(pytestconfig: pytest.Config) -> None:
    device = pytestconfig.option.device
    if device == "cuda":
        at_once, late = {"CUDA_LAUNCH_BLOCKING": "1"}, [{"CUDA_LAUNCH_BLOCKING": "0"}]
    else:
        at_once, late = {"SIM_LATE": "none"}, [{"SIM_LATE": streams} for streams in ("all", "default", "others")]
    want = digests(device, **at_once)
    assert [digests(device, **settings) for settings in late] == [want] * len(late)


def test_the_sanitizer_of_torch_sees_no_race(pytestconfig: pytest.Config) -> None:
    """It raises where a kernel uses memory that nothing orders after its last use."""
    if pytestconfig.option.device != "cuda":
        pytest.skip("needs CUDA: torch's sanitizer knows no other device")
    digests("cuda", TORCH_CUDA_SANITIZER="1")
