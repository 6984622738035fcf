"""What importing the reference loads, by name, since times differ by machine."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import fsdp_ref

IMPORTING = """
import sys, torch
before = set(sys.modules)
import fsdp_ref
print(*sorted(set(sys.modules) - before))
for name in fsdp_ref.__all__:
    getattr(fsdp_ref, name)
slow = ("_functional_collectives", "tensor", "fsdp", "checkpoint", "optim")
print(*sorted({f"torch.distributed.{name}" for name in slow} & (set(sys.modules) - before)))
"""


def test_the_package_loads_nothing_and_a_name_loads_no_slow_part_of_torch() -> None:
    done = subprocess.run(
        [sys.executable, "-c", IMPORTING], cwd=Path(__file__).parents[2], capture_output=True, text=True, check=True
    )
    first, slow = done.stdout.splitlines()
    assert first.split() == ["fsdp_ref"]
    assert slow == ""


def test_each_public_name_is_there_and_no_other() -> None:
    assert set(fsdp_ref.__all__) <= set(dir(fsdp_ref))
    assert [name for name in fsdp_ref.__all__ if not hasattr(fsdp_ref, name)] == []
    with pytest.raises(AttributeError, match="module 'fsdp_ref' has no attribute 'fully_shart'"):
        fsdp_ref.fully_shart  # noqa: B018
