"""`train`: what is seen while it runs and at the end, its files, and one true sentence for each script that does not train."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from fsdp_testing.cli.main import parser

SCRIPT = """\
import sys
import time

import torch
import torch.distributed as dist
from torch import nn


def begin(how):
    print("this script will", how)
    if how == "raise":
        raise ValueError("the labels are missing")
    if how == "raise on rank 1" and dist.get_rank() == 1:
        raise ValueError("the labels are missing")
    if how == "ask for CUDA":
        torch.zeros(1).cuda()
    if how == "stop with a message":
        sys.exit("set DATA first")
    if how == "stop with 3":
        sys.exit(3)
    if how == "want arguments":
        sys.stderr.write("error: --data is required\\n")
        sys.exit(2)
    if how == "hang":
        time.sleep(1000)
    if how == "wait on rank 1" and dist.get_rank() == 1:
        dist.barrier()


dist.init_process_group("gloo")
begin(sys.argv[1])
torch.manual_seed(0)
model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(4, 1), nn.Dropout(0.5 if "drop" in sys.argv else 0.0)))
rate = 0.1 * (dist.get_world_size() if "scale" in sys.argv else 1)
optimizer = torch.optim.SGD(model.parameters(), lr=rate)
rows = torch.randn(4, 6, 4)
for step in range(4):
    model(rows[step][dist.get_rank() :: dist.get_world_size()]).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.fixture
def train(verify: Callable[..., object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., object]:
    monkeypatch.chdir(tmp_path)
    Path("script.py").write_text(SCRIPT, encoding="utf-8")

    def run(*arguments: str, options: tuple[str, ...] = ()) -> object:
        return verify("train", "--world-sizes", "2", "--steps", "2", *options, "script.py", *arguments)

    return run


def line_of(text: str) -> int:
    return next(number for number, line in enumerate(SCRIPT.splitlines(), 1) if text in line)


def test_our_options_after_the_script_go_to_the_script_and_that_is_said(train):
    ended = train("train", "--steps=3", "--epochs", "1")
    assert "note: --steps=3 after SCRIPT is the script's. Put options of fsdp-verify before SCRIPT." in ended.out


def test_each_run_is_announced_and_the_last_line_has_verdict_and_exit_code(train):
    ended = train("train")
    stages = [line.split(" s  ")[1] for line in ended.out.splitlines() if re.match(r" *\d+\.\d s  ", line)]
    assert stages == ["one process", "one process, again", "2 ranks"]
    assert ended.code == 0
    assert ended.out.splitlines()[-1] == "exit code 0: script.py: pass on 2 ranks"
    assert "this script will" not in ended.out
    assert "dropout" not in ended.out
    wrong = train("train", "scale")
    assert wrong.code == 1
    assert wrong.out.splitlines()[-1] == "exit code 1: script.py: FAIL on 2 ranks"


def test_output_of_the_script_is_shown_when_asked_for(train):
    out = train("train", options=("--show-output",)).out
    assert len(re.findall(r"^rank 0: this script will train$", out, re.M)) == 3
    assert len(re.findall(r"^rank 1: this script will train$", out, re.M)) == 1


def test_a_pass_says_that_dropout_was_off(train):
    ended = train("train", "drop")
    assert ended.code == 0
    assert "not compared: dropout, switched off" in ended.out


@pytest.mark.parametrize(
    ("how", "sentence", "place"),
    [
        ("raise", r"rank 0 raised ValueError: the labels are missing\. .*raised at {}\.", "raise ValueError"),
        (
            "ask for CUDA",
            r"asks for a CUDA device, and this machine has none .*raised at {}\. Let it use the CPU",
            ".cuda()",
        ),
        ("stop with a message", r'ended itself by sys.exit\("set DATA first"\) at {}\.', "set DATA first"),
        ("stop with 3", r"ended with exit code 3 at {}\.", "sys.exit(3)"),
        (
            "want arguments",
            r"ended with exit code 2 at {}\. Give the script the arguments it needs.*--data is required",
            "sys.exit(2)",
        ),
        ("hang", r"rank 0 hung after 4 s.* rank 0 is at {}\.", "time.sleep"),
    ],
)
def test_a_script_that_does_not_train_is_unknown_with_its_place_and_what_it_said(train, how, sentence, place):
    ended = train(how, options=("--timeout", "4"))
    assert ended.code == 3, ended.out
    assert re.search(sentence.format(f"script.py:{line_of(place)}"), ended.out, re.S), ended.out
    assert f"stdout of rank 0: this script will {how}" in ended.out
    assert ended.out.splitlines()[-1] == "exit code 3: script.py: unknown on 1 rank"


def test_what_only_one_rank_does_is_told_with_its_place(train):
    raised = train("raise on rank 1")
    assert re.search(
        rf"rank 1 raised ValueError.*rank 1 raised at script.py:{line_of('raise ValueError') + 2}", raised.out
    )
    assert "stdout of rank 1: this script will raise on rank 1" in raised.out
    waits = train("wait on rank 1")
    assert waits.code == 1, waits.out


def test_the_report_is_written_as_a_page_and_as_a_document(train, tmp_path):
    ended = train("train", "scale", options=("--html", "page", "--json", "all.json"))
    assert {"written: page/index.html", "written: all.json"} <= {*ended.out.splitlines()}
    found = json.loads(Path("all.json").read_text())
    assert (found["format"], found["version"], found["script"]) == ("fsdp_testing/script", 1, "script.py")
    assert (found["verdict"], found["exit_code"], found["arguments"]) == ("fail", 1, ["train", "scale"])
    (judgement,) = found["judgements"]
    assert (judgement["size"], judgement["verdict"]) == (2, "fail")
    assert "the learning rate is multiplied by the number of ranks" in judgement["sentence"]
    page = Path("page/index.html").read_text()
    assert "Exit code 1: script.py: FAIL on 2 ranks" in page
    assert "the learning rate is multiplied by the number of ranks" in page
    assert train("train", options=("--html", "one.html")).code == 0
    assert "pass on 2 ranks" in Path("one.html").read_text()
    assert train("train", options=("--json", str(tmp_path))).code == 2


@pytest.mark.parametrize(
    ("words", "resumed", "rest"),
    [
        (["--resume-args", "--x=y", "a.py", "b"], "--x=y", ["b"]),
        (["--resume-args", "--load", "--steps", "4", "a.py"], "--load", []),
        (["--show-output", "--resume-args", "--load last.pt", "a.py"], "--load last.pt", []),
        (["--resume-args=--load", "a.py", "--resume-args", "-z"], "--load", ["--resume-args", "-z"]),
        (["--steps", "3", "a.py", "--resume-args", "-z"], "", ["--resume-args", "-z"]),
        (["-m", "--resume-args", "-v", "package.main"], "-v", []),
    ],
)
def test_arguments_of_the_resumed_script_may_begin_with_a_dash(words, resumed, rest):
    options = parser().parse_args(["train", *words])
    assert (options.resume_args, options.arguments) == (resumed, rest)
