"""The one list of known failures names pages, scripts, implementations and checks that exist, and the pages have its tables."""

from __future__ import annotations

import re
from pathlib import Path

import known_defects
import pytest

from fsdp_testing.adapters import registry
from fsdp_testing.checks.findings.known import Defect, shipped, shipped_text, tables_of
from fsdp_testing.checks.suites import CHECKS
from fsdp_testing.cli.main import main
from fsdp_testing.judging.expected import expectations

MOST_LINES = 40
LEAST_SHARE = 0.9
OWN_SCRIPTS = known_defects.FINDINGS / "known"
BEFORE = known_defects.known_before(shipped())


def ids(defect: Defect) -> str:
    return defect.name


def test_tables_of_the_pages_are_those_of_the_list() -> None:
    for path in known_defects.PAGES:
        assert path.read_text(encoding="utf-8") == known_defects.page(path, shipped()), (
            "run `python ci/known_defects.py`"
        )


@pytest.mark.parametrize("defect", shipped(), ids=ids)
def test_a_defect_has_its_page_and_script_and_the_page_its_thread(defect: Defect) -> None:
    script = known_defects.script_of(defect)
    if script is None:
        return
    assert script.is_file() and (known_defects.ROOT / defect.place).is_file()
    text = (known_defects.ROOT / defect.place).read_text(encoding="utf-8")
    rules = [rule.issue for rule in defect.rules] if defect.place.endswith(".md") else []
    assert [issue for issue in {defect.issue, *rules} if not re.search(rf"{re.escape(issue)}\b", text)] == []


def test_a_page_and_a_script_belong_to_one_defect_each() -> None:
    pages = [defect.place for defect in shipped() if defect.place]
    assert len(set(pages)) == len(pages)
    assert {path.name for path in OWN_SCRIPTS.glob("*.py")} - {"ranks.py"} == {
        Path(page).name for page in pages if page.endswith(".py")
    }


def test_a_thread_is_named_once_for_each_defect() -> None:
    """Text of one thread was in many lists; a rule names one only where its defect has several."""
    for defect in shipped():
        assert defect.issue not in [rule.issue for rule in defect.rules if rule.issue], defect.name
        assert not [rule.name for rule in defect.rules if rule.page], defect.name


def test_every_name_of_an_implementation_and_a_check_exists() -> None:
    names = registry.names()
    for defect in shipped():
        bases = {name.partition("+")[0] for name in defect.implementations}
        assert bases <= set(names), defect.name
        assert not defect.shown or defect.shown[0] in CHECKS, defect.name
    tables = tables_of(shipped())
    own = {name: {c: e for c, e in table.items() if c != "tensor_parallel"} for name, table in tables.items()}
    # Over tensor parallelism torch's own layers run inside of it.
    assert {name.partition("-")[0] for name, table in own.items() if table} == {"torch"}, (
        "nothing of ours is expected to fail"
    )
    beside = {name: table["tensor_parallel"] for name, table in tables.items() if "tensor_parallel" in table}
    for given in (own, beside):
        for checks in expectations(given, names, CHECKS).values():
            assert all(expectation.failures and not expectation.bare for expectation in checks.values())


def test_rules_name_a_class_of_ours_and_no_module() -> None:
    """A rule that names a module knows nothing once the file has moved."""
    assert re.findall(r"\bfsdp_(?:testing|ref)\.[\w.]+", shipped_text().partition("\n\n")[2]) == []


def test_rules_name_no_class_of_a_model() -> None:
    """Torch's message says which class a state does not fit: a model of ours that got another name was a new failure."""
    text = shipped_text()
    assert set(re.findall(r"loading state_dict for (\w+)", text)) == {"FSDP", "FullyShardedDataParallel"}


def test_scripts_of_what_was_known_are_small_and_need_torch_alone() -> None:
    for path in OWN_SCRIPTS.glob("*.py"):
        text = path.read_text(encoding="utf-8")
        assert "fsdp_testing" not in text and "fsdp_ref" not in text, path.name
        if path.stem != "ranks":
            assert len(text.splitlines()) <= MOST_LINES, path.name
            assert "show(defect" in text, path.name


@pytest.mark.parametrize("defect", BEFORE, ids=ids)
def test_what_was_known_is_shown_by_a_check_that_is_asked_or_nothing_is_said_to(defect: Defect) -> None:
    assert bool(defect.shown) != bool(defect.not_shown)
    if defect.shown:
        check, on = defect.shown
        assert CHECKS[check].needs <= registry.load(known_defects.implementation(on)).capabilities
        name, _, capability = on.partition("+")
        assert not capability or capability not in registry.load(name).capabilities, "what is claimed is no limit"


def test_most_of_what_was_known_is_shown() -> None:
    assert len(BEFORE) >= 55
    assert sum(bool(defect.shown) for defect in BEFORE) / len(BEFORE) >= LEAST_SHARE


@pytest.mark.slow
@pytest.mark.parametrize("defect", BEFORE, ids=ids)
def test_what_was_known_still_shows_and_is_exposed(defect: Defect) -> None:
    assert list(known_defects.wrong([defect])) == []


def test_both_commands_say_what_is_wrong_in_a_list(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bad = tmp_path / "list.toml"
    bad.write_text(shipped_text().replace('reason = "', 'raeson = "', 1), encoding="utf-8")
    for asked in (["run", "torch-ddp", "--expected-failures"], ["fuzz", "torch-ddp", "--known"]):
        assert main([*asked, str(bad)]) == 2
        error = " ".join(capsys.readouterr().err.split())
        assert "list.toml: defect 0: " in error and "raeson" in error, error
