"""Inside the ranks a test is an ordinary pytest test."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Runner = Callable[..., Any]

ORDINARY = """
calls = {"module": 0, "session": 0}
SILENT = __import__("logging").getLogger("silent")
SILENT.propagate = False

@pytest.fixture(scope="session")
def session_value(world):
    calls["session"] += 1
    return calls["session"] * 100 + world.rank

@pytest.fixture(scope="module")
def module_value(session_value):
    calls["module"] += 1
    torch.set_default_dtype(torch.float64)
    yield calls["module"]
    torch.set_default_dtype(torch.float32)

@pytest.fixture
def group_sum(world):
    total = torch.ones(()) * world.rank
    dist.all_reduce(total)
    yield int(total)
    dist.barrier()

@pytest.mark.world(2)
def test_fixtures_1(world, session_value, module_value, group_sum):
    assert (session_value, module_value, group_sum) == (100 + world.rank, 1, 1)
    assert torch.ones(1).dtype is torch.float64

@pytest.mark.world(2)
def test_fixtures_2(world, session_value, module_value):
    # What the module's fixture changed lasts as long as the module's fixtures do.
    assert torch.ones(1).dtype is torch.float64
    assert (session_value, module_value) == (100 + world.rank, 1)

@pytest.mark.world(2)
@pytest.mark.parametrize("shape", [(1,), (2, 3)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.int64])
def test_parametrize(world, shape, dtype):
    assert torch.zeros(shape, dtype=dtype).shape == shape

class TestClass:
    pytestmark = pytest.mark.world(2)

    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def _own(cls, world):
        cls.seen = world.rank

    def test_method(self, world):
        assert self.seen == world.rank

    @pytest.mark.world(3)
    def test_closest_marker_wins(self, world):
        assert world.size == 3

@pytest.mark.world(2)
def test_marker_alone_suffices():
    assert dist.get_world_size() == 2

@pytest.mark.world(2)
def test_monkeypatch(monkeypatch):
    monkeypatch.setenv("ONLY_HERE", "1")
    monkeypatch.setattr(torch.nn.functional, "relu", None)

@pytest.mark.world(2)
def test_tmp_path_is_shared(world, tmp_path):
    if world.rank == 0:
        (tmp_path / "note").write_text("from rank 0")
    world.barrier()
    assert (tmp_path / "note").read_text() == "from rank 0"
    assert world.all_gather_object(str(tmp_path)) == [str(tmp_path)] * 2

@pytest.mark.world(2)
def test_tmp_path_is_new_each_time(tmp_path, tmp_path_factory, world):
    world.barrier()
    assert list(tmp_path.iterdir()) == []
    assert world.all_gather_object(str(tmp_path_factory.mktemp("data")))[0].endswith("data0")

@pytest.mark.world(2)
def test_capsys(world, capsys):
    print("rank", world.rank)
    assert capsys.readouterr().out == f"rank {world.rank}\\n"

@pytest.mark.world(2)
def test_capfd(world, capfd):
    os.write(1, b"raw")
    assert capfd.readouterr().out == "raw"

@pytest.mark.world(2)
def test_caplog(caplog):
    import logging
    from _pytest.logging import catching_logs
    logging.getLogger("mine").warning("careful")
    assert "careful" in caplog.text
    # pytest captures loggers that do not propagate since 9.1: each record once, at the level asked for.
    SILENT.info("never shown")
    with caplog.at_level(logging.INFO, "silent"):
        SILENT.info("quiet")
    assert caplog.text.count("quiet") == hasattr(catching_logs, "attached_loggers")
    assert "never shown" not in caplog.text

@pytest.mark.world(2)
def test_raises():
    with pytest.raises(ValueError, match="no"):
        raise ValueError("no")

@pytest.mark.world(2)
@pytest.mark.skipif(True, reason="not today")
def test_skipped_by_mark():
    assert False

@pytest.mark.world(2)
def test_skipped_by_call():
    pytest.skip("every rank agrees")

@pytest.mark.world(2)
@pytest.mark.xfail(reason="known", raises=AssertionError)
def test_xfail():
    assert False

@pytest.mark.world(2)
@pytest.mark.xfail(reason="on one rank")
def test_xfail_that_fails_on_one_rank(world):
    assert world.rank == 0

