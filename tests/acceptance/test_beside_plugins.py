"""Other plugins of pytest, as they are installed: each does for tests on ranks what it does for any test."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Runner = Callable[..., Any]


def needs(module: str) -> pytest.MarkDecorator:
    name = module.replace("_", "-")
    missing = importlib.util.find_spec(module) is None
    return pytest.mark.skipif(missing, reason=f"{name} is not installed, and no test of ours but this one needs it")


SUMS = """
class TestGroup:
    @pytest.mark.world(2)
    @pytest.mark.parametrize("number", range(3))
    def test_in_a_class(self, world, number): ...

@pytest.mark.xdist_group("one")
@pytest.mark.world(3)
def test_in_a_group(world): ...

@pytest.mark.world(2)
def test_fails(world):
    assert world.rank == 0

def test_without_ranks(): ...
"""


# The scheduler of xdist alone knows its mode. Each push runs the one with a marker of its own here, `load` in test_outside.py,
# and this suite in `worksteal`.
@pytest.mark.parametrize(
    "mode",
    [
        "loadgroup",
        *(pytest.param(mode, marks=pytest.mark.slow) for mode in ("load", "loadscope", "loadfile", "worksteal")),
    ],
)
def test_xdist_in_every_mode(mode: str, run: Runner) -> None:
    verdict = run(SUMS, "-n", "2", "--dist", mode)
    assert verdict.counts() == (5, 1, 0), verdict.text
    assert "rank 1: AssertionError: assert 1 == 0" in verdict.text


PARENTS = """
@pytest.mark.world(2)
@pytest.mark.parametrize("number", range(4))
def test_notes_its_parents(world, number):
    server = os.getppid()
    above = open(f"/proc/{server}/stat").read().rpartition(")")[2].split()[1]
    with open("FOLDER/" + os.environ["PYTEST_XDIST_WORKER"], "w") as file:
        file.write(above)
"""


def test_workers_of_xdist_share_the_process_that_has_imported_torch(run: Runner, tmp_path: Path) -> None:
    folder = tmp_path / "parents"
    folder.mkdir()
    verdict = run(PARENTS.replace("FOLDER", str(folder)), "-n", "2")
    assert verdict.counts() == (4, 0, 0), verdict.text
    above = {path.name: path.read_text() for path in folder.iterdir()}
    assert sorted(above) == ["gw0", "gw1"]
    assert above["gw0"] == above["gw1"]


DROPS = """
@pytest.mark.world(2)
@pytest.mark.parametrize("number", range(4))
def test_worker_dies(world, number): ...

def test_ends_its_worker():
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_worker_of_xdist_that_dies_costs_its_test_alone(run: Runner) -> None:
    verdict = run(DROPS, "-n", "2", then_next=True)
    assert verdict.counts() == (5, 1, 0), verdict.text


HANGS = """
@pytest.mark.world(2)
def test_hangs(world):
    while world.rank == 1:
        pass
    dist.barrier()
"""


@needs("pytest_timeout")
@pytest.mark.parametrize("method", ["signal", "thread"])
def test_the_limit_of_pytest_timeout(method: str, run: Runner) -> None:
    verdict = run(HANGS, "--timeout", "3", "--timeout-method", method, then_next=True)
    assert verdict.counts() == (1, 1, 0), verdict.text
    assert re.search(r"ranks 0, 1 hung after 3 s \(rank 1 is behind", verdict.text), verdict.text


ORDER = """
import random
seen = pathlib.Path(__file__).with_name("order")

@pytest.mark.world(2)
@pytest.mark.parametrize("number", range(6))
def test_same(world, number):
    drawn = [None, None]
    dist.all_gather_object(drawn, random.random())
    assert drawn[0] == drawn[1]
    if world.rank == 0:
        with seen.open("a") as file:
            file.write(f"{number} {drawn[0]}\\n")
"""


@needs("pytest_randomly")
def test_pytest_randomly_shuffles_and_seeds_all_ranks_alike(run: Runner, tmp_path: Path) -> None:
    texts = []
    for seed in ("1", "1", "2"):
        verdict = run("import pathlib\n" + ORDER, "--randomly-seed", seed)
        assert verdict.counts() == (6, 0, 0), verdict.text
        texts.append((tmp_path / "order").read_text())
        (tmp_path / "order").unlink()
    assert texts[0] == texts[1] != texts[2]
    assert sorted(line[0] for line in texts[0].splitlines()) == list("012345")


FLAKY = """
@pytest.mark.flaky(reruns=2)
@pytest.mark.world(2)
def test_once(world):
    mine = pathlib.Path(__file__).with_name(f"attempt{world.rank}")
    first = not mine.exists()
    mine.write_text("")
    dist.barrier()
    if first and world.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()
"""


@needs("pytest_rerunfailures")
@pytest.mark.parametrize("workers", ["0", "2"])
def test_pytest_rerunfailures_has_a_test_run_again_whose_rank_died(workers: str, run: Runner) -> None:
    given = ("-n", workers) if workers != "0" else ()
    verdict = run("import pathlib\n" + FLAKY, *given, then_next=True)
    assert verdict.counts() == (2, 0, 0), verdict.text
    assert re.search(r"\b1 rerun\b", verdict.text), verdict.text


ASYNC = """
@pytest.fixture
async def number():
    return 2

@pytest.mark.asyncio
@pytest.mark.world(2)
async def test_awaits(world, number):
    total = torch.ones(1)
    await asyncio.sleep(0)
    dist.all_reduce(total)
    assert total.item() == number

@pytest.mark.asyncio
@pytest.mark.world(2)
async def test_fails(world):
    await asyncio.sleep(0)
    assert world.rank == 0

@pytest.mark.asyncio
async def test_without_ranks(number):
    assert number == 2
"""


def test_pytests_own_plugins_may_be_off(run: Runner) -> None:
    source = "@pytest.mark.world(2)\ndef test_ranks(world, tmp_path): assert tmp_path.exists()"
    verdict = run(source, *(word for name in ("capture", "tmpdir", "debugging") for word in ("-p", f"no:{name}")))
    assert verdict.counts() == (1, 0, 0), verdict.text


@needs("pytest_asyncio")
def test_pytest_asyncio_awaits_tests_and_fixtures_in_ranks(run: Runner) -> None:
    verdict = run("import asyncio\n" + ASYNC, "-o", "asyncio_mode=auto", then_next=True)
    assert verdict.counts() == (3, 1, 0), verdict.text
    assert "rank 1: AssertionError: assert 1 == 0" in verdict.text
