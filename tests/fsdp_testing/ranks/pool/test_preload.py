"""What a rank had to import later ones have, made by nobody who is waited for, and only if that is harmless."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from fsdp_testing.ranks.pool import Pool, preload, server


@pytest.fixture(autouse=True)
def _one_module_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "WORTH_A_SUCCESSOR", 1)


def imported(*names: str) -> list[bool]:
    return [name in sys.modules for name in names]


def imports(*names: str) -> None:
    for name in names:
        __import__(name)


def collects(*names: str) -> list[bool]:
    """Whether the collector was on while each module was imported, and whether it is now."""
    return [*(sys.modules[name].COLLECTS for name in names), gc.isenabled()]


def run(pool: Pool, function: object, *args: object, isolation: str = "fresh") -> list[object]:
    world = pool.world(1, isolation=isolation)
    outcome = world.execute(function, args)  # type: ignore[arg-type]  # one of the functions above
    world.release()
    assert outcome.ok, outcome.describe()
    return outcome.values


def test_only_what_torch_pulls_in_is_imported_ahead_in_small_steps() -> None:
    code_under_test = ["my_project.model", "conftest", "tests.test_x", "fsdp_ref.api", "torchvision", "__main__"]
    assert preload.to_import_ahead(code_under_test) == []
    assert preload.to_import_ahead(["my_project", "antigravity", "torch.testing._internal.common"]) == []
    assert preload.to_import_ahead(["_pytest.pytester", "_pytest.pytester_assertions"]) == []
    reported = ["torch.fx", "torch.fx.node", "xml.dom", "numpy.linalg"]
    assert preload.to_import_ahead(reported) == ["numpy.linalg", "xml.dom", "torch.fx.node", "torch.fx"]


@pytest.fixture
def stubs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Modules with names that may be imported ahead."""
    folder = tmp_path / "stubs"
    folder.mkdir()
    monkeypatch.syspath_prepend(str(folder))
    (folder / "einops.py").write_text(
        "import os, time\nlimit = time.monotonic() + 60\n"
        f"while not os.path.exists({str(folder / 'may_end')!r}) and time.monotonic() < limit:\n    time.sleep(0.01)\n"
    )
    (folder / "optree.py").write_text(
        "import threading, time\nthreading.Thread(target=time.sleep, args=(600,), daemon=True).start()\n"
    )
    (folder / "markupsafe.py").write_text("raise RuntimeError('does not import')\n")
    (folder / "triton.py").write_text("")
    return folder


def test_what_a_rank_had_to_import_the_next_one_has() -> None:
    pool = Pool()
    run(pool, imports, "xml.dom.minidom")
    assert pool.server().wait_for_successor(60)
    assert run(pool, imported, "xml.dom.minidom") == [[True]]
    run(pool, imports, "wave")
    pool.server().wait_for_successor(60)
    assert run(pool, imported, "xml.dom.minidom", "wave") == [[True, True]], "a successor has one of its own"
    pool.close()


@pytest.mark.usefixtures("stubs")
def test_what_is_expected_the_first_rank_has_but_for_what_starts_threads() -> None:
    pool = Pool()
    pool.expect("triton")
    assert run(pool, imported, "triton") == [[True]]
    pool.expect("triton", "wave")
    assert run(pool, imported, "triton", "wave") == [[True, True]], "also of a server that runs"
    pool.expect("optree")
    assert run(pool, imported, "wave", "optree") == [[True, False]]
    pool.close()
    assert run(pool, imported, "triton", "wave") == [[True, True]], "a pool that starts anew still expects them"
    pool.close()


def test_imports_look_for_no_garbage_and_ranks_do(stubs: Path) -> None:
    for name in ("first", "second"):
        (stubs / f"imported_{name}.py").write_text("import gc\nCOLLECTS = gc.isenabled()\n")
    pool = Pool(preload_modules=("imported_first",))
    pool.expect("imported_second")
    assert run(pool, collects, "imported_first", "imported_second") == [[False, False, True]]
    pool.close()


