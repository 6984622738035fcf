"""What the controller asks about a rank's process, which may end between two looks."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import NoReturn

import pytest

from fsdp_testing.ranks.pool.processes import RankProcess


def test_a_rank_that_ends_while_its_threads_are_listed_does_not_compute(monkeypatch: pytest.MonkeyPatch) -> None:
    def ended(_path: object) -> NoReturn:
        raise FileNotFoundError(2, "No such file or directory")

    process: RankProcess = SimpleNamespace(pid=os.getpid())  # type: ignore[assignment]  # all that is asked of it
    assert RankProcess.computes(process)
    with monkeypatch.context() as patch:
        patch.setattr(os, "scandir", ended)
        patch.setattr(os, "listdir", ended)
        assert not RankProcess.computes(process)
