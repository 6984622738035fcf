"""`run`: what it asks for, what it prints and writes, with which exit code; judged by a stand-in, and for real once."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import fsdp_testing.checks.conformance
from fsdp_testing.cases.records import CaseOutcome, CheckResult, RunReport, Verdict
from fsdp_testing.checks.findings.known import shipped_text
from fsdp_testing.errors import InvalidArgument, InvalidImplementation, PoolBroken


def result(check: str, verdict: Verdict) -> CheckResult:
    cases = (CaseOutcome("0" * 12, verdict, 2, "full_shard", comparisons=3),)
    return CheckResult("torch-ddp", check, f"what {check} shows", (), verdict, cases=cases)


class Judge:
    """Stands in for `run_conformance`: remembers how it was asked and gives the verdicts it is to give."""

    def __init__(self, *verdicts: Verdict, error: BaseException | None = None) -> None:
        self.verdicts = verdicts
        self.error = error
        self.asked: dict[str, Any] = {}

    def __call__(self, *names: str, listener: Any, **asked: Any) -> RunReport:
        self.asked = {"names": names, **asked}
        results = tuple(result(f"s.c{index}", verdict) for index, verdict in enumerate(self.verdicts))
        listener.planned(len(results))
        for found in results:
            listener.started("torch-ddp", found.check)
            listener.finished(found)
        if self.error is not None:
            raise self.error
        return RunReport(results, names, {"torch": "2.x"}, asked["world_sizes"] or (), asked["backend"], 1.0)


@pytest.fixture
def judge(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Judge]:
    def install(*verdicts: Verdict, error: BaseException | None = None) -> Judge:
        stand_in = Judge(*verdicts, error=error)
        monkeypatch.setattr(fsdp_testing.checks.conformance, "run_conformance", stand_in)
        return stand_in

    return install


@pytest.mark.parametrize(
    ("verdicts", "code"),
    [
        ((Verdict.PASS,), 0),
        ((Verdict.PASS, Verdict.NOT_CLAIMED), 0),
        ((Verdict.EXPECTED_FAILURE, Verdict.STALE), 0),
        ((Verdict.PASS, Verdict.FAIL), 1),
        ((Verdict.UNKNOWN, Verdict.FAIL), 1),
        ((Verdict.PASS, Verdict.UNKNOWN), 3),
        ((Verdict.NOT_CLAIMED,), 3),
        ((), 3),
    ],
)
def test_exit_codes(
    verify: Callable[..., Any], judge: Callable[..., Judge], verdicts: tuple[Verdict, ...], code: int
) -> None:
    judge(*verdicts)
    ended = verify("run", "torch-ddp")
    assert ended.code == code
    assert ended.out.rstrip().splitlines()[-1].startswith(f"exit code {code}: ")
    assert ended.err == ""


@pytest.mark.parametrize(
    ("error", "code"),
    [(InvalidArgument("a"), 2), (InvalidImplementation("b"), 2), (PoolBroken("c"), 3), (KeyboardInterrupt(), 130)],
)
def test_errors_before_any_result(
    verify: Callable[..., Any], judge: Callable[..., Judge], error: BaseException, code: int
) -> None:
    judge(error=error)
    ended = verify("run", "torch-ddp")
    assert ended.code == code
    assert ended.err.count("\n") == 1


def test_options_reach_the_judge(verify: Callable[..., Any], judge: Callable[..., Judge]) -> None:
    asked = judge(Verdict.PASS)
    options = ("--world-size", "3,2", "--backend", "fake", "--check", "clipping.*", "--check", "training", "--extended")
    assert verify("run", "one", "two", *options, "--timeout", "7.5", "--jobs", "3", "--shard", "2/3").code == 3, (
        "two has no result"
    )
    assert asked.asked.pop("runner")._timeout == 7.5
    assert asked.asked == {
        "names": ("one", "two"),
        "world_sizes": (3, 2),
        "tensor_parallel": 1,
        "backend": "fake",
        "checks": ("clipping.*", "training"),
        "expected_failures": {},
        "extended": True,
        "explain": 10.0,
        "portraits": False,
        "jobs": 3,
        "shard": (2, 3),
    }


@pytest.mark.parametrize(
    ("options", "sizes"), [((), None), (("--backend", "fake"), (2,)), (("--tensor-parallel", "2"), (2,))]
)
def test_without_sizes_each_check_has_its_own_on_gloo(
    verify: Callable[..., Any], judge: Callable[..., Judge], options: tuple[str, ...], sizes: tuple[int, ...] | None
) -> None:
    asked = judge(Verdict.PASS)
    verify("run", "torch-ddp", *options)
    assert asked.asked["world_sizes"] == sizes


def test_how_much_goes_on_at_a_time_is_said_and_too_much_refused(
    verify: Callable[..., Any], judge: Callable[..., Judge]
) -> None:
    asked = judge(Verdict.PASS)
    first = verify("run", "torch-ddp", "--jobs", "1").out.splitlines()[0]
    assert first.startswith("checks at a time: 1 (")
    ended = verify("run", "torch-ddp", "--jobs", "1000")
    assert ended.code == 2
    assert "jobs: expected at most" in ended.err
    assert asked.asked["jobs"] == 1, "nothing ran"


def test_a_misspelt_check_ends_the_run_at_once(verify: Callable[..., Any], judge: Callable[..., Judge]) -> None:
    asked = judge(Verdict.PASS)
    ended = verify("run", "torch-ddp", "--check", "trainin")
    assert (ended.code, ended.out, asked.asked) == (2, "", {})
    assert "got ['trainin']. Did you mean training" in ended.err
    assert ended.err.count("\n") == 1


def test_explanations_can_be_switched_off_and_drawings_are_asked_for(
    verify: Callable[..., Any], judge: Callable[..., Judge], tmp_path: Path
) -> None:
    asked = judge(Verdict.PASS)
    verify("run", "torch-ddp", "--explain", "0", "--html", str(tmp_path))
    assert asked.asked["explain"] == 0.0
    assert asked.asked["portraits"] is True


def test_all_is_every_registered_name(verify: Callable[..., Any], judge: Callable[..., Judge]) -> None:
    asked = judge(Verdict.PASS)
    verify("run", "--all")
    assert {"torch-ddp", "torch-fsdp1", "torch-fsdp2"} <= set(asked.asked["names"])


def test_files_are_written_and_named(verify: Callable[..., Any], judge: Callable[..., Judge], tmp_path: Path) -> None:
    judge(Verdict.PASS, Verdict.FAIL)
    html, data, junit = tmp_path / "html", tmp_path / "r.json", tmp_path / "j" / "r.xml"
    ended = verify("run", "torch-ddp", "--html", str(html), "--json", str(data), "--junit", str(junit))
    assert ended.code == 1
    for path in (html / "index.html", data, junit):
        assert path.stat().st_size > 100
        assert f"written: {path}" in ended.out
    assert json.loads(data.read_text(encoding="utf-8"))["results"][1]["verdict"] == "fail"


def test_a_report_is_compared_with_an_earlier_one(
    verify: Callable[..., Any], judge: Callable[..., Judge], tmp_path: Path
) -> None:
    old, new = tmp_path / "old.json", tmp_path / "new.json"
    judge(Verdict.PASS, Verdict.FAIL)
    verify("run", "torch-ddp", "--json", str(old))
    judge(Verdict.FAIL, Verdict.PASS)
    ended = verify("run", "torch-ddp", "--json", str(new), "--compare", str(old))
    assert ended.code == 1
    changes = [line for line in ended.out.splitlines() if line.strip().startswith(("new: ", "gone: "))]
    assert [line.split()[0] for line in changes] == ["new:", "gone:"]
    assert list(json.loads(new.read_text(encoding="utf-8"))["since"]) == ["torch-ddp s.c0"]
    asked = judge(Verdict.PASS)
    for path in (tmp_path / "absent.json", tmp_path):
        ended = verify("run", "torch-ddp", "--compare", str(path))
        assert (ended.code, asked.asked) == (2, {}), "nothing ran"
        assert str(path) in ended.err


@pytest.mark.parametrize("option", ["--html", "--json", "--junit"])
def test_what_cannot_be_written_is_refused_before_the_run(
    verify: Callable[..., Any], judge: Callable[..., Judge], tmp_path: Path, option: str
) -> None:
    asked = judge(Verdict.PASS)
    (tmp_path / "file").touch()
    ended = verify("run", "torch-ddp", option, str(tmp_path / "file" / "inner"))
    assert ended.code == 2
    assert ended.err.startswith(f"fsdp-verify: {option}: expected a writable path")
    assert ended.err.count("\n") == 1
    assert asked.asked == {}


def test_an_interrupted_run_shows_what_is_known_and_keeps_the_old_report(
    verify: Callable[..., Any], judge: Callable[..., Judge], tmp_path: Path
) -> None:
    judge(Verdict.PASS, Verdict.FAIL, error=KeyboardInterrupt())
    report = tmp_path / "r.json"
    report.write_text("old", encoding="utf-8")
    ended = verify("run", "torch-ddp", "--json", str(report))
    assert ended.code == 130
    assert ended.out.splitlines()[-1].startswith("exit code 130: interrupted: ")
    assert "exit code 1:" not in ended.out
    assert "what s.c1 shows" in ended.out
    assert report.read_text(encoding="utf-8") == "old"
    assert os.listdir(tmp_path) == ["r.json"]


def test_expected_failures_are_read_per_implementation(
    verify: Callable[..., Any], judge: Callable[..., Judge], tmp_path: Path
) -> None:
    asked = judge(Verdict.PASS)
    path, check = tmp_path / "expected.toml", "clipping.norm_1"
    path.write_text(f'[torch-ddp]\n"{check}" = "why"\n[torch-fsdp2]\n"{check}" = "why not"\n', encoding="utf-8")
    ended = verify("run", "torch-ddp", "--expected-failures", str(path))
    assert (ended.code, "is no implementation" in ended.out) == (0, False)
    assert asked.asked["expected_failures"] == {"torch-ddp": {check: "why"}}
    (tmp_path / "page.md").touch()
    path.write_text(
        f'[torch-ddp]\n"{check}" = {{ page = "page.md" }}\n"a.b" = [{{ page = "absent.md" }}]\n', encoding="utf-8"
    )
    verify("run", "torch-ddp", "--expected-failures", str(path))
    said = {check: {"page": str(tmp_path / "page.md")}, "a.b": [{"page": "absent.md"}]}
    assert asked.asked["expected_failures"] == {"torch-ddp": said}, "a page is named by a path that opens"


def test_the_shipped_list_of_expected_failures_has_a_name(
    verify: Callable[..., Any], judge: Callable[..., Judge], tmp_path: Path
) -> None:
    asked, path = judge(Verdict.PASS), tmp_path / "list.toml"
    path.write_text(shipped_text(), encoding="utf-8")
    verify("run", "torch-ddp", "--expected-failures", str(path))
    from_a_file = asked.asked["expected_failures"]
    verify("run", "torch-ddp", "--expected-failures", "shipped")
    assert asked.asked["expected_failures"] == from_a_file != {}


def test_a_table_that_is_nobodys_is_reported(
    verify: Callable[..., Any], judge: Callable[..., Judge], tmp_path: Path
) -> None:
    judge(Verdict.PASS)
    path = tmp_path / "expected.toml"
    path.write_text('[torch-dpp]\n"clipping.norm_1" = "why"\n["other.module:it"]\n[torch-fsdp2]\n', encoding="utf-8")
    ended = verify("run", "torch-ddp", "--expected-failures", str(path))
    assert ended.code == 0
    assert "--expected-failures: [torch-dpp] is not an implementation of this run" in ended.out
    assert ended.out.count("is not an implementation") == 1
    path.write_text('[torch-fsdp2]\n"clipping.norm_one" = "why"\n', encoding="utf-8")
    ended = verify("run", "torch-ddp", "--expected-failures", str(path))
    assert ended.code == 2
    assert "got [torch-fsdp2] clipping.norm_one in " in ended.err


def test_over_tensor_parallelism_a_table_of_its_own_is_expected(
    verify: Callable[..., Any], judge: Callable[..., Judge], tmp_path: Path
) -> None:
    asked = judge(Verdict.PASS)
    path = tmp_path / "expected.toml"
    path.write_text('[torch-ddp]\n"a.b" = "why"\n[torch-ddp.tensor_parallel]\n"c.d" = "cut"\n', encoding="utf-8")
    for axis, expected in ((), {"a.b": "why"}), (("--world-size", "4", "--tensor-parallel", "2"), {"c.d": "cut"}):
        assert verify("run", "torch-ddp", "--expected-failures", str(path), *axis).code == 0
        assert asked.asked["expected_failures"] == {"torch-ddp": expected}


@pytest.mark.parametrize(
    "text", [None, "[", "a = 1", "[torch-fsdp1]\na = 1", "[torch-ddp]\ntensor_parallel = 1", "\udcff"]
)
def test_a_bad_list_of_expected_failures_is_refused(
    verify: Callable[..., Any], judge: Callable[..., Judge], tmp_path: Path, text: str | None
) -> None:
    asked = judge(Verdict.PASS)
    path = tmp_path / "expected.toml"
    if text is not None:
        path.write_bytes(text.encode(errors="surrogateescape"))
    ended = verify("run", "torch-ddp", "--expected-failures", str(path))
    assert ended.code == 2
    assert ended.err.startswith(("fsdp-verify: --expected-failures: ", f"fsdp-verify: {path}: expected a TOML file"))
    assert asked.asked == {}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "got none"),
        (("torch-ddp", "--explain", "-1"), "expected a number of seconds, 0 or more, got '-1'"),
        (("torch-ddp", "--explain", "soon"), "expected a number of seconds, 0 or more, got 'soon'"),
        (("torch-ddp", "--json", ""), "argument --json: expected a path, got ''. The current folder is `.`"),
        (("torch-ddp", "--pairs", "--state", " "), "argument --state: expected a path, got ' '"),
        (("--all", "torch-ddp"), "got both"),
        (("no-such-name",), "'no-such-name'"),
        (("absent_module:attribute",), "absent_module"),
        (("torch-ddp", "torch-ddp"), "more than once"),
        (("torch-ddp", "--check", "no.such.check"), "no.such.check"),
        (("torch-ddp", "--world-size", "0"), "got '0'"),
        (("torch-ddp", "--world-size", "two"), "got 'two'"),
        (("torch-ddp", "--world-size", "2,,3"), "got '2,,3'"),
        (("torch-ddp", "--timeout", "0"), "got '0'"),
        (("torch-ddp", "--timeout", "nan"), "got 'nan'"),
        (("torch-ddp", "--backend", "no-such-backend", "--check", "training"), "no-such-backend"),
        (
            ("torch-ddp", "--backend", "nccl", "--world-size", "999"),
            "--backend nccl: expected it to run 999 ranks here",
        ),
    ],
)
def test_bad_usage_is_one_message_and_exit_code_2(
    verify: Callable[..., Any], arguments: tuple[str, ...], said: str
) -> None:
    ended = verify("run", *arguments)
    assert ended.code == 2
    assert said in ended.err
    assert "Traceback" not in ended.err


def test_for_real(verify: Callable[..., Any], tmp_path: Path) -> None:
    ended = verify("run", "torch-ddp", "--check", "training.sgd*", "--json", str(tmp_path / "r.json"))
    assert ended.code == 0, ended.out + ended.err
    report = RunReport.from_json((tmp_path / "r.json").read_text(encoding="utf-8"))
    assert report.implementations == ("torch-ddp",)
    assert {found.verdict for found in report.results} == {Verdict.PASS}
    assert all(case.comparisons > 0 for found in report.results for case in found.cases)


def test_the_page_of_a_real_run_draws_what_was_traced(verify: Callable[..., Any], tmp_path: Path) -> None:
    ended = verify("run", "torch-fsdp2", "--check", "training.same_batch_twice", "--html", str(tmp_path))
    assert ended.code == 0, ended.out + ended.err
    page = (tmp_path / "index.html").read_text(encoding="utf-8")
    assert page.count('<details class="portrait"') == 2, "one for each strategy that it claims"
    for kind in ("forward", "backward", "collective", "operation", "gathered", "shard0"):
        assert f'<rect class="{kind}"' in page, kind
    assert "within the bound of" in page


def test_parts_of_a_run_are_written_and_merged(verify: Callable[..., Any], tmp_path: Path) -> None:
    def run(*options: str) -> Any:
        return verify("run", "single-process", "--check", "training.float32", "--check", "shared.accumulated", *options)

    files = [str(tmp_path / f"{number}.json") for number in (1, 2)]
    for number, file in enumerate(files, start=1):
        assert run("--shard", f"{number}/2", "--json", file).code == 0
    ended = verify("merge", *files, "--json", str(tmp_path / "all.json"))
    assert ended.code == 0
    whole = RunReport.from_json((tmp_path / "all.json").read_text())
    assert [result.check for result in whole.results] == ["training.float32", "shared.accumulated"]
    refused = verify("merge", files[0], "--json", str(tmp_path / "none.json"))
    assert refused.code == 2
    assert "part 2 of 2 is missing" in refused.err
    assert not (tmp_path / "none.json").exists()
    assert verify("merge", files[0], files[0]).code == verify("merge", str(tmp_path / "no.json")).code == 2


def test_a_fault_is_injected_into_each_case(verify: Callable[..., Any], tmp_path: Path) -> None:
    def run(fault: str) -> Any:
        written = ("--json", str(tmp_path / "report.json"))
        return verify("run", "fsdp_ref-composable", "--check", "training.float32", "--fault", fault, *written)

    assert run("delay=0.01@rank=1,collective=2").code == 0
    report = RunReport.from_json((tmp_path / "report.json").read_text())
    assert report.environment["faults"] == "delay=0.01@rank=1,collective=2"
    assert run("hang@rank=1,collective=100000").code == 3
    report = RunReport.from_json((tmp_path / "report.json").read_text())
    assert "the fault hang@rank=1,collective=100000 was never reached" in str(report.results[0])
    ended = run("crash@rank=0,collective=2")
    assert ended.code == 1
    assert "rank 0 died by SIGKILL" in ended.out


@pytest.mark.parametrize("command", [("run", "single-process"), ("train", "train.py")])
def test_a_fault_that_is_none_is_one_sentence(verify: Callable[..., Any], command: tuple[str, str]) -> None:
    ended = verify(command[0], "--fault", "crush@step=1", command[1])
    assert ended.code == 2
    assert "KIND one of crash, hang, stop" in ended.err
    assert "PLACE one of collective (from 1), step (from 0), save, load (from 1)" in ended.err
    assert "got 'crush@step=1'" in ended.err


@pytest.mark.parametrize("command", [("run", "single-process"), ("train", __file__)])
def test_faults_that_exclude_each_other_are_one_sentence(verify: Callable[..., Any], command: tuple[str, str]) -> None:
    ended = verify(command[0], "--fault", "crash@step=1", "--fault", "hang@step=1", command[1])
    assert ended.code == 2
    assert "expected hang@step=1 to happen, got crash@step=1 before it" in ended.err
