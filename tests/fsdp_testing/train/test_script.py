"""fsdp-verify train: right scripts of several styles pass, unmodified; each classic mistake is found and its cause named."""

from __future__ import annotations

import os
import re
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from fsdp_testing import check_script
from fsdp_testing.cases.records import Verdict
from fsdp_testing.errors import InvalidArgument
from fsdp_testing.train import running, surroundings
from fsdp_testing.train import script as script_module
from fsdp_testing.train.running import Runner
from fsdp_testing.train.script import Launch, ScriptDiffers, ScriptUndecided, examine

SCRIPTS = Path(__file__).parent


def judge(script, *arguments, sizes=(2,), steps=2, **options):
    launch = Launch(str(SCRIPTS / f"with_{script}.py"), arguments, steps=steps, isolation="warm", **options)
    return examine(launch, sizes)


@pytest.mark.parametrize(
    ("script", "arguments", "sizes", "how"),
    [
        ("ddp", (), (2, 3), r"given the rows of all ranks \(the items of its DataLoader\)"),
        ("ddp", ("--accumulate", "2", "--dropout", "0.1"), (2,), "the items of its DataLoader"),
        ("ddp", ("--dtype", "float32", "--optimizer", "AdamW"), (2,), "the items of its DataLoader"),
        ("ddp", ("--closure",), (2,), "the items of its DataLoader"),
        ("shards", ("--shard", "flat"), (2,), "with the same rows at each step"),
        ("shards", ("--shard", "fsdp2"), (3,), "with the same rows at each step"),
        ("shards", ("--shard", "reference"), (2,), "with the same rows at each step"),
        ("one_stepper", (), (2, 3), "with the same rows at each step"),
        ("one_stepper", ("--reduce",), (2,), "with the same rows at each step"),
        ("indices", (), (2, 3), r"\(the arguments of forward\)"),
        ("indices", ("--loss", "marked"), (2,), r"\(the line marked with fsdp_testing.batch\)"),
    ],
)
def test_a_right_script_passes_as_it_is(script, arguments, sizes, how):
    report = judge(script, *arguments, sizes=sizes)
    assert [judgement.verdict for judgement in report.judgements] == [Verdict.PASS] * len(sizes)
    assert re.search(how, report.judgements[0].sentence), str(report)
    compared = report.judgements[0].compared[0]
    assert re.match(
        r"compared at each of 2 steps: loss, .*learning rate.*gradients .*parameters after .* [1-9]\d* rows", compared
    )
    state = "compared: the state of the random generator of torch"
    lines = [line for line in report.judgements[0].compared if state in line]
    assert [line.endswith("each rank's own") for line in lines] == [script == "indices"], lines
    assert any(
        line.startswith("compared: the state of the random generator of") for line in report.judgements[0].compared
    )


def test_an_evaluation_of_the_training_rows_is_no_pass_of_the_training():
    report = judge("ddp", "--evaluate", steps=6)
    assert report.verdict is Verdict.PASS, str(report)


def test_actors_beside_a_learner_give_no_verdict():
    report = judge("one_stepper", "--actors", steps=4)
    assert report.verdict is Verdict.UNKNOWN, str(report)
    assert "rank(s) 1 of 2 run no backward pass and make no step, while the others make 4" in str(report), str(report)
    # Ended by the number of steps: the actor waits for the learner, and reports nothing.
    report = judge("one_stepper", "--actors", steps=2)
    assert report.verdict is Verdict.UNKNOWN, str(report)
    assert "rank(s) 1 of 2 run no backward pass and make no step, while the others make all" in str(report), str(report)