def test_a_command_that_ends_does_not_look_through_what_stays() -> None:
    ends = "import atexit, gc; from fsdp_testing.cli.main import main; main(); atexit._run_exitfuncs()"
    command = [sys.executable, "-c", f"{ends}; print(gc.get_freeze_count() > 1000)", "--version"]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout.endswith("\nTrue\n")


def test_a_process_of_the_user_that_ends_writes_the_last_buffers_of_its_files(tmp_path: Path) -> None:
    program = (
        "import sys; from fsdp_testing.ranks.pool import default_pool; default_pool()\n"
        "class Log:\n"
        "    def __init__(self, path):\n"
        "        self.me, self.file = self, open(path, 'w')\n"
        "log = Log(sys.argv[1]); log.file.write('the last line')"
    )
    subprocess.run([sys.executable, "-c", program, str(tmp_path / "log")], check=True)
    assert (tmp_path / "log").read_text() == "the last line"


def test_a_few_modules_are_worth_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "WORTH_A_SUCCESSOR", 1000)
    pool = Pool()
    run(pool, imports, "xml.dom.minidom")
    assert not pool.server().wait_for_successor(60)
    pool.close()


def test_nobody_waits_for_a_slow_import(stubs: Path) -> None:
    pool = Pool()
    pool.world(1).release()
    pool.server().import_ahead(["einops"])
    assert run(pool, imported, "einops") == [[False]]
    (stubs / "may_end").touch()
    assert pool.server().wait_for_successor(60)
    assert run(pool, imported, "einops") == [[True]]
    pool.close()


@pytest.mark.usefixtures("stubs")
def test_a_module_that_starts_threads_is_left_out() -> None:
    pool = Pool()
    pool.world(1).release()
    pool.server().import_ahead(["optree", "triton"])
    assert not pool.server().wait_for_successor(60)
    # Ranks come from the first server, as if nothing had happened; what was left is imported by the next successor.
    assert run(pool, imported, "triton", "optree") == [[False, False]]
    assert pool.server().wait_for_successor(60)
    assert run(pool, imported, "triton", "optree") == [[True, False]]
    pool.close()


@pytest.mark.usefixtures("stubs")
def test_a_module_that_does_not_import_is_skipped() -> None:
    pool = Pool()
    pool.world(1).release()
    pool.server().import_ahead(["markupsafe", "triton"])
    assert pool.server().wait_for_successor(60)
    assert run(pool, imported, "triton", "markupsafe") == [[True, False]]
    pool.close()


@pytest.mark.usefixtures("stubs")
def test_a_successor_that_ends_is_no_loss() -> None:
    pool = Pool()
    run(pool, imports, "triton")
    first = pool.server()
    assert first.wait_for_successor(60)
    listing, waiting = Path(f"/proc/{first.pid}/task/{first.pid}/children"), threading.Event()
    while len(children := listing.read_text().split()) > 1:
        waiting.wait(0.01)  # the rank of the call above is being reaped
    os.kill(int(children[0]), 9)
    while Path(f"/proc/{children[0]}").exists():
        waiting.wait(0.01)
    assert run(pool, imported, "triton") == [[False]]
    pool.close()


def test_a_preloaded_module_with_threads_is_an_error_that_says_so(stubs: Path) -> None:
    from fsdp_testing.errors import PoolBroken

    pool = Pool(preload_modules=("optree",))
    with pytest.raises(PoolBroken, match="expected one thread after the preload, got 2"):
        pool.world(1)
    pool.close()


def test_a_fork_server_that_crashed_before_its_first_use_is_reported_and_not_begun_again(stubs: Path) -> None:
    from fsdp_testing.errors import PoolBroken

    (stubs / "crashes.py").write_text("import os\nopen(__file__ + '.begun', 'a').write('x')\nos._exit(3)\n")
    pool = Pool(preload_modules=("crashes",))
    os.waitid(os.P_PID, pool.server().pid, os.WEXITED | os.WNOWAIT)
    with pytest.raises(PoolBroken, match=r"it ended while importing \(process ended with 3\)"):
        pool.world(1)
    assert (stubs / "crashes.py.begun").read_text() == "x"
    pool.close()
