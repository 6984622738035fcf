"""A foreign module whose import takes long is told with its place, and ended if it seems to hang."""

from __future__ import annotations

import threading

import pytest

from fsdp_testing.adapters import registry, slow_imports
from fsdp_testing.errors import InvalidImplementation


@pytest.fixture
def sleeping(tmp_path, monkeypatch):
    monkeypatch.setattr(slow_imports, "NOTICE_AFTER", 0.05)
    monkeypatch.setattr(slow_imports, "LIMIT", 0.2)
    name = f"sleeps_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text("import time\ntime.sleep(3600)\n")
    monkeypatch.syspath_prepend(tmp_path)
    return name


def test_an_import_that_hangs_ends_with_its_place(sleeping, capfd):
    with pytest.raises(
        InvalidImplementation, match=rf"expected {sleeping} to be imported in 0.2 s, .*{sleeping}.py:2\."
    ):
        registry.load(f"{sleeping}:IT")
    assert f"importing {sleeping} takes 0 s so far, at " in capfd.readouterr().err


def test_a_users_interrupt_stays_one(sleeping, monkeypatch):
    monkeypatch.setattr(slow_imports, "LIMIT", 3600.0)
    with pytest.raises(KeyboardInterrupt), slow_imports.importing("a", "b"):
        raise KeyboardInterrupt


def test_a_quick_import_says_nothing(capfd):
    before = threading.active_count()
    with slow_imports.importing("a", "b"):
        pass
    assert threading.active_count() == before
    assert not capfd.readouterr().err


def test_another_thread_is_told_of_but_not_ended(monkeypatch, capfd):
    monkeypatch.setattr(slow_imports, "NOTICE_AFTER", 0.02)
    monkeypatch.setattr(slow_imports, "LIMIT", 0.02)
    ended = threading.Event()

    def wait() -> None:
        with slow_imports.importing("a", "b"):
            threading.Event().wait(0.2)
        ended.set()

    thread = threading.Thread(target=wait)
    thread.start()
    thread.join()
    assert ended.is_set()
    assert "b: importing a takes" in capfd.readouterr().err
