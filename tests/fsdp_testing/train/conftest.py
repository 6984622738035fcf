"""Each script runs in an empty folder: one that is judged is shown every file below the current one, once for each run."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _empty_folder(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    if hasattr(request.module, "Launch"):
        monkeypatch.chdir(tmp_path_factory.mktemp("current"))
