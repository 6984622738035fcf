"""What is no phase of a test on ranks: its subtests, marks that come late, the end of the session in a rank."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Runner = Callable[..., Any]


@pytest.mark.skipif(pytest.version_tuple < (9,), reason="the fixture subtests is part of pytest since 9.0")
def test_a_subtest_that_is_skipped_is_reported_beside_its_test(run: Runner) -> None:
    done = run(
        """
@pytest.mark.world(2)
def test_alike(world, subtests):
    with subtests.test("a", rank=world.rank):
        pytest.skip("not here")

@pytest.mark.world(2)
def test_alone(world, subtests):
    if world.rank == 1:
        pytest.skip("alone")
    with subtests.test("a"):
        pytest.skip("not here")
""",
        "-qrA",  # without -q or -v pytest shows no skipped subtest
    )
    assert "PASSED test_ranks.py::test_alike" in done.text
    assert "SUBSKIPPED[a]" in done.text
    assert "ranks disagree: rank 0 passed, its subtest a skipped; rank 1 skipped (alone)" in done.text
    assert (done.counts(), done.skipped, done.code) == ((1, 1, 0), 1, 1)


@pytest.mark.parametrize("when", ["trylast=True", "wrapper=True"])
def test_a_mark_that_comes_after_collection_fails_the_test(run: Runner, tmp_path: Path, when: str) -> None:
    body = "    yield\n" if "wrapper" in when else ""
    (tmp_path / "conftest.py").write_text(
        f"""
import pytest

@pytest.hookimpl({when})
def pytest_collection_modifyitems(items):
{body}    items[0].add_marker(pytest.mark.world(2))
"""
    )
    done = run("def test_anything():\n    pass\n")
    assert "marker world: expected it when pytest_collection_modifyitems of this plugin runs, got it later" in done.text
    assert done.counts() == (0, 0, 1)


@pytest.mark.parametrize("place", ["pytest_sessionfinish", "fixture"])
def test_a_death_at_the_end_of_a_session_fails_the_session(run: Runner, tmp_path: Path, place: str) -> None:
    (tmp_path / "conftest.py").write_text(
        f"""
import os
import pytest
import torch.distributed as dist

def die():
    if dist.is_initialized() and dist.get_rank() == 1:
        os._exit(3)

def pytest_sessionfinish():
    if {place!r} == "pytest_sessionfinish":
        die()

@pytest.fixture(scope="session", autouse={place == "fixture"})
def lasting():
    yield
    die()
"""
    )
    done = run("@pytest.mark.world(2)\ndef test_anything():\n    pass\n\ndef test_here():\n    pass\n")
    assert "rank 1 died with exit code 3" in done.text
    assert (done.errors, done.code) == (1, 1)


@pytest.mark.parametrize(
    "body",
    ["@pytest.mark.world(2)\ndef test_anything():\n    pass\n", "def test_w(worlds):\n    worlds().run('os:getpid')\n"],
)
def test_the_end_of_a_session_that_fails_in_a_rank_fails_the_session(run: Runner, tmp_path: Path, body: str) -> None:
    (tmp_path / "conftest.py").write_text(
        """
import torch.distributed as dist

def pytest_sessionfinish():
    if dist.is_initialized() and dist.get_rank() == 1:
        raise RuntimeError("left half done")
"""
    )
    done = run(body)
    assert "the end of the session in rank 1: pytest_sessionfinish: RuntimeError: left half done" in done.text
    assert (done.counts(), done.code) == ((1, 0, 1), 1)


@pytest.mark.parametrize(("words", "errors"), [((), 0), (("--strict-hygiene",), 1), (("-W", "error"), 1)])
def test_what_a_late_fixture_leaves_is_a_warning_like_any_other(
    run: Runner, words: tuple[str, ...], errors: int
) -> None:
    done = run(
        """
@pytest.fixture(scope="module")
def lasting(world):
    os.environ["LEFT"] = "1"

@pytest.mark.world(2)
def test_leaves(lasting):
    pass

def test_here():
    pass
""",
        *words,
    )
    assert "environment: LEFT='1' was added (by a fixture of test_ranks.py)" in done.text
    assert done.counts() == (2, 0, errors)
    assert done.warnings == (0 if errors else 1)


def test_a_rank_that_worlds_loses_is_no_expected_failure(run: Runner) -> None:
    done = run(
        """
@pytest.mark.xfail(reason="known")
def test_lost(worlds):
    worlds().run("os:abort")

@pytest.mark.xfail(reason="known")
def test_raised(worlds):
    worlds().run("os:listdir", "/nowhere")

def test_asked_for(worlds):
    with pytest.raises(AssertionError, match="^ranks 0, 1 died by SIGABRT") as caught:
        worlds().run("os:abort")
    assert [rank.signal_name for rank in caught.value.outcome.ranks] == ["SIGABRT"] * 2
