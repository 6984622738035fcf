"""Runs the command line in this process and gives exit code, output and messages."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import pytest

from fsdp_testing.cli.main import main


class Ended(NamedTuple):
    code: int
    out: str
    err: str


@pytest.fixture
def verify(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Ended]:
    monkeypatch.setenv("COLUMNS", "160")

    def run(*arguments: str) -> Ended:
        code = main(arguments)
        captured = capsys.readouterr()
        return Ended(code, captured.out, captured.err)

    return run
