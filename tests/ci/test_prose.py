"""ci/prose.py finds a word to avoid and a long sentence in text, and neither in code."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import prose
import pytest

LONG = "This sentence goes on " + "and on " * 15 + "to its end."


def test_words_of_ours_are_named_with_their_line_and_what_to_say() -> None:
    if importlib.util.find_spec("proselint") is None:
        pytest.skip("proselint is not installed: `tox -e lint` runs this rule")
    assert prose.words("Right.\n\nA thing of which nobody knows.\n")[0].startswith("3: of which nobody: say who")
    assert prose.words("```text\nnobody\n```\nThe name `nobody` is code.\n") == []


def test_long_sentences_are_counted_in_prose_alone() -> None:
    assert prose.long_sentences(f"Short. {LONG} Short.\n") == [LONG]
    assert prose.long_sentences(f"```text\n{LONG}\n```\n") == []
    assert prose.long_sentences("| a cell | " * 20) == []
    half = "words and " * 10
    assert prose.long_sentences(f"These {half}end. `code` begins {half}again.\n") == []


def test_long_sentences_and_too_many_words_are_errors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"{LONG}\n\n```text\none two\n```\n", encoding="utf-8")
    monkeypatch.setattr(prose, "ROOT", tmp_path)
    monkeypatch.setattr(prose, "pages", lambda: [page])
    monkeypatch.setattr(prose, "words", lambda _text: [])
    assert prose.main(show_words=False) == 1
    assert f"page.md: more than 30 words: {LONG}" in capsys.readouterr().out
    monkeypatch.setattr(prose, "LONGEST", 100)
    assert prose.main(show_words=False) == 0
    count = len(LONG.split()) + 3  # the fence begins with ```text
    monkeypatch.setattr(prose, "MOST_WORDS", count - 1)
    assert prose.main(show_words=False) == 1
    assert f"got {count}" in capsys.readouterr().out


def test_every_allowance_is_of_a_page() -> None:
    pages = {str(path.relative_to(prose.ROOT)) for path in prose.pages()}
    assert set(prose.RULES["allowed"]) <= pages
    assert all((prose.ROOT / name).is_file() for name in prose.RULES["made"])
