"""What can be named is listed with what it means; what is broken is listed as broken."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import names
import pytest

from fsdp_testing.adapters import registry
from fsdp_testing.cases.models import MODELS
from fsdp_testing.cases.records import CAPABILITIES
from fsdp_testing.checks.suites import CHECKS
from fsdp_testing.cli import list_command
from fsdp_testing.errors import InvalidImplementation


@pytest.mark.parametrize("arguments", [(), ("--all",)])
def test_without_a_kind_every_name_is_listed(verify: Callable[..., Any], arguments: tuple[str, ...]) -> None:
    ended = verify("list", *arguments)
    assert ended.code == 0, ended.err
    checks = (name.partition(".")[2] for name in CHECKS)
    for name in (*registry.names(), *checks, *CAPABILITIES, *MODELS, *list_command.KINDS, "gloo"):
        assert name in ended.out


def test_names_alone_are_short_and_each_suite_is_one_entry(verify: Callable[..., Any]) -> None:
    short, long = verify("list").out, verify("list", "--all").out
    assert short.count("\n") * 3 < long.count("\n")
    meanings = [check.meaning for check in CHECKS.values()]
    assert not [meaning for meaning in meanings if meaning in short]
    for suite in {name.partition(".")[0] for name in CHECKS}:
        assert short.count(f"\n  {suite} ") == 1


def test_one_kind_alone(verify: Callable[..., Any]) -> None:
    ended = verify("list", "capabilities")
    assert "full_shard" in ended.out
    assert "torch-ddp" not in ended.out


def test_what_cannot_be_loaded_is_listed_with_the_reason(
    verify: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(name: str) -> object:
        raise InvalidImplementation(f"implementation {name!r}: expected [it] to be importable, got nothing. Fix it.")

    monkeypatch.setattr(registry, "load", load)
    ended = verify("list", "implementations")
    assert ended.code == 0
    assert "cannot be used: implementation 'torch-ddp': expected [it] to be importable" in ended.out


def test_two_claims_to_one_name_are_listed(verify: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    claims = tuple(registry.Registration("twin", "a:b", origin) for origin in ("one", "two"))
    monkeypatch.setattr(registry, "registrations", lambda: {"twin": claims})
    assert re.search("twin +registered by several distributions: one, two", verify("list", "implementations").out)


def test_names_alone_wait_for_no_torch_and_are_those_of_the_package() -> None:
    """It takes 0.4 s; with torch it takes three."""
    code = (
        "import sys; from fsdp_testing.cli.main import main; code = main(['list']); "
        "print('loaded', 'torch' in sys.modules); sys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "loaded False"
    written = json.loads((Path(list_command.__file__).parent / "names.json").read_text(encoding="utf-8"))
    assert written == names.names(), "write them: python ci/names.py"
