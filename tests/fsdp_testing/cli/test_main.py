"""Exit codes and messages of the command line as a whole."""

from __future__ import annotations

import argparse
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest

from fsdp_testing.cli import doctor, main
from fsdp_testing.errors import InvalidArgument, InvalidImplementation, InvalidRecord, PoolBroken


def name_of(module: ModuleType) -> str:
    """The command that a module declares."""
    return module.__name__.rpartition(".")[2].removesuffix("_command").replace("_", "-")


@pytest.mark.parametrize(
    "arguments", [(), ("nonsense",), ("list", "nonsense"), ("list", "--wrong"), ("plan",), ("--vers",)]
)
def test_bad_usage_is_exit_code_2_with_one_message(verify: Callable[..., Any], arguments: tuple[str, ...]) -> None:
    ended = verify(*arguments)
    assert ended.code == 2
    assert ended.out == ""
    assert ended.err.count("error:") == 1
    assert ended.err.count("\n") == 1
    assert "--help` says what it takes." in ended.err


@pytest.mark.parametrize("arguments", [("--help",), ("--version",), ("list", "--help"), ("plan", "--help")])
def test_help_and_version(verify: Callable[..., Any], arguments: tuple[str, ...]) -> None:
    ended = verify(*arguments)
    assert ended.code == 0
    assert "fsdp-verify" in ended.out


@pytest.mark.parametrize("width", [72, 100])
@pytest.mark.parametrize("module", main.COMMANDS)
def test_help_is_as_wide_as_the_terminal(
    verify: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, module: ModuleType, width: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    lines = verify(name_of(module), "--help").out.splitlines()
    assert not [line for line in lines if len(line) > width and " " in line.strip()]


@pytest.mark.parametrize("module", main.COMMANDS)
def test_help_has_an_example_that_is_right(verify: Callable[..., Any], module: ModuleType) -> None:
    text = verify(name_of(module), "--help").out.partition("example:")[2]
    examples = re.findall("fsdp-verify .+", text)
    assert examples
    assert f"fsdp-verify {name_of(module)} " in f"{examples[0]} "
    for example in examples:
        main.parser().parse_args(shlex.split(example)[1:])


def test_help_documents_the_exit_codes(verify: Callable[..., Any]) -> None:
    text = verify("--help").out
    for code in range(4):
        assert f"\n  {code}  " in text


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (InvalidArgument("x: expected y, got z. Do w."), 2),
        (InvalidImplementation("adapter: expected y, got z. Do w."), 2),
        (InvalidRecord("file: expected y, got z. Do w."), 2),
        (PoolBroken("pool: lost. Run doctor."), 3),
        (KeyboardInterrupt(), 130),
    ],
)
def test_errors_become_one_line_and_a_code(
    verify: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, error: BaseException, code: int
) -> None:
    def fail(options: argparse.Namespace) -> int:
        raise error

    monkeypatch.setattr(doctor, "execute", fail)
    ended = verify("doctor")
    assert ended.code == code
    assert ended.err.count("\n") == 1
    assert ended.err.startswith("fsdp-verify: ")


def test_output_survives_a_terminal_that_cannot_show_it() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "fsdp_testing.cli", "plan", "mlp"],
        env={"PYTHONIOENCODING": "ascii", "PATH": "", "COLUMNS": "80"},
        capture_output=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert b"\\u2588" in done.stdout


def test_a_reader_that_goes_away_leaves_no_traceback() -> None:
    command = [sys.executable, "-m", "fsdp_testing.cli", "list", "capabilities"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        said = process.stderr.read()
        process.wait(timeout=60)
    assert said == b""


def test_help_needs_neither_torch_nor_rich() -> None:
    code = (
        "import sys; from fsdp_testing.cli.main import parser; parser(); "
        "print(sorted({'torch', 'numpy', 'rich', 'jinja2', 'hypothesis', 'pytest'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


def test_every_command_is_declared_once() -> None:
    helps = main.parser().format_help()
    for module in main.COMMANDS:
        name = name_of(module)
        assert len(re.findall(rf"\n    {name}\s", helps)) == 1