@pytest.mark.world(2)
def test_same_seed(world):
    import random
    drawn = world.all_gather_object((random.random(), float(torch.rand(()))))
    assert drawn[0] == drawn[1]

@pytest.mark.world(1)
def test_one_rank(world):
    assert (world.rank, world.size) == (0, 1)

@pytest.mark.world(1024, backend="fake", rank=7)
def test_fake(world):
    assert (world.rank, world.size, dist.get_rank(), dist.get_world_size()) == (7, 1024, 7, 1024)

@pytest.mark.world(2, isolation="fresh")
def test_fresh(world, session_value):
    assert calls["session"] == 1

@pytest.mark.world()
def test_default_size(world):
    assert world.size == 2
"""


def test_every_ordinary_feature_works_in_ranks(run: Runner) -> None:
    verdict = run(ORDINARY, "-ra", "-W", "error", "--strict-hygiene")
    assert (verdict.passed, verdict.failed, verdict.errors) == (21, 0, 0), verdict.text
    assert (verdict.skipped, verdict.xfailed) == (2, 2), verdict.text
    assert "test_skipped_by_mark - not today" in verdict.text or "not today" in verdict.text
    assert "on one rank (failed on rank 1, passed on rank 0)" in verdict.text
    assert verdict.warnings == 0, verdict.text


def test_a_strict_mark_holds_if_the_test_fails_on_any_rank(run: Runner) -> None:
    verdict = run(
        """
pytestmark = [pytest.mark.world(2), pytest.mark.xfail(strict=True, reason="known")]
def test_fails_on_one(world): assert world.rank == 0
def test_fails_on_all(world): assert world.rank == 5
def test_passes(world): pass

import unittest
@unittest.expectedFailure
class TestExpected(unittest.TestCase):
    def test_one(self): assert dist.get_rank() == 0
    def test_none(self): pass
""",
        "-ra",
    )
    assert (verdict.xfailed, verdict.failed, verdict.errors) == (3, 2, 0), verdict.text
    assert "TestExpected::test_one - failed on rank 1, passed on rank 0" in verdict.text
    assert "FAILED test_ranks.py::TestExpected::test_none - [XPASS(strict)] Unexp" in verdict.text
    assert "(failed on rank 1, passed on rank 0)" in verdict.text
    assert "FAILED test_ranks.py::test_passes - [XPASS(strict)] known" in verdict.text


def test_the_same_file_passes_with_new_processes_for_every_test(run: Runner) -> None:
    verdict = run(ORDINARY, "--isolation", "fresh", "-W", "error", "-k", "not fixtures_")
    assert (verdict.passed, verdict.failed, verdict.errors) == (19, 0, 0), verdict.text


def test_sizes_become_test_ids_and_the_command_line_fills_what_the_marker_leaves_open(run: Runner) -> None:
    verdict = run(
        """
@pytest.mark.world()
def test_open(world):
    assert world.size in (1, 3)

@pytest.mark.world(2)
def test_closed(world):
    assert world.size == 2

@pytest.mark.parametrize("flag", [True, False])
@pytest.mark.world([2, 3])
def test_sizes(world, flag):
    assert world.size in (2, 3)
""",
        "-v", "--world-size", "1,3", "--rank-timeout", "20",
    )  # fmt: skip
    assert verdict.counts() == (7, 0, 0), verdict.text
    assert len(re.findall(r"test_sizes\[(?:True-|False-)?world=[23](?:-True|-False)?\] PASSED", verdict.text)) == 4
    assert "test_open[world=1] PASSED" in verdict.text
    assert "test_open[world=3] PASSED" in verdict.text


TROUBLE = """
@pytest.mark.world(2)
def test_says(world):
    print("python", world.rank)
    os.system(f"echo from a child of {world.rank} >&2")
    assert world.rank == 5

@pytest.fixture
def broken(world):
    if world.rank == 1:
        raise OSError("no disk")

@pytest.fixture
def untidy(world):
    yield
    assert world.rank == 0, "left a mess"

@pytest.mark.world(2)
def test_setup(broken):
    pass

@pytest.mark.world(2)
def test_teardown(untidy):
    pass
