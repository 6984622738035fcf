"""Each script runs in an empty folder: one that is judged is shown every file below the current one, once for each run."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def _empty_folder(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path_factory.mktemp("current")
    monkeypatch.chdir(folder)
    return folder
