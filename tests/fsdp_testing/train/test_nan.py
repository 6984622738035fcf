"""fsdp-verify train: a script that computes NaN, and why it does."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from fsdp_testing.cases.records import Verdict
from fsdp_testing.train.nan import ReadTooEarly, check_waits
from fsdp_testing.train.on_rank import RunSettings
from fsdp_testing.train.quantities import Kind, Quantity
from fsdp_testing.train.script import Launch, examine

SCRIPT = str(Path(__file__).parent / "with_early_reads.py")


def of(mistake: str):
    report = examine(Launch(SCRIPT, ("--mistake", mistake), steps=3, isolation="warm"), (3,))
    return report.judgements[-1]


def test_a_script_that_waits_passes():
    assert of("").verdict is Verdict.PASS


@pytest.mark.parametrize(
    ("mistake", "size", "cause"),
    [
        ("no wait", 1, "the result of an asynchronous collective is read before its wait"),
        ("no wait on ranks", 3, "the result of an asynchronous collective is read before its wait"),
    ],
)
def test_what_is_read_too_early_fails(mistake, size, cause):
    judgement = of(mistake)
    assert (judgement.verdict, judgement.size) == (Verdict.FAIL, size), judgement
    assert f"Cause: {cause}" in judgement.sentence


def test_memory_that_nobody_wrote_is_told_where_only_garbage_makes_nan():
    """What fresh memory holds without our garbage is chance: a run stands for it."""

    def world(value: float):
        return SimpleNamespace(size=1, ranks=[], quantities={Quantity(Kind.LOSS): [torch.tensor([value])]})

    def run(_size: int, settings: RunSettings):
        return world(torch.nan if settings.garbage else 1.0)

    with pytest.raises(ReadTooEarly, match="NaN, first in loss. Cause: uninitialised memory is read"):
        check_waits(SimpleNamespace(run=run), world(torch.nan))
    check_waits(SimpleNamespace(run=lambda *_: world(torch.nan)), world(torch.nan))  # NaN in any case


def test_a_script_that_diverges_is_unknown():
    judgement = of("diverges")
    assert judgement.verdict is Verdict.UNKNOWN, judgement
    assert "Check it with fewer steps" in judgement.sentence