"""


def test_output_of_ranks_is_captured_and_failed_fixtures_are_reported_by_rank(run: Runner) -> None:
    verdict = run(TROUBLE, then_next=True)
    assert verdict.counts() == (2, 1, 2), verdict.text
    assert "Captured stdout (rank 1)" in verdict.text
    assert "Captured stderr (rank 0)" in verdict.text
    assert "from a child of 1" in verdict.text
    assert "ERROR test_ranks.py::test_setup - rank 1: OSError: no disk" in verdict.text
    assert "ERROR test_ranks.py::test_teardown - rank 1: AssertionError: left a mess" in verdict.text


def test_output_of_ranks_is_shown_live_under_s(run: Runner) -> None:
    live = run(TROUBLE, "-s", "-k", "says")
    assert "[rank 0] python 0" in live.text
    assert "[rank 1] from a child of 1" in live.text


PLAIN = """
@pytest.fixture(scope="module")
def here(pytestconfig):
    yield
    with open(pytestconfig.rootpath / "log", "a") as stream:
        stream.write("module of the controller ended\\n")

def test_plain(here): pass

@pytest.mark.world(2)
def test_last_of_its_module(): pass
"""


def test_fixtures_of_modules_and_session_end_in_the_ranks(tmp_path: Path, run: Runner) -> None:
    conftest = """
import pytest
@pytest.fixture(scope="session")
def whole(world, pytestconfig):
    yield
    with open(pytestconfig.rootpath / f"log{world.rank}", "a") as stream:
        stream.write("session ended\\n")

@pytest.fixture(scope="module")
def part(world, pytestconfig, request):
    yield
    with open(pytestconfig.rootpath / f"log{world.rank}", "a") as stream:
        stream.write(request.node.name + " ended\\n")
"""
    test = "import pytest\npytestmark = pytest.mark.world(2)\ndef test_a(whole, part): pass\ndef test_b(part): pass\n"
    (tmp_path / "conftest.py").write_text(conftest)
    (tmp_path / "test_first.py").write_text(test)
    (tmp_path / "test_second.py").write_text(test)
    verdict = run(PLAIN)
    assert verdict.counts() == (6, 0, 0), verdict.text
    assert (tmp_path / "log").read_text() == "module of the controller ended\n"
    for rank in (0, 1):
        assert (tmp_path / f"log{rank}").read_text().splitlines() == [
            "test_first.py ended",
            "test_second.py ended",
            "session ended",
        ]


@pytest.mark.parametrize("scope", ["module", "session"])
def test_ranks_that_part_while_a_lasting_fixture_ends_are_reported(run: Runner, scope: str) -> None:
    """It ends after its last test with ranks, when every rank has returned from everything that a test asked of it."""
    verdict = run(
        f"""
@pytest.fixture(scope="{scope}")
def reduced(world):
    yield
    if world.rank == 0:
        reduced.pending = dist.all_reduce(torch.ones(2), async_op=True)

@pytest.mark.world(2)
def test_ranks(reduced): pass

def test_plain(): pass
"""
    )
    assert verdict.counts() == (2, 0, 1), verdict.text
    assert "different numbers of collectives on the default group (rank 0: 1, rank 1: 0)" in verdict.text


def test_a_module_fixture_ends_before_another_world_takes_over(tmp_path: Path, run: Runner) -> None:
    verdict = run(
        """
log = os.path.join(os.path.dirname(__file__), "log")

@pytest.fixture(scope="class")
def held(world):
    yield
    if world.rank == 0:
        open(log, "a").write(f"ended on {world.size}\\n")

class TestTwo:
    @pytest.mark.world(2)
    def test_two(self, held):
        pass

@pytest.mark.world(3)
def test_three(world):
    assert open(log).read() == "ended on 2\\n"
"""
    )
    assert verdict.counts() == (2, 0, 0), verdict.text
    assert (tmp_path / "log").read_text() == "ended on 2\n"


def test_errors_at_the_end_of_longer_lived_fixtures_are_told(run: Runner) -> None:
    verdict = run(
        """
@pytest.fixture(scope="module")
def breaks(world):
    yield
    assert world.rank == 0, "module left open"

@pytest.fixture(scope="session")
def wide(world):
    yield
    assert world.rank == 1, "session left open"

@pytest.mark.world(2)
def test_uses(breaks, wide):
    pass

@pytest.mark.world(3)
def test_other(world):
    pass
