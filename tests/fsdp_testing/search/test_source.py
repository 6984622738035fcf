"""A digest changes with the text of the implementation and of what it imports, and with nothing else."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from fsdp_testing.adapters import registry
from fsdp_testing.search.state import source_digest

OURS = ("digested_package", "digested_engine", "engine_helper")
ADAPTER = """
from fsdp_testing.adapters import single_process
from .engine import unused
IMPLEMENTATION = single_process.IMPLEMENTATION
"""
ENGINE = """
def unused():
    import engine_helper
    return engine_helper
"""

INSIDE = """
from fsdp_testing.adapters.single_process import IMPLEMENTATION
class Own:
    def __getattr__(self, name):
        return getattr(IMPLEMENTATION, name)
OF_A_CLASS = Own()
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.syspath_prepend(str(tmp_path))
    folder = tmp_path / "digested_package"
    folder.mkdir()
    texts = {"__init__.py": "", "adapter.py": ADAPTER, "engine.py": ENGINE, "../engine_helper.py": "NUMBER = 1"}
    for name, text in texts.items():
        (folder / name).write_text(text)
    importlib.invalidate_caches()
    yield folder
    for name in [name for name in sys.modules if name.partition(".")[0] in OURS]:
        del sys.modules[name]


def digest() -> str:
    return source_digest(registry.load("digested_package.adapter:IMPLEMENTATION"))


@pytest.mark.parametrize("changed", ["adapter.py", "engine.py", "../engine_helper.py", "new.py"])
def test_it_changes_with_the_text_of_what_an_implementation_is_made_of(changed: str, package: Path):
    before = digest()
    assert digest() == before
    (package.parent / "somebody_else.py").write_text("NUMBER = 1")
    (package / "notes.txt").write_text("nothing of it is run")
    assert digest() == before
    file = package / changed
    file.write_text((file.read_text() if file.exists() else "") + "\n# another line\n")
    assert digest() != before


@pytest.mark.parametrize("changed", ["adapter.py", "engine.py"])
def test_it_changes_with_the_text_of_a_package_without_an_init_file(changed: str, package: Path):
    (package / "__init__.py").unlink()
    importlib.invalidate_caches()
    before = digest()
    with (package / changed).open("a") as file:
        file.write("\n# another line\n")
    assert digest() != before


@pytest.mark.parametrize(
    "adapter",
    [
        "IMPLEMENTATION = 'digested_engine.inside:IMPLEMENTATION'",
        "from importlib import import_module\nIMPLEMENTATION = import_module('digested_engine.inside').IMPLEMENTATION",
        "import sys, \\\n    digested_engine.inside\nIMPLEMENTATION = digested_engine.inside.IMPLEMENTATION",
        "if True: import digested_engine.inside\nIMPLEMENTATION = digested_engine.inside.IMPLEMENTATION",
        "import sys; from digested_engine import inside\nIMPLEMENTATION = inside.IMPLEMENTATION",
        "import sys\nsys.path.sort\nIMPLEMENTATION = __import__('digested_' + 'engine.inside').inside.OF_A_CLASS",
    ],
)
def test_it_changes_with_what_is_reached_in_other_ways_than_by_a_line_of_imports(
    adapter: str, package: Path, monkeypatch: pytest.MonkeyPatch
):
    engine = package.parent / "digested_engine"
    engine.mkdir()
    (engine / "__init__.py").write_text("")
    (engine / "inside.py").write_text(INSIDE)
    (package / "adapter.py").write_text(adapter)
    before = digest()
    (engine / "inside.py").write_text(INSIDE + "# another line\n")
    assert digest() != before


def test_it_does_not_depend_on_what_is_imported_by_now(package: Path):
    before = digest()
    importlib.import_module("engine_helper")
    importlib.import_module("fsdp_testing.cli.certify")
    assert digest() == before


def test_implementations_that_ship_with_the_harness_have_its_text():
    names = ("torch-ddp", "torch-fsdp2", "fsdp_ref-composable")
    assert len({source_digest(registry.load(name)) for name in names}) == 1
