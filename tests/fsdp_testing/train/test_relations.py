"""train --vary and --against: what must change nothing changes nothing in right scripts, and the first difference is named."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import venv
from dataclasses import replace
from pathlib import Path

import pytest

import fsdp_testing
from fsdp_testing.cases.records import Verdict
from fsdp_testing.errors import InvalidArgument
from fsdp_testing.train import relations
from fsdp_testing.train.script import Launch, examine

SCRIPT = Path(__file__).parent / "with_relations.py"
MICRO_BATCHES = ("--accumulate", "{k}", "--batch", "{4/k}")
K, CHECKPOINT = (("k=1,2",), ("", "--checkpoint"))
LAUNCH = Launch(str(SCRIPT), steps=2, isolation="warm")


def judge(vary, *arguments, sizes=(1,), **options):
    """Judge the script on one process; there is no other number of ranks then, so that one judgement is left."""
    return examine(replace(LAUNCH, arguments=arguments, vary=tuple(vary), **options), sizes)


def test_a_right_script_passes_each_relation_and_they_stand_in_one_table():
    report = judge([K, CHECKPOINT, ("order",), ("padding",)], *MICRO_BATCHES, sizes=(2,))
    assert [one.verdict for one in report.judgements] == [Verdict.PASS] * 5, str(report)
    assert [one.relation for one in report.judgements] == [
        "",
        "--vary order",
        "--vary padding",
        "--vary k=2",
        '--vary "" "--checkpoint"',
    ]
    table = report.relations()
    assert table is not None
    rows = [[row.label, *(cell.text for cell in row.cells)] for group in table.groups for row in group.rows]
    assert rows[0] == ["2 ranks and one process", "=", "=", "pass", ""]
    assert rows[3] == ["--vary k=2 on 2 ranks", "=", "=", "pass", ""]
    assert report.conclusion.endswith('pass of --vary "" "--checkpoint" on 2 ranks')
    assert report.exit_code == 0


@pytest.mark.parametrize(
    ("mistake", "vary", "message"),
    [
        ("not divided", K, r"loss at step 0|gradient.*the loss is not divided by the number of accumulation steps"),
        ("cleared", K, r"of a micro-batch|lost|cleared|not counted|lacks"),
        ("rate", K, r"learning rate at step 0 .*Cause: the learning rate depends on what is varied"),
        ("checkpoint", CHECKPOINT, r"differs from no further arguments: loss at step 0"),
        ("rows", CHECKPOINT, r"takes different rows than no further arguments at step 0, though equally many"),
        ("raise", CHECKPOINT, r"did not end well: .*ValueError: checkpointing lacks its argument"),
        ("packing", ("", "--packing"), r"differs from no further arguments: loss at step 0"),
        ("order", ("order",), r"differs from its rows unchanged: loss at step 0"),
        ("padding", ("padding",), r"differs from its rows unchanged: loss at step 0"),
    ],
)
def test_each_mistake_in_what_is_varied_fails(mistake, vary, message):
    report = judge([vary], *MICRO_BATCHES, "--mistake", mistake) if vary == K else judge([vary], "--mistake", mistake)
    (judgement,) = report.judgements
    assert judgement.verdict is Verdict.FAIL, str(report)
    assert re.search(message, judgement.sentence), str(report)


def test_rows_that_are_packed_are_known_beside_a_loader_that_validates():
    (judgement,) = judge([("", "--packing")], "--validate", "--mistake", "packing").judgements
    assert judgement.verdict is Verdict.FAIL, judgement
    assert "differs from no further arguments: loss at step 0" in judgement.sentence, judgement


def test_rows_that_are_packed_into_one_are_the_same_rows_of_the_dataset():
    report = judge([("", "--packing")])
    assert report.verdict is Verdict.PASS, str(report)
    assert "with other arguments of forward" in str(report), str(report)


@pytest.mark.parametrize(
    ("vary", "arguments", "message"),
    [
        (
            K,
            ("--accumulate", "{k}"),
            r"takes 8 rows at step 0 where k=1 takes 4. Keep the total batch of a step: --vary k=1,2",
        ),
        (("", "--nonsense"), (), r"ended with exit code 2"),
    ],
)
def test_what_asks_something_else_is_unknown(vary, arguments, message):
    report = judge([vary], *arguments)
    assert report.verdict is Verdict.UNKNOWN, str(report)
    assert re.search(message, str(report)), str(report)


@pytest.mark.parametrize(
    ("vary", "arguments", "message"),
    [
        (("ordre",), (), r"expected order, padding, NAME=VALUE,VALUE or two texts of arguments .* got 'ordre'"),
        (("k=2",), ("{k}",), r"expected two values or more, got k=2. Write --vary k=1,2,4"),
        (("k=1,2",), ("--x", "{j}"), r"expected \{k\} in the arguments of the script, got --x '\{j\}'"),
        (("k=1,3",), ("{8/k}",), r"expected whole numbers, got \{8/k\} with k=3: is not a whole number"),
        (("k=a,b",), ("{8/k}",), r"expected whole numbers, got \{8/k\} with k=b"),
    ],
)
def test_a_relation_that_is_none_is_refused_with_what_to_write(vary, arguments, message):
    with pytest.raises(InvalidArgument, match=message):
        relations.read([vary], arguments)


def test_arguments_are_filled_with_the_first_values_and_one_is_varied_at_a_time():
    given = ["--a", "{k}", "--b", "{8/k}", '{"lr": 1}', "--m", "{mode}"]
    vary = [("k=1,2,4",), ("mode=x,y",), ("", "--f"), ("", "--g 1")]
    base, variations, rows = relations.read([*vary, ("order",)], given)
    assert base == ("--a", "1", "--b", "8", '{"lr": 1}', "--m", "x")
    assert rows == ("order",)
    assert [one.arguments for one in variations] == [
        ("--a", "2", "--b", "4", '{"lr": 1}', "--m", "x"),
        ("--a", "4", "--b", "2", '{"lr": 1}', "--m", "x"),
        ("--a", "1", "--b", "8", '{"lr": 1}', "--m", "y"),
        (*base, "--f"),
        (*base, "--g", "1"),
    ]


@pytest.fixture
def repository(tmp_path, monkeypatch):
    """Give a repository with the script, of which an earlier commit had another rate."""
    place = tmp_path / "repository"
    place.mkdir()

    def git(*arguments):
        who = ("-c", "user.name=a", "-c", "user.email=a@b.invalid")
        subprocess.run(["git", *who, *arguments], cwd=place, check=True, capture_output=True)

    git("init", "-q")
    shutil.copy(SCRIPT, place)
    module = place / "rate_of_this_version.py"
    for rate in ("0.1", "0.2", "0.1"):
        module.write_text(f"RATE = {rate}\n")
        git("add", ".")
        git("commit", "-q", "--allow-empty", "-m", f"rate {rate}")
    monkeypatch.chdir(place)
    return place


def test_a_commit_is_run_beside_this_version_and_nothing_stays(repository):
    before = sorted(path for path in repository.rglob("*") if "__pycache__" not in path.parts)
    report = examine(replace(LAUNCH, script="with_relations.py", against=("HEAD~2", "HEAD~1")), (1,))
    same, other = report.judgements
    assert same.verdict is Verdict.PASS, str(report)
    assert other.verdict is Verdict.FAIL, str(report)
    assert "differs from this version: learning rate at step 0" in other.sentence
    assert "rate of " not in other.sentence
    assert sorted(path for path in repository.rglob("*") if "__pycache__" not in path.parts) == before
    with pytest.raises(
        InvalidArgument, match=r"or a commit of .*repository, got 'nowhere'. See `git -C .* log --oneline`"
    ):
        examine(replace(LAUNCH, script="with_relations.py", against=("nowhere",)), (1,))


def test_another_environment_runs_the_script_with_its_own_packages(tmp_path, monkeypatch):
    venv.create(tmp_path / "other", with_pip=False)
    with pytest.raises(InvalidArgument, match=r"lacks fsdp-testing and torch, .* -m pip install torch fsdp-testing=="):
        examine(replace(LAUNCH, against=(str(tmp_path / "other"),)), (1,))
    (packages,) = (tmp_path / "other").glob("lib/python*/site-packages")
    ours = str(Path(fsdp_testing.__file__).parents[1])  # a checkout, or where the wheel is installed
    (packages / "beside.pth").write_text("\n".join([ours, *(path for path in sys.path if "site-packages" in path)]))
    # Not sitecustomize.py: Debian's Python has one of its own, which comes before.
    (packages / "rate.pth").write_text("import fractions; fractions.RATE = 0.3\n")
    script = tmp_path / "script.py"
    here = "import fractions\nRATE = getattr(fractions, 'RATE', 0.1)\n"
    script.write_text(
        SCRIPT.read_text().replace("import rate_of_this_version\n", here).replace("rate_of_this_version.", "")
    )
    report = examine(replace(LAUNCH, script=str(script), against=(str(tmp_path / "other"),)), (1,))
    (judgement,) = report.judgements
    assert judgement.verdict is Verdict.FAIL, str(report)
    assert re.search(r"learning rate at step 0 is off by 0.2 ", judgement.sentence), str(report)