"""
    )
    assert "ranks 0, 1 died by SIGABRT" in done.text
    assert (done.counts(), done.xfailed) == ((1, 1, 0), 1)


def test_a_rank_that_ends_the_session_as_failed_does_so(run: Runner) -> None:
    done = run(
        """
@pytest.mark.world(2)
def test_ends(world, request):
    if world.rank == 1:
        request.session.shouldfail = "all is lost"

@pytest.mark.world(2)
def test_after():
    pass
"""
    )
    assert "rank 1: all is lost" in done.text
    assert (done.counts(), done.code) == ((1, 0, 0), 1)


def test_a_fixture_that_ends_late_since_another_test_came_than_was_announced_may_fail(
    run: Runner, tmp_path: Path
) -> None:
    (tmp_path / "conftest.py").write_text(
        """
def pytest_runtestloop(session):
    first, announced, other = session.items
    for item, nextitem in ((first, announced), (other, None)):
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=nextitem)
    return True
"""
    )
    (tmp_path / "test_zoo.py").write_text("import pytest\n\n@pytest.mark.world(2)\ndef test_other():\n    pass\n")
    done = run(
        """
@pytest.fixture(scope="module")
def lasting(world):
    yield
    assert world.rank == 0, "left half done"

@pytest.mark.world(2)
def test_first(lasting):
    pass

@pytest.mark.world(2)
def test_announced(lasting):
    pass
"""
    )
    assert "left half done" in done.text
    assert (done.passed, done.code) == (1, 1)


def test_a_test_marked_to_fail_may_leave_other_ranks_waiting(run: Runner) -> None:
    done = run(
        """
@pytest.mark.world(2)
@pytest.mark.xfail(raises=ValueError, reason="issue 7", strict=True)
def test_known(world):
    if world.rank == 1:
        raise ValueError("known")
    dist.barrier()

@pytest.mark.world(2)
@pytest.mark.xfail(raises=ValueError, reason="issue 7")
def test_another(world):
    if world.rank == 1:
        raise KeyError("new")
    dist.barrier()

@pytest.mark.world(2)
@pytest.mark.xfail(reason="issue 7")
def test_lost(world):
    if world.rank == 1:
        raise ValueError("known")
    os.abort()

@pytest.mark.world(2)
def test_after(world):
    dist.barrier()
""",
        "-rx",
    )
    assert (done.counts(), done.xfailed) == ((1, 2, 0), 1), done.text
    assert "issue 7 (failed on rank 1, awaited by rank 0)" in done.text


def test_a_fixture_that_ends_badly_in_ranks_is_named_with_its_test(run: Runner) -> None:
    done = run(
        """
@pytest.fixture(scope="module")
def server(world):
    yield
    if world.rank == 1:
        raise ExceptionGroup("not ended", [RuntimeError("the server did not stop"), OSError("its port is open")])

@pytest.mark.world(3)
def test_served(server):
    pass

@pytest.mark.world(2)
def test_other(world):
    pass

def test_here():
    pass
"""
    )
    assert done.counts() == (3, 0, 1), done.text
    assert "ERROR at teardown of test_here" in done.text  # as in one process: the last test of the fixture's module
    assert "(fixtures of 3 ranks, used last by test_ranks.py::test_served)" in done.text
    assert all(text in done.text for text in ("RuntimeError: the server did not stop", "OSError: its port is open"))


def test_what_a_test_leaves_in_the_world_is_named_and_gone(run: Runner) -> None:
    done = run(
        """
from datetime import timedelta
from torch.distributed import distributed_c10d

@pytest.mark.world(2)
@pytest.mark.parametrize("first", [True, False])
def test_key(world, first):
    store = distributed_c10d._get_default_store()
    assert not store.check(["ready"])
    dist.barrier()
    if first and world.rank == 0:
        store.set("ready", "1")
    dist.barrier()

@pytest.mark.world(2)
@pytest.mark.parametrize("first", [True, False])
def test_timeout(world, first):
    timeout = world.group._get_backend(torch.device("cpu")).options._timeout
    assert timeout < timedelta(days=3)
    if first:
        distributed_c10d._set_pg_timeout(timedelta(days=3), world.group)
"""
    )
    assert done.counts() == (4, 0, 0), done.text
    assert "key 'ready' is in the default store" in done.text
    assert "left timeout of the default group: 0:30:00 -> 3 days, 0:00:00 (put back)" in done.text


def test_a_process_that_ended_and_a_number_in_place_of_a_tensor(run: Runner) -> None:
    done = run(
        """
import multiprocessing
from fsdp_testing.errors import InvalidArgument

@pytest.mark.world(2)
def test_spawned(world):
    child = multiprocessing.get_context("spawn").Process(target=print)
    child.start()
    child.join()

@pytest.mark.world(2)
def test_number(world):
    with pytest.raises(InvalidArgument, match="expected a tensor, got int"):
        world.assert_equal_across_ranks(3)
""",
        "--strict-hygiene",
    )
    assert done.counts() == (2, 0, 0), done.text