@pytest.mark.parametrize(
    ("script", "arguments", "message"),
    [
        ("ddp", ("--mistake", "twice"), r"loss at step 0.*divided by the number of ranks once too often"),
        ("ddp", ("--closure", "--mistake", "twice"), r"loss at step 0.*divided by the number of ranks once too often"),
        ("ddp", ("--mistake", "undivided"), r"every rank trains on the same rows.*data are not divided"),
        ("ddp", ("--mistake", "batch norm"), r"BatchNorm normalises the rows of each rank alone"),
        (
            "ddp",
            ("--mistake", "scaled rate"),
            r"learning rate is multiplied by the number of ranks \(2 times\).* by arguments",
        ),
        (
            "ddp",
            ("--mistake", "counted ranks"),
            r"until step 1 the learning rate is that of one process. It counts ranks",
        ),
        ("ddp", ("--mistake", "limit by ranks"), r"gradients are clipped to 0.05, and in one process to 0.1"),
        (
            "ddp",
            ("--mistake", "one optimizer"),
            r"the ranks step 4, 2 tensors. A rank does not step one of its optimizers",
        ),
        ("ddp", ("--mistake", "clamped on one"), r"before step 1 they are changed outside .*, differently on ranks"),
        ("ddp", ("--mistake", "same order"), r"set_epoch is not called"),
        ("ddp", ("--mistake", "boundary"), r"parameter 0.weight differs .* no_sync boundary is off by one"),
        (
            "ddp",
            ("--mistake", "unfrozen"),
            r"at step 1. Cause: the gradients of 2 of 4 .*They have none before this step.* Wrap the model after it is unfrozen",
        ),
        (
            "ddp",
            ("--mistake", "decayed twice"),
            r"step 1 .*changed outside of the optimizer's step, first .*decayed twice",
        ),
        ("ddp", ("--mistake", "local norm"), r"only rank\(s\) 0 clip the gradient"),
        ("ddp", ("--mistake", "early stop"), r"rank 0 waits in all_reduce.*an early stop on a local value"),
        (
            "ddp",
            ("--mistake", "loss of own rows"),
            r"loss at step 0.*scale their losses: rank 0 by 1, rank 1 by 2",
        ),
        (
            "shards",
            ("--shard", "fsdp2", "--mistake", "boundary"),
            r"no parameter has a gradient .* no_sync boundary is off by one",
        ),
        (
            "shards",
            ("--shard", "fsdp2", "--mistake", "optimizer first"),
            r"none of which belongs .* made before the model was wrapped",
        ),
        ("shards", ("--shard", "fsdp2", "--mistake", "average"), r"kept as 'average', 0.* this copy of them does not"),
        ("one_stepper", ("--mistake", "summed"), "gradients are summed over ranks"),
        (
            "one_stepper",
            ("--mistake", "one is kept"),
            r"0.weight differs between ranks 0 and 1.* rank\(s\) 1 step no optimizer, and are not sent this parameter",
        ),
        (
            "one_stepper",
            ("--mistake", "none are sent"),
            r"different numbers of optimizer steps: .* sends nobody the weights",
        ),
        ("indices", ("--mistake", "seeds"), r"start from different weights.*seed depends on the rank"),
        ("indices", ("--mistake", "not divided"), r"not divided by the number of accumulation steps"),
        ("indices", ("--mistake", "unreduced"), r"differs between ranks 0 and 1 .* gradients are not reduced"),
        ("indices", ("--mistake", "step skipped"), r"ranks make different numbers of optimizer steps: 3, 2"),
        ("indices", ("--mistake", "hang"), r"ranks disagree: .*barrier.*do not run the same collectives"),
        ("indices", ("--mistake", "exit"), r"2 ranks: FAIL: did not end well: .*died with exit code 0"),
    ],
)
def test_each_mistake_is_found_and_its_cause_named(script, arguments, message):
    report = judge(script, *arguments, steps=8 if {"same order", "step skipped", "early stop"} & {*arguments} else 2)
    assert report.verdict is Verdict.FAIL, str(report)
    assert re.search(message, str(report), re.S), str(report)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--loss", "outside"), r"2 ranks: unknown: .*Mark the line .*`x, y = fsdp_testing.batch\(x, y\)`"),
        (("--mistake", "argument"), r"one process .*usage: with_indices.py --mistake argument CONFIG"),
        (("--mistake", "spawn"), r"one process starts its own processes with torch.multiprocessing"),
        (("--mistake", "download"), r"one process downloads something: it asked for weights.invalid and got URLError"),
        (("--mistake", "never"), r"one process never steps a torch.optim optimizer"),
        (("--mistake", "unseeded"), r"one process does not repeat itself: two runs differ, first in loss at step 0"),
        (("--mistake", "shape"), r"2 ranks: unknown: has other parameters than one process has, first parameter head"),
        (("--nonsense",), r"(?s)one process ended with exit code 2.*unrecognized arguments: --nonsense"),
    ],
)
def test_what_cannot_be_judged_is_unknown_with_one_sentence(arguments, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_bytes(bytes(range(200)))
    Path("log.txt").write_text("mine")
    report = judge("indices", *arguments)
    assert report.verdict is Verdict.UNKNOWN, str(report)
    assert re.search(message, str(report)), str(report)
    assert {path.name: path.read_bytes()[:4] for path in tmp_path.iterdir()} == {
        "text.txt": b"\0\1\2\3",
        "log.txt": b"mine",
    }


def test_one_process_that_never_ends_is_told_what_to_try():
    report = judge("indices", "--mistake", "endless", timeout=1.0)
    assert report.verdict is Verdict.UNKNOWN, str(report)
    assert re.search(
        r"does not reach the steps that are compared: rank 0 hung after 1 s.*Compare fewer --steps.*raise --timeout.*"
        r"bare `except:`",
        str(report),
    ), str(report)


def test_ranks_that_share_processors_have_more_time_where_one_process_took_long(monkeypatch):
    monkeypatch.setattr(running, "usable_processors", lambda: 2)
    runner = Runner(Launch("train.py", timeout=40.0), SimpleNamespace())
    assert [runner.timeout(size) for size in (1, 2, 8)] == [40.0, 40.0, 40.0]
    runner.seconds.extend([5.0, 20.0])
    assert [runner.timeout(size) for size in (1, 2, 8)] == [40.0, 60.0, 240.0]


def test_another_machine_that_a_script_asks_is_named_beside_the_verdict():
    alone = SimpleNamespace(ranks=[SimpleNamespace(hosts=("hub.invalid",), outside=())])
    assert ["hub.invalid" in remark for remark in script_module._touched(alone, alone)] == [True]


def test_of_two_ranks_that_write_at_one_moment_the_first_replaces_the_link(tmp_path):
    """Both have seen the link; when the second comes to replace it, what the first wrote is there."""
    mine, shown = tmp_path / "mine.txt", tmp_path / "shown.txt"
    mine.write_text("mine")
    shown.symlink_to(mine)
    surroundings._replace(shown, empty=True)
    shown.write_text("of rank 0")
    surroundings._replace(shown, empty=True)
    assert (mine.read_text(), shown.read_text()) == ("mine", "of rank 0")


def _write_everywhere(folders):
    """Write in each way to what is there, to new files, and to folders."""
    for folder in folders:
        torch.save("run", f"{folder}/deep/last.pt")
        Path(folder, "deep", "new.txt").write_text("run")
        Path(folder, "made").mkdir()
        os.rename(f"{folder}/deep/gone.txt", f"{folder}/deep/moved.txt")
        with closing(sqlite3.connect(f"{folder}/deep/runs.db")) as runs, runs:
            runs.execute("insert into runs values (1)")
        os.utime(f"{folder}/deep/old.txt", (0, 0))
        with open(f"{folder}/deep/old.txt", "a") as file:
            file.write(" and of the run")
        before = Path.cwd()
        os.chdir(f"{folder}/entered")
        Path("here.txt").write_text("run")
        os.chdir(before)
        shutil.rmtree(f"{folder}/removed")


@pytest.mark.parametrize("most", [5000, 3])
def test_files_at_relative_paths_stay_as_they_are_however_many_there_are(most, tmp_path, monkeypatch):
    mine, run = tmp_path / "mine", tmp_path / "run"
    run.mkdir()
    for folder in "abc":
        for name in ("deep", "entered", "removed"):
            (mine / folder / name).mkdir(parents=True)
            for file in ("last.pt", "old.txt", "gone.txt", "here.txt"):
                (mine / folder / name / file).write_text("mine")
        with closing(sqlite3.connect(mine / folder / "deep" / "runs.db")) as runs, runs:
            runs.execute("create table runs (number)")
    (mine / "linked").symlink_to(mine / "a")
    before = {path: (path.read_bytes(), path.stat().st_mtime) for path in mine.rglob("*") if path.is_file()}
    monkeypatch.setattr(surroundings, "_MOST_FILES", most)
    surroundings.show_files(mine, run)
    with surroundings.in_folder(str(run)):
        _write_everywhere(["a", "b", "c", "linked"])
        assert (Path("a/deep/old.txt").read_text(), Path("b/entered/old.txt").read_text()) == (
            "mine and of the run",
            "mine",
        )
        with closing(sqlite3.connect("linked/deep/runs.db")) as runs:
            assert runs.execute("select * from runs").fetchall() == [(1,)]
        assert surroundings.outside == set()
    assert {path: (path.read_bytes(), path.stat().st_mtime) for path in mine.rglob("*") if path.is_file()} == before


def test_a_module_is_started_where_it_lies_and_a_file_that_each_run_replaces_is_named(tmp_path, monkeypatch):
    place, elsewhere = tmp_path / "here", tmp_path / "log.txt"
    place.mkdir()
    (place / "training_of_a_user.py").write_text((SCRIPTS / "with_extras.py").read_text())
    monkeypatch.chdir(place)
    (place / "started_as_module.py").write_text(
        "import pathlib, runpy, sys\nlog = pathlib.Path(sys.argv.pop())\nlog.write_text('begun')\n"
        "runpy.run_path('training_of_a_user.py')\n"
    )
    launch = Launch("started_as_module", (str(elsewhere),), is_module=True, steps=2, isolation="warm")
    report = examine(launch, (2,))
    assert report.verdict is Verdict.PASS, str(report)
    assert f"writes to {elsewhere}, outside the current folder: every run overwrites it" in str(report)
    assert sorted(path.name for path in place.iterdir() if path.suffix == ".pt") == []


@pytest.mark.parametrize(
    ("script", "sizes", "message"), [("none", (2,), "expected a file"), ("ddp", (1,), "expected one above 1")]
)
def test_bad_arguments_are_refused_before_anything_runs(script, sizes, message):
    with pytest.raises(InvalidArgument, match=message):
        judge(script, sizes=sizes)


def test_a_script_is_judged_in_new_processes_and_raises_what_it_is():
    with pytest.raises(ScriptDiffers, match="gradients are not reduced"):
        check_script(SCRIPTS / "with_indices.py", ["--mistake", "unreduced"], world_sizes=(2,), steps=1)
    with pytest.raises(ScriptUndecided, match="never steps"):
        check_script(SCRIPTS / "with_indices.py", ["--mistake", "never"], world_sizes=(2,), steps=1)
