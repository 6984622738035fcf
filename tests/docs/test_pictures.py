"""The pictures of the README show what the tools print today: the run is made again, and its words compared."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[2]


def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("pictures", ROOT / "ci" / "pictures.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_silent_bug_is_printed_as_the_readme_shows_it() -> None:
    pictures = script()
    shown = pictures.PICTURE.read_text(encoding="utf-8")
    assert pictures.words(pictures.picture(pictures.judged())) == pictures.words(shown), "run `python ci/pictures.py`"
    assert "the root unit still holds the weights" in pictures.words(shown)
    assert "http" not in shown.replace("http://www.w3.org/2000/svg", ""), "it loads nothing"
    assert f"]({pictures.PICTURE.relative_to(ROOT)})" in (ROOT / "README.md").read_text(encoding="utf-8")
