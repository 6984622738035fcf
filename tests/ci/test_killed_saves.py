"""Killed saves (ci/killed_saves.py): a few moments lose nothing, and what would be a loss is seen."""

from __future__ import annotations

import inspect
import re
import shutil
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import killed_saves
import pytest
from killed_saves import Lost, Rank, Way

from fsdp_testing import run_ranks

pytestmark = pytest.mark.slow  # about a script that people start by hand, not about the packages

ROOT = Path(__file__).resolve().parents[2]


def test_a_few_moments_lose_nothing():
    done = subprocess.run(
        [sys.executable, "ci/killed_saves.py", "--moments", "3", "--way", "async"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "seed 0, 3 moments: no checkpoint was lost, none loaded with wrong numbers" in done.stdout
    what = re.search(r"loaded afterwards: (.*)", done.stdout)
    assert what is not None
    # Every killed save left one whole checkpoint: what was before it, or the new one.
    assert sum(int(part.split()[0]) for part in what[1].split(", ")) == 3


def saved_and_damaged(folder: str) -> list[str]:
    """Save two steps, damage the first in some ways, and return what loading says of each."""
    warnings.simplefilter("ignore")
    home, first = Path(folder), Path(folder, "step-1")
    model, optimizer = killed_saves.build()
    for step in (1, 2):
        killed_saves.fill(model, optimizer, float(step))
        killed_saves.save("async" if step == 1 else "dcp", home, step, model, optimizer)
    said = [str(killed_saves.load("dcp", home, model, optimizer))]
    for damage in (_mixed, _truncated):
        if killed_saves.dist.get_rank() == 0:
            damage(first)
        killed_saves.dist.barrier()
        try:
            killed_saves.load("dcp", home, model, optimizer)
        except Lost as error:
            said.append(str(error))
    return said


def _mixed(first: Path) -> None:
    shutil.copy(first.with_name("step-2") / "__1_0.distcp", first)


def _truncated(first: Path) -> None:
    file = first / "__0_0.distcp"
    file.write_bytes(file.read_bytes()[:2000])


def test_mixed_and_truncated_directories_are_seen(tmp_path: Path):
    whole, mixed, truncated = run_ranks(saved_and_damaged, str(tmp_path), size=2)[1]
    assert whole == "2"
    assert mixed.startswith("step-1 has numbers of several states, or of none: [")
    assert truncated.startswith("step-1 cannot be loaded: ")


@pytest.mark.parametrize(
    ("said", "message"),
    [(["loaded 3"], "expected step \\[4, 5\\], and step 3 was loaded"), (["lost it"], "lost it"), ([], "nothing")],
)
def test_an_older_step_or_an_error_is_a_loss(tmp_path: Path, said: list[str], message: str):
    way: Any = Way("dcp", tmp_path, newest=4, possible={4, 5})
    way.killed = True
    way._check([Rank(0, 0, ["loaded 5"])])
    way._check([Rank(0, 0, ["loaded 5"])])
    assert way.left == {"the new one": 1, "the one before": 1}
    with pytest.raises(Lost, match=message):
        way._check([Rank(0, 0, said)])


def test_the_page_shows_what_is_killed():
    page = (ROOT / "docs/state.md").read_text(encoding="utf-8")
    for function in (killed_saves.save_file, killed_saves.complete):
        assert inspect.getsource(function) in page
