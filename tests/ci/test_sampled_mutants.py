"""`ci/sampled_mutants.py`: where a mutant's mark goes, what is asked, what counts as caught."""

from __future__ import annotations

import ast
import dataclasses
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "ci"))

import mutant_bench
import mutant_judge
import mutant_report
import mutant_subjects
import sampled_mutants
from mutant_bench import Bench, Judge
from mutant_executed import Executed
from mutant_judge import Answer, Request
from mutant_subjects import SUBJECTS, Mutant

SOURCE = """\
LIMIT = 3

def outer(a=1):
    if a > LIMIT: return a
    elif a == 2:
        total = sum(
            [a, 1])
    else:
        with open(a) as b:
            b.read()
    try:
        pass
    except ValueError as e:
        raise e
    match a:
        case 1 if a:
            a = 2

class Unit:
    size = 3

    @property
    def length(self, n=2): return n

    def grow(self,
             n=2):
        return n + 1
"""


@pytest.mark.parametrize(
    ("changed", "marked"),
    [
        pytest.param("LIMIT = 3", 0, id="a module"),
        pytest.param("def outer(a=1):", 0, id="defaults of a function"),
        pytest.param("    if a > LIMIT: return a", 4, id="an if and its line"),
        pytest.param("    elif a == 2:", 4, id="before an elif nothing can stand"),
        pytest.param("            [a, 1])", 6, id="the second line of a statement"),
        pytest.param("        with open(a) as b:", 9, id="a with in an else"),
        pytest.param("            b.read()", 10, id="its body"),
        pytest.param("    except ValueError as e:", 11, id="what a try catches"),
        pytest.param("        raise e", 14, id="a handler"),
        pytest.param("        case 1 if a:", 15, id="a guard"),
        pytest.param("            a = 2", 17, id="a case"),
        pytest.param("    size = 3", 0, id="a class"),
        pytest.param("    def length(self, n=2): return n", 0, id="a method on one line"),
        pytest.param("             n=2):", 0, id="defaults of a method"),
        pytest.param("        return n + 1", 27, id="a method"),
    ],
)
def test_the_mark_stands_before_the_statement_that_is_changed(changed: str, marked: int) -> None:
    lines = SOURCE.splitlines()
    line = lines.index(changed) + 1
    at = mutant_subjects.statement_at(ast.parse(SOURCE).body, lines, line)
    assert at == marked, lines[at - 1] if at else "nothing is marked"
    if at:
        indent = lines[at - 1][: -len(lines[at - 1].lstrip())]
        compile("\n".join([*lines[: at - 1], f"{indent}seen[0] = 1", *lines[at - 1 :]]), "marked", "exec")


class Answers(Judge):
    """A judge whose answers are made up; it notes what it is asked."""

    def __init__(self, *answers: dict[str, Any]) -> None:
        self.requests: list[tuple[str, str, Sequence[str]]] = []
        self._answers = list(answers)

    def ask(self, kind: str, name: str, **options: Any) -> dict[str, Any]:
        self.requests.append((kind, name, options.get("parts", [])))
        return {"failure": "", "hung": False, "unknown": 0, "lost": False} | (
            self._answers.pop(0) if self._answers else {}
        )


def mutant(file: str) -> Mutant:
    return Mutant("fsdp_ref", file, "f", "a = 2\n", ("-a = 1", "+a = 2"), 1)


def bench(folder: Path, judge: Judge) -> Bench:
    (folder / "one.py").write_text("a = 1\n", encoding="utf-8")
    (folder / "two.py").write_text("a = 1\n", encoding="utf-8")
    return Bench("fsdp_ref", folder, folder, "now", folder, folder / "checks.json", judge)


ONE, TWO = mutant("one.py"), mutant("two.py")
NAMES = ("fsdp_ref-composable", "fsdp_ref-wrapper")


