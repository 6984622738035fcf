"""docs/certificates says what was kept of the certificates, each cause has a page with a script, and the reference holds."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]


def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("certificates", ROOT / "ci" / "certificates.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


CERTIFICATES = script()
KEPT = CERTIFICATES.read()


def test_there_is_one_of_every_implementation():
    assert list(KEPT) == list(CERTIFICATES.NAMES)


def test_the_pages_and_pictures_are_those_of_what_is_kept():
    made = CERTIFICATES.pages(KEPT)
    for name, text in made.items():
        assert (CERTIFICATES.FOLDER / name).read_text(encoding="utf-8") == text, "run `python ci/certificates.py`"
    assert {file.name for file in CERTIFICATES.FOLDER.iterdir()} == {*made, *(f"{name}.json" for name in KEPT)}


@pytest.mark.parametrize("name", KEPT)
def test_counts_agree_with_one_another(name: str):
    kept = KEPT[name]
    ran = sum(kept["verdicts"].values())
    by_world = [sum(one["all"][place] for one in kept["faces"].values()) for place in range(3)]
    assert by_world == list(kept["verdicts"].values())
    assert ran <= kept["asked"]
    assert kept["verdicts"]["fail"] == sum(cause["cells"] for cause in kept["causes"]) + kept["unexplained"]
    assert ("A sample" in CERTIFICATES.page(kept)) == (ran < kept["claimed"])


@pytest.mark.parametrize("name", KEPT)
def test_every_cause_has_a_page_with_a_script(name: str):
    for cause in KEPT[name]["causes"]:
        stem = CERTIFICATES.page_of(name, cause)
        assert stem, f"{cause['known'] or cause['cell']}: write a page of docs/findings, and name it in PAGES"
        text = (CERTIFICATES.FINDINGS / f"{stem}.md").read_text(encoding="utf-8")
        assert "scripts/" in text or "known/" in text


def test_no_page_is_named_for_nothing():
    for name, pages in CERTIFICATES.PAGES.items():
        causes = KEPT[name]["causes"]
        assert set(pages) <= {cause["known"] for cause in causes} | {cause["cell"] for cause in causes}, name


@pytest.mark.parametrize("name", [name for name in KEPT if name.startswith("fsdp_ref")])
def test_the_reference_holds_in_every_cell(name: str):
    verdicts = KEPT[name]["verdicts"]
    assert (verdicts["fail"], verdicts["unknown"]) == (0, 0)


def test_a_picture_stands_alone():
    for name, kept in KEPT.items():
        drawn = CERTIFICATES.picture(kept)
        assert drawn.startswith('<svg xmlns="http://www.w3.org/2000/svg" viewBox='), name
        assert drawn.count("<rect") >= sum("all" in faces for faces in kept["faces"].values())
        assert ('class="cell fails' in drawn) == bool(kept["verdicts"]["fail"])
