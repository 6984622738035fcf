"""fsdp-verify train: scripts of Accelerate, Transformers and Fabric run as they are; skipped where these are not installed."""

from __future__ import annotations

from pathlib import Path

import pytest

from fsdp_testing.cases.records import Verdict
from fsdp_testing.train.script import Launch, examine


@pytest.mark.parametrize(
    ("script", "package"),
    [
        ("accelerate", "accelerate"),
        ("trainer", "transformers"),
        ("fabric", "lightning.fabric"),
        ("lightning", "lightning.pytorch"),
    ],
)
def test_a_right_script_passes_and_a_scaled_rate_is_found(script, package, monkeypatch):
    pytest.importorskip(package, reason=f"{package} is not installed: its scripts are not tried")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    path = str(Path(__file__).parent / f"with_{script}.py")
    right = examine(Launch(path, steps=2, isolation="warm"), (2,))
    assert right.verdict is Verdict.PASS, str(right)
    wrong = examine(Launch(path, ("--scale-rate",), steps=2, isolation="warm"), (2,))
    assert wrong.verdict is Verdict.FAIL, str(wrong)
    assert "learning rate is multiplied by the number of ranks (2 times)" in str(wrong)