@pytest.fixture(autouse=True)
def two_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """Judge the subject of these tests under two names, whatever it has."""
    monkeypatch.setitem(SUBJECTS, "fsdp_ref", dataclasses.replace(SUBJECTS["fsdp_ref"], names=NAMES))


EXECUTED = Executed(
    [ONE.key, TWO.key],
    parts={
        NAMES[0]: {"pairs": {"0": [0], "1": []}, "run": {"a.b": [0]}, "tensor": {}},
        NAMES[1]: {"pairs": {"0": []}, "run": {}, "tensor": {}},
    },
)


def test_only_what_executes_a_mutant_is_asked(tmp_path: Path) -> None:
    judge = Answers()
    fate = sampled_mutants.judge_mutant(bench(tmp_path, judge), EXECUTED, ONE, ("pairs", "run", "fuzz"), None)
    assert judge.requests == [
        ("pairs", NAMES[0], ["0"]),
        ("run", NAMES[0], ["a.b"]),
        ("fuzz", NAMES[0], []),
        ("fuzz", NAMES[1], []),
    ]
    assert (fate.stage, fate.executed, fate.stages) == ("", True, ["pairs", "run", "fuzz"])


def test_what_nothing_executes_is_not_caught(tmp_path: Path) -> None:
    judge = Answers()
    fate = sampled_mutants.judge_mutant(bench(tmp_path, judge), EXECUTED, TWO, ("pairs", "run", "fuzz"), None)
    assert (judge.requests, fate.stage, fate.executed) == ([], "", False)


def test_what_changes_a_module_is_asked_everything() -> None:
    executed = Executed(EXECUTED.mutants, everywhere=[1], parts=EXECUTED.parts)
    assert executed.parts_of(TWO, NAMES[0], "pairs") == ["1", "0"], "first what executes few mutants"


def test_a_check_is_asked_of_one_way_to_the_code_and_each_chunk_of_pairs_of_both() -> None:
    of_both = {"pairs": {"0": [0]}, "run": {"a.b": [0]}}
    executed = Executed([ONE.key], parts={NAMES[0]: of_both, NAMES[1]: of_both | {"run": {"a.b": [0], "a.c": [0]}}})
    assert executed.asked_of(ONE, NAMES, "run") == {NAMES[0]: ["a.b"], NAMES[1]: ["a.c"]}
    assert executed.asked_of(ONE, NAMES, "pairs") == {NAMES[0]: ["0"], NAMES[1]: ["0"]}


def test_the_first_failure_ends_it_and_the_file_is_as_before(tmp_path: Path) -> None:
    judge = Answers({"unknown": 2}, {"failure": "a.b: wrong"})
    fate = sampled_mutants.judge_mutant(bench(tmp_path, judge), EXECUTED, ONE, ("pairs", "run", "fuzz"), None)
    assert (fate.stage, fate.account, fate.unknown, len(judge.requests)) == ("run", "a.b: wrong", 2, 3)
    assert judge.requests[-1] == ("run", NAMES[0], ["a.b"]), "the check that caught it is asked without the change"
    assert (tmp_path / "one.py").read_text(encoding="utf-8") == "a = 1\n"


def test_a_check_that_fails_without_the_change_too_catches_nothing(tmp_path: Path) -> None:
    wrong = {"failure": "a.b: wrong"}
    judge = Answers(wrong, wrong)
    fate = sampled_mutants.judge_mutant(bench(tmp_path, judge), EXECUTED, ONE, ("run",), None)
    assert (fate.stage, fate.account, len(judge.requests)) == ("", "", 2)


LOST = {"failure": "the judging process died", "lost": True}


@pytest.mark.parametrize(("answers", "stage"), [((LOST,), ""), ((LOST, LOST), "pairs")], ids=["once", "twice"])
def test_a_lost_harness_counts_if_it_is_lost_again(
    tmp_path: Path, answers: Sequence[dict[str, Any]], stage: str
) -> None:
    judge = Answers(*answers)
    assert sampled_mutants.judge_mutant(bench(tmp_path, judge), EXECUTED, ONE, ("pairs",), None).stage == stage


