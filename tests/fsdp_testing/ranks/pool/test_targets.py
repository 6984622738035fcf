"""A function is named, found again in another process, or refused with the reason before anything is sent."""

from __future__ import annotations

import functools
import pickle
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fsdp_testing.errors import UnsendableFunction
from fsdp_testing.ranks.pool.targets import Target, resolve, target_of


def plain(x: int) -> int:
    return x + 1


class Holder:
    @staticmethod
    def static(x: int) -> int:
        return x + 2

    @classmethod
    def of_class(cls, x: int) -> int:
        return x + 3

    def method(self, x: int) -> int:
        return x + 4

    class Inner:
        @staticmethod
        def deep(x: int) -> int:
            return x + 5


def decorate(function: Any) -> Any:
    @functools.wraps(function)
    def wrapper(x: int) -> int:
        return -function(x)

    return wrapper


@decorate
@decorate
@decorate
def wrapped(x: int) -> int:
    return x + 10


def hides(function: Any) -> Any:
    return lambda x: function(x)


def _inner(x: int) -> int:
    return x


hidden = hides(_inner)
_inner_original = _inner


def _inner(x: int) -> int:  # type: ignore[no-redef]  # the redefinition under test
    return x + 1


class Callable_:
    def __call__(self) -> int:
        return 1


@pytest.mark.parametrize(
    ("function", "result"),
    [(plain, 2), (Holder.static, 3), (Holder.of_class, 4), (Holder.Inner.deep, 6), (wrapped, -11)],
)
def test_a_named_function_is_found_again(function: Any, result: int) -> None:
    target = target_of(function)
    assert pickle.loads(pickle.dumps(target)) == target
    assert resolve(target)(1) == result


@pytest.mark.parametrize(("depth", "result"), [(0, -11), (1, 11), (2, -11), (3, 11)])
def test_the_function_under_decorators_is_meant_itself(depth: int, result: int) -> None:
    function: Any = wrapped
    for _ in range(depth):
        function = function.__wrapped__
    target = target_of(function)
    assert target.unwrap == depth
    assert resolve(target)(1) == result


def test_a_name_as_text() -> None:
    assert target_of("math:floor") == Target("math", "floor")
    assert resolve(target_of("math:floor"))(1.5) == 1


def _closure() -> Any:
    def nested() -> None: ...

    return nested


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda: 1, "which is a lambda"),
        (_closure(), "which is defined inside another function"),
        (functools.partial(plain, 1), "expected an importable function"),
        (Callable_(), "expected an importable function"),
        (Holder().method, "bound to an object"),
        (_inner_original, "to name the function itself"),
        (3, "expected an importable function"),
        ("no colon", "expected 'package.module:function'"),
        (":f", "expected 'package.module:function'"),
        ("m:", "expected 'package.module:function'"),
    ],
)
def test_what_has_no_name_is_refused(function: Any, message: str) -> None:
    with pytest.raises(UnsendableFunction, match=message):
        target_of(function)


def test_a_name_that_the_module_does_not_hold() -> None:
    with pytest.raises(UnsendableFunction, match="expected module math to hold no_such_name"):
        resolve(Target("math", "no_such_name"))
    with pytest.raises(UnsendableFunction, match="expected a callable, got float"):
        resolve(Target("math", "pi"))
    with pytest.raises(ModuleNotFoundError):
        resolve(Target("no_such_module_at_all", "f"))


@pytest.fixture
def _modules_as_before() -> Iterator[None]:
    before = dict(sys.modules)
    yield
    for name in sys.modules.keys() - before.keys():
        del sys.modules[name]


@pytest.mark.usefixtures("_modules_as_before")
def test_a_module_that_only_its_path_leads_to(tmp_path: Path) -> None:
    path = tmp_path / "lonely_module.py"
    path.write_text("def f():\n    return __name__\n")
    target = Target("folder.of.tests.lonely_module", "f", str(path))
    assert resolve(target)() == "folder.of.tests.lonely_module"
    assert resolve(target) is resolve(target)


@pytest.mark.usefixtures("_modules_as_before")
def test_objects_of_a_module_that_only_its_path_leads_to_can_be_sent(tmp_path: Path) -> None:
    path = tmp_path / "test_lonely.py"
    path.write_text("class Thing:\n    pass\ndef f():\n    return Thing()\n")
    thing = resolve(Target("folder.of.tests.test_lonely", "f", str(path)))()
    assert type(pickle.loads(pickle.dumps(thing))) is type(thing)


@pytest.mark.usefixtures("_modules_as_before")
def test_a_module_that_fails_halfway_is_not_found_by_the_next_call(tmp_path: Path) -> None:
    path = tmp_path / "half.py"
    path.write_text("def f(): ...\nraise ValueError('halfway')\n")
    for _ in range(2):
        with pytest.raises(ValueError, match="halfway"):
            resolve(Target("a.half", "f", str(path)))
    assert "a.half" not in sys.modules


def test_two_files_of_one_name_are_two_modules(tmp_path: Path) -> None:
    paths = []
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        path = tmp_path / folder / "twin_module.py"
        path.write_text(f"def f():\n    return {folder!r}\n")
        paths.append(str(path))
    try:
        assert [resolve(Target("twin_module", "f", path))() for path in (*paths, paths[0])] == ["a", "b", "a"]
    finally:
        sys.modules.pop("twin_module", None)


def test_an_import_error_inside_the_module_is_not_hidden(tmp_path: Path) -> None:
    path = tmp_path / "needs.py"
    path.write_text("import surely_not_installed\n")
    with pytest.raises(ModuleNotFoundError, match="surely_not_installed"):
        resolve(Target("needs_what_is_missing", "f", str(path)))


SCRIPT = """
    import sys
    from fsdp_testing import run_ranks
    class Data:
        def __init__(self, x): self.x = x
    def double(data):
        return Data(data.x * 2)
    if __name__ == "__main__":
        print([got.x for got in run_ranks(double, Data(21), size=2)])
"""


@pytest.mark.parametrize("name", ["script.py", "script"])
def test_functions_and_classes_of_a_script(name: str, tmp_path: Path) -> None:
    script = tmp_path / name
    script.write_text(textwrap.dedent(SCRIPT))
    got = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=120, check=False)
    if name == "script.py":
        assert got.stdout == "[42, 42]\n", got.stderr
    else:
        assert "cannot import" in got.stderr, got.stderr


def test_a_function_of_an_interactive_session_is_refused() -> None:
    code = "from fsdp_testing import run_ranks\ndef f(): ...\nrun_ranks(f)"
    got = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert "got one of an interactive session. Put it into a file." in got.stderr, got.stderr
