"""Constructs that the house style bans do not appear, and each ban is shown to work on a planted fault."""

from __future__ import annotations

import pytest
from tree_rules import (
    FORBIDDEN_STEMS,
    PACKAGES,
    ROOT,
    banned_offences,
    bare_ignores,
    python_files,
)

TREE = python_files(*PACKAGES, "tests")


def _read(path: object) -> str:
    return (ROOT / str(path)).read_text(encoding="utf-8")


def test_no_banned_construct() -> None:
    found = [
        offence
        for path in TREE
        if "tests/arch" not in str(path)
        for check in (banned_offences, bare_ignores)
        for offence in check(str(path), _read(path))
        if check is banned_offences or not offence.path.startswith("tests/")  # tests are run, not type-checked
    ]
    assert not found, "\n".join(map(str, found))


def test_no_module_is_named_after_nothing() -> None:
    bad = [path for path in python_files(*PACKAGES) if FORBIDDEN_STEMS.search(path.stem)]
    assert not bad, f"name these after what they hold: {[str(path) for path in bad]}"


@pytest.mark.parametrize(
    ("rule", "path", "source"),
    [
        ("no_type_check", "fsdp_ref/x.py", "import typing\n@typing.no_type_check\ndef f(): ..."),
        ("sleep", "tests/x.py", "import time\ntime.sleep(1)"),
        ("environment", "fsdp_testing/ranks/pool/x.py", "import os\nos.environ['A'] = '1'"),
        ("print", "fsdp_testing/report/x.py", "print('hello')"),
        ("exit", "fsdp_testing/ranks/pool/x.py", "import sys\nsys.exit(1)"),
        ("exit", "fsdp_testing/ranks/pool/x.py", "raise SystemExit(1)"),
        ("question", "fsdp_ref/x.py", '"""How is a unit wrapped? By its holder."""'),
        ("hasattr", "fsdp_ref/x.py", "def f(self):\n    return hasattr(self, 'ready')"),
    ],
)
def test_each_ban_can_be_broken(rule: str, path: str, source: str) -> None:
    assert {offence.rule for offence in banned_offences(path, source)} == {rule}


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("fsdp_testing/base/env.py", "import os\nvalue = os.environ.get('A')"),
        ("fsdp_testing/cli/main.py", "import sys\nprint('x')\nsys.exit(2)"),
        ("tests/x.py", "import time\ntime.sleep(600)"),
    ],
)
def test_what_has_its_place_is_left_alone(path: str, source: str) -> None:
    assert not list(banned_offences(path, source))


@pytest.mark.parametrize(
    ("source", "broken"),
    [
        ("x = 1  # type: ignore\n", True),
        ("x = 1  # type: ignore[assignment]\n", True),
        ("x = 1  # type: ignore[assignment]  # torch types it as Any\n", False),
        ("x = 1  # noqa\n", True),
        ("x = 1  # noqa: B007\n", False),
        ("x = 'type: ignore'\n", False),
    ],
)
def test_an_ignore_needs_a_code_and_a_reason(source: str, broken: bool) -> None:
    assert bool(list(bare_ignores("fsdp_ref/x.py", source))) is broken