def test_unknown_is_not_caught(tmp_path: Path) -> None:
    judge = Answers(*[{"unknown": 1}] * 4)
    assert not sampled_mutants.judge_mutant(bench(tmp_path, judge), EXECUTED, ONE, ("pairs", "run"), None).stage


def test_a_later_run_goes_on_with_the_stages_that_are_left(tmp_path: Path) -> None:
    judge, results = Answers(), tmp_path / "results.jsonl"
    here = bench(tmp_path, judge)
    sampled_mutants.try_all([ONE, TWO], here, EXECUTED, results, ("pairs",), lambda: False)
    fates = sampled_mutants.try_all([ONE, TWO], here, EXECUTED, results, ("pairs", "run"), lambda: False)
    assert [kind for kind, _, _ in judge.requests] == ["pairs", "run"]
    assert fates[ONE.identity].stages == ["pairs", "run"]
    assert len(results.read_text(encoding="utf-8").splitlines()) == 3


def test_the_share_counts_what_nothing_executes_and_leaves_out_what_is_explained(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    here = bench(tmp_path, Answers({"failure": "wrong"}))
    fates = {m.identity: sampled_mutants.judge_mutant(here, EXECUTED, m, ("pairs",), None) for m in (ONE, TWO)}
    assert mutant_report.report([ONE, TWO], fates, ("pairs",)) == 1
    assert "1 of 2: 50.0%" in capsys.readouterr().out
    monkeypatch.setattr(mutant_report, "explanations", lambda: {TWO.name: "the same"})
    assert mutant_report.report([ONE, TWO], fates, ("pairs",)) == 0
    assert "1 of 1: 100.0%" in capsys.readouterr().out


def test_the_sound_copy_has_to_pass_all_cases_and_random_ones_first(tmp_path: Path) -> None:
    for name in NAMES:
        (tmp_path / f"pairs-{name}.json").write_text('[["a case"], ["another"]]', encoding="utf-8")
    judge = Answers()
    bench(tmp_path, judge).control()
    assert judge.requests == [
        (kind, name, parts) for name in NAMES for kind, parts in (("pairs", ["0", "1"]), ("fuzz", []))
    ]
    with pytest.raises(
        RuntimeError, match=r"fuzz of fsdp_ref-composable: expected success without any change, got wrong"
    ):
        bench(tmp_path, Answers({}, {"failure": "wrong"})).control()


def test_it_passes_them_once_and_only_before_stages_in_which_mutants_are_asked_them(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in NAMES:
        (tmp_path / f"pairs-{name}.json").write_text('[["a case"]]', encoding="utf-8")
    monkeypatch.setattr(mutant_bench, "line_of", lambda _: 0)
    asked, mapped = [], {"parts": ["a"], "executed": {"a": [0]}, "wrong": []}
    judge = Answers(*[mapped] * 16)
    for stages in (("run", "tensor"), ("run", "fuzz"), ("pairs",)):
        bench(tmp_path, judge).executed([ONE, TWO], stages)
        asked.append(len(judge.requests))
    # Two kinds of two names are mapped, each with a question for its parts; then `pairs` after another question for the checks
    # that there are, and all is asked of the control.
    assert asked == [8, 18, 18]


def test_only_new_checks_are_measured_after_the_harness_changed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(mutant_bench, "line_of", lambda _: 0)
    first = Answers(*[{"parts": ["a", "b"]}] * 2, *[{"executed": {"a": [0], "b": [1]}, "wrong": ["b"]}] * 2)
    before = bench(tmp_path, first)
    (tmp_path / "before").mkdir()
    dataclasses.replace(before, folder=tmp_path / "before").executed([ONE, TWO], ("run",))
    later = Answers(*[{"parts": ["a", "b", "c"]}] * 2, *[{"executed": {"b": [1], "c": [0, 1]}, "wrong": []}] * 2)
    (tmp_path / "after").mkdir()
    after = dataclasses.replace(before, folder=tmp_path / "after", judge=later)
    executed = after.executed([ONE, TWO], ("run",))
    assert [parts for *_, parts in later.requests] == [["run"], ["run"], ["b", "c"], ["b", "c"]], "b was wrong before"
    assert executed.parts[NAMES[0]]["run"] == {"a": [0], "b": [1], "c": [0, 1]}


def test_a_mutant_that_is_new_meets_what_executes_others_of_its_file() -> None:
    f, g, h = (dataclasses.replace(ONE, function=name, diff=(f"-{name}", "+2")) for name in "fgh")
    before = Executed.of([f, g, TWO], NAMES)
    before.parts[NAMES[0]]["run"] = {"a": [0], "b": [1], "c": [2]}
    later = [dataclasses.replace(f, diff=("-f", "+3")), h, TWO, mutant("three.py")]
    after = Executed.of(later, NAMES)
    after.take(before.text(("run",), sound=False))
    assert after.parts[NAMES[0]]["run"] == {"a": [0, 1, 3], "b": [0, 1, 3], "c": [2, 3]}


def test_decorated_functions_are_changed_and_stay_decorated() -> None:
    """mutmut sees no decorator, and what it changed gets the same ones."""
    source = "import functools\n\n\nclass A:\n    @functools.lru_cache(\n        maxsize=3,\n    )\n"
    source += "    def f(self, a):\n        return a + 1\n"
    plain = mutant_subjects._undecorated(source)
    (function,) = (node for node in ast.walk(ast.parse(plain)) if isinstance(node, ast.FunctionDef))
    assert not function.decorator_list and function.lineno == 8, "lines stay where they were"
    assert mutant_subjects._decorated(plain.replace("a + 1", "a - 1")) == source.replace("a + 1", "a - 1")


def test_a_mutant_is_the_same_whatever_is_written_about_the_code() -> None:
    plain = dataclasses.replace(ONE, source="def f():\n    return 2\n")
    told = dataclasses.replace(ONE, source='"""Told."""\ndef f():\n    """Told."""\n    return 2  # told\n')
    other = dataclasses.replace(ONE, source="def f():\n    return 3\n")
    assert plain.identity == told.identity != other.identity
    assert dataclasses.replace(ONE, source="class A:\n    pass\n", first=9).key == ONE.key


def test_what_only_a_kind_that_was_not_measured_may_execute_is_left_for_later(tmp_path: Path) -> None:
    executed = Executed(EXECUTED.mutants, parts={name: {"run": EXECUTED.parts[name]["run"]} for name in NAMES})
    fate = sampled_mutants.judge_mutant(bench(tmp_path, Answers()), executed, TWO, ("run",), None)
    assert (fate.stage, fate.executed, fate.stages) == ("", True, ["run"])


def test_intervals_are_wilsons() -> None:
    low, high = mutant_report.wilson(90, 100)
    assert (round(low, 4), round(high, 4)) == (0.8256, 0.9448)  # Newcombe 1998, method 3


def raises(_: Request, __: Path) -> Answer:
    raise KeyError("a")


def sleeps(_: Request, __: Path) -> Answer:
    while True:
        pass


def test_a_judge_that_stops_or_hangs_is_no_pass(tmp_path: Path) -> None:
    asker, end = os.pipe()
    assert mutant_judge.in_a_fork(Request("run", "x"), tmp_path, asker, raises).failure == "KeyError: 'a'"
    answer = mutant_judge.in_a_fork(Request("run", "x", limit=0.2), tmp_path, asker, sleeps)
    assert (answer.hung, answer.failure) == (True, "not ended after 0 s")
    os.close(end)
    assert mutant_judge.in_a_fork(Request("run", "x"), tmp_path, asker, sleeps).failure == "the judging process died"
    os.close(asker)
