"""What ranks import lazily is imported ahead the next time, by nobody who is waited for, and only if that is harmless."""

from __future__ import annotations

import json
import os
import sys
import threading
from pathlib import Path

import pytest

from fsdp_testing.pool import Pool, preload


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FSDP_TESTING_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def imported(*names: str) -> list[bool]:
    return [name in sys.modules for name in names]


def imports(*names: str) -> None:
    for name in names:
        __import__(name)


def run(pool: Pool, function: object, *args: object, isolation: str = "fresh") -> list[object]:
    world = pool.world(1, isolation=isolation)
    outcome = world.execute(function, args)  # type: ignore[arg-type]  # one of the functions above
    world.release()
    assert outcome.ok, outcome.describe()
    return outcome.values


# ---- the list


def test_what_is_recorded_is_read_in_small_steps() -> None:
    assert preload.recorded_modules() == []
    preload.record(["torch.fx", "torch.fx.node", "torch.fx.graph"])
    preload.record(["sympy", "torch.fx"])
    assert preload.recorded_modules() == ["torch.fx.graph", "torch.fx.node", "torch.fx", "sympy"]


def test_code_under_test_is_never_recorded() -> None:
    preload.record(["my_project.model", "conftest", "tests.test_x", "fsdp_ref.api", "torchvision", "__main__"])
    assert preload.recorded_modules() == []
    preload.record(["my_project", "xml.dom", "numpy.linalg"])
    assert preload.recorded_modules() == ["numpy.linalg", "xml.dom"]


@pytest.mark.parametrize(
    "content", ["", "{", "[1, 2]", '"text"', "null", '{"modules": 3}', "[" * 100_000, "\ufffd\x00"]
)
def test_a_damaged_list_is_an_empty_one(content: str) -> None:
    preload.cache_file().parent.mkdir(parents=True)
    preload.cache_file().write_text(content)
    assert preload.recorded_modules() == []
    preload.record(["sympy"])
    assert preload.recorded_modules() == ["sympy"]


def test_names_that_were_never_recorded_are_not_imported() -> None:
    preload.cache_file().parent.mkdir(parents=True)
    preload.cache_file().write_text(json.dumps({"modules": ["os.path", "evil", 3, "torch.fx", "antigravity"]}))
    assert preload.recorded_modules() == ["os.path", "torch.fx"]


def test_a_cache_that_cannot_be_written(own_cache: Path) -> None:
    own_cache.write_text("a file, not a folder")
    preload.record(["sympy"])
    preload.refuse("sympy")
    assert preload.recorded_modules() == []


def test_no_temporary_file_is_left(own_cache: Path) -> None:
    preload.record(["sympy"])
    preload.record(["torch.fx"])
    assert os.listdir(own_cache) == [preload.cache_file().name]


def test_a_refused_module_stays_refused() -> None:
    preload.record(["sympy", "torch.fx"])
    preload.refuse("sympy")
    preload.record(["sympy"])
    assert preload.recorded_modules() == ["torch.fx"]


# ---- the successor


@pytest.fixture
def stubs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Modules with names that may be recorded."""
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


def test_ranks_report_what_they_import_and_the_next_run_has_it() -> None:
    pool = Pool()
    run(pool, imports, "xml.dom.minidom")
    pool.close()
    assert "xml.dom.minidom" in preload.recorded_modules()
    pool = Pool()
    run(pool, imported)
    assert pool.server().wait_enriched(60)
    assert run(pool, imported, "xml.dom.minidom") == [[True]]
    pool.close()


def test_nobody_waits_for_a_slow_import(stubs: Path) -> None:
    preload.record(["einops"])
    pool = Pool()
    run(pool, imported)
    assert run(pool, imported, "einops") == [[False]]
    (stubs / "may_end").touch()
    assert pool.server().wait_enriched(60)
    assert run(pool, imported, "einops") == [[True]]
    pool.close()


@pytest.mark.usefixtures("stubs")
def test_a_module_that_starts_threads_is_dropped() -> None:
    preload.record(["triton", "optree"])
    pool = Pool()
    run(pool, imported)
    assert not pool.server().wait_enriched(60)
    assert preload.recorded_modules() == ["triton"]
    # Ranks come from the first server, as if nothing had happened.
    assert run(pool, imported, "triton", "optree") == [[False, False]]
    pool.close()
    pool = Pool()
    run(pool, imported)
    assert pool.server().wait_enriched(60)
    assert run(pool, imported, "triton", "optree") == [[True, False]]
    pool.close()


@pytest.mark.usefixtures("stubs")
def test_a_module_that_does_not_import_is_skipped() -> None:
    preload.record(["triton", "markupsafe"])
    pool = Pool()
    run(pool, imported)
    assert pool.server().wait_enriched(60)
    assert run(pool, imported, "triton", "markupsafe") == [[True, False]]
    pool.close()


@pytest.mark.usefixtures("stubs")
def test_a_successor_that_ends_is_no_loss() -> None:
    preload.record(["triton"])
    pool = Pool()
    run(pool, imported)
    server = pool.server()
    assert server.wait_enriched(60)
    listing, waiting = Path(f"/proc/{server.pid}/task/{server.pid}/children"), threading.Event()
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