"""
    )
    assert verdict.counts() == (2, 0, 1), verdict.text
    assert "module left open" in verdict.text
    assert "session left open" in verdict.text


def test_session_fixtures_end_also_when_their_world_is_replaced(tmp_path: Path, run: Runner) -> None:
    verdict = run(
        """
@pytest.fixture(scope="session")
def held(world, pytestconfig):
    yield
    with open(pytestconfig.rootpath / f"log{world.rank}", "a") as stream:
        stream.write("ended\\n")

@pytest.mark.world(2)
def test_bad(held):
    assert False

@pytest.mark.world(2)
def test_good(held):
    pass
"""
    )
    assert verdict.counts() == (1, 1, 0), verdict.text
    for rank in (0, 1):
        assert (tmp_path / f"log{rank}").read_text().splitlines() == ["ended"] * 2


def test_each_directory_named_on_the_command_line_has_its_own_conftest_in_ranks(tmp_path: Path, run: Runner) -> None:
    """Two folders, a fixture of the same name in each, and a first conftest that asks for a plugin, as pytest allows."""
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "conftest.py").write_text(
            f"import pytest\n@pytest.fixture(params=['{folder}'])\ndef where(request): return request.param\n"
        )
        (tmp_path / folder / f"test_{folder}.py").write_text(
            "import pytest\n@pytest.mark.world(2)\n"
            f"def test_it(world, where, pytester): assert (world.size, where) == (2, '{folder}')\n"
        )
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    (tmp_path / "one" / "conftest.py").write_text(
        "pytest_plugins = ['pytester']\n" + (tmp_path / "one" / "conftest.py").read_text()
    )
    seen = run("", "one/test_one.py", "two/test_two.py")
    assert seen.counts() == (2, 0, 0), seen.text


STEERS = r"""
HOSTILE = "\x1b[2J\x1b[1A\x1b]0;title\x07\x1b[31mred\x1b[0m"

@pytest.mark.world(2)
def test_it(world):
    import warnings
    warnings.warn("warned " + HOSTILE)
    print("printed " + HOSTILE)
    raise ValueError("raised " + HOSTILE)
"""


@pytest.mark.parametrize("options", [(), ("-s",)], ids=["captured", "-s"])
def test_what_a_rank_says_cannot_steer_the_terminal(run: Runner, options: tuple[str, ...]) -> None:
    verdict = run(STEERS, *options)
    assert verdict.failed == 1
    for said in ("printed", "raised", "warned"):
        assert f"{said} \\x1b[2J\\x1b[1A\\x1b]0;title\\x07" in verdict.text, verdict.text
    assert not {"\x1b[2J", "\x1b[1A", "\x07"} & set(re.findall("\x1b\\[[0-9]*[A-Z]|\x07", verdict.text))
    assert "printed \\x1b[2J\\x1b[1A\\x1b]0;title\\x07\x1b[31mred" in verdict.text, "colours stay"


MANY = """
import ctypes, gc, sys
COUNTS = []
C = ctypes.CDLL(None)
SIZES = "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"

class MallInfo(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in SIZES]

def taken_by_malloc():
    # Python's own blocks are not among it, but for large ones; what C keeps is.
    C.mallinfo2.restype = MallInfo
    taken = C.mallinfo2()
    return taken.uordblks + taken.hblkhd

def counts():
    gc.collect()
    return len(gc.get_objects()), sys.getallocatedblocks(), taken_by_malloc() if hasattr(C, "mallinfo2") else 0

# No collectives: torch keeps a record of the last 2,000 in each process, which takes 2.6 MB until it is full.
@pytest.mark.world(2)
@pytest.mark.parametrize("i", range(401))
def test_it(world, i, record_property, request):
    assert os.environ["PYTEST_CURRENT_TEST"] == request.node.nodeid + " (call)"
    if i in (100, 400):
        COUNTS.append(counts())
    if i == 400:
        objects, blocks, bytes = (now - before for before, now in zip(*COUNTS))
        assert objects < 0.1 * 300, COUNTS
        assert blocks < 0.5 * 300, COUNTS
        assert bytes < 50 * 300, COUNTS
"""


def test_hundreds_of_tests_leave_nothing_in_ranks(run: Runner) -> None:
    """Of each test its item stays, as in any session, and nothing of its run: neither in Python nor in C's environment."""
    verdict = run(MANY)
    assert verdict.counts() == (401, 0, 0), verdict.text
