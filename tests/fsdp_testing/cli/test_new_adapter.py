"""The skeleton is an adapter that lacks nothing but what only its user knows; nothing is ever overwritten."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fsdp_testing.cli.new_adapter import SKELETON

TOY = Path(__file__).parents[3] / "examples" / "downstream" / "tinyfsdp" / "__init__.py"


def test_filled_in_it_is_judged(verify: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    ended = verify("new-adapter", "my-sharding")
    assert ended.code == 0, ended.err
    assert "fsdp-verify run my_sharding_adapter:IMPLEMENTATION" in ended.out
    path = tmp_path / "my_sharding_adapter.py"
    text = path.read_text(encoding="utf-8")
    assert text.count("raise NotImplementedError") == 2
    toy = TOY.read_text(encoding="utf-8")
    filled = text.replace('raise NotImplementedError("return the module', 'return TinyFSDP(module, setup.group)  # ("')
    filled = filled.replace(
        'raise NotImplementedError("return flat, first',
        'return model.flat, model.rank * len(model.flat), model.originals  # ("',
    )
    path.write_text(f"{toy}\n{filled}", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    checks = ("--check", "training.optimizer_state", "--check", "training.adamw_weight_decay")
    ended = verify("run", "my_sharding_adapter:IMPLEMENTATION", "--world-size", "3", *checks)
    assert ended.code == 0, ended.out + ended.err
    assert "2 of 2 claims hold" in ended.out


def test_what_is_left_to_fill_in_is_told(
    verify: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    assert verify("new-adapter", "empty").code == 0
    ended = verify("run", "empty_adapter:IMPLEMENTATION", "--check", "training")
    assert ended.code == 2
    assert "return the module wrapped by empty" in ended.err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("mine", "kept.py"), "expected no file at 'kept.py', got one"),
        (("mine", "not-a-module.py"), "expected a file that can be imported"),
        (("mine", "kept.txt"), "expected a file that can be imported"),
        (('a"b',), "expected a name of letters"),
        (("",), "expected a name of letters"),
    ],
)
def test_bad_input_writes_nothing(
    verify: Callable[..., Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: tuple[str, ...],
    said: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "kept.py").write_text("mine", encoding="utf-8")
    ended = verify("new-adapter", *arguments)
    assert ended.code == 2
    assert said in ended.err
    assert [(path.name, path.read_text(encoding="utf-8")) for path in tmp_path.iterdir()] == [("kept.py", "mine")]


def test_the_skeleton_is_python_whatever_the_name() -> None:
    compile(SKELETON.replace("@NAME@", "a.b-c+1"), "skeleton", "exec")
