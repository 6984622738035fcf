"""Commands under a launcher: the first process controls, the other one serves; a host that vanishes is named in the report."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import pytest
import torch.distributed as dist

from fsdp_testing.base import env
from fsdp_testing.cases.records import RunReport, Verdict

FOLDERS = (Path(__file__).parents[1] / "search" / "campaign", Path(__file__).parents[2] / "quality" / "broken")
COMMAND = "import sys; from fsdp_testing.cli.main import main; sys.exit(main())"


@pytest.fixture
def launched(
    verify: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Iterator[Callable[..., Any]]:
    """Run a command in two processes of a launcher; this one is the first."""
    store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False, multi_tenant=True)
    started: list[subprocess.Popen[bytes]] = []
    monkeypatch.chdir(tmp_path)
    saved = env.snapshot()
    for folder in FOLDERS:
        monkeypatch.syspath_prepend(str(folder))

    def run(*arguments: str) -> Any:
        variables = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}
        env.update({**variables, "TORCHELASTIC_USE_AGENT_STORE": "True", "RANK": "1"})
        paths = os.pathsep.join([*map(str, FOLDERS), *filter(None, sys.path)])
        environment = {**os.environ, "PYTHONPATH": paths, "KILL_THIS_HOST": "1"}
        started.append(subprocess.Popen([sys.executable, "-c", COMMAND, *arguments], env=environment))
        env.update({"RANK": "0"})
        return verify(*arguments)

    yield run
    env.restore(saved)
    for process in started:
        process.kill()
        process.wait()


def test_run_on_two_hosts_names_the_one_that_vanishes(launched: Callable[..., Any], tmp_path: Path) -> None:
    names = ("training.sgd_momentum", "clipping.not_needed", "clipping.shared_parameters")
    arguments = [word for name in names for word in ("--check", name)]
    files = ("--json", "r.json", "--junit", "r.xml", "--html", "page")
    ended = launched("run", "fuzz_faults:KILLS_HOST", *arguments, "--jobs", "1", "--explain", "5", *files)
    assert ended.code == 3, ended
    report = RunReport.from_json((tmp_path / "r.json").read_text(encoding="utf-8"))
    verdicts = {found.check: found for found in report.results}
    assert verdicts["training.sgd_momentum"].verdict is Verdict.PASS
    lost = "rank 1 was lost with process 1 of the launcher on host"
    assert verdicts["clipping.not_needed"].verdict is Verdict.UNKNOWN
    assert any(lost in case.error for case in verdicts["clipping.not_needed"].cases)
    assert lost in ended.out
    unknown = ET.parse(tmp_path / "r.xml").getroot().findall(".//testcase[@name='clipping.not_needed']/*")
    assert any(lost in (element.text or "") + str(element.get("message")) for element in unknown)
    assert lost in (tmp_path / "page" / "index.html").read_text(encoding="utf-8")


def test_run_writes_its_files_when_a_host_vanishes_while_adapters_are_examined(
    launched: Callable[..., Any], tmp_path: Path
) -> None:
    files = ("--json", "r.json", "--junit", "r.xml", "--html", "page")
    ended = launched("run", "fuzz_faults:KILLS_HOST_AT_ONCE", "--check", "training.sgd_momentum", *files)
    assert ended.code == 3, ended
    (result,) = RunReport.from_json((tmp_path / "r.json").read_text(encoding="utf-8")).results
    assert result.verdict is Verdict.UNKNOWN
    said = "process 1 of the launcher on host"
    assert said in str(result)
    assert said in ended.out + ended.err
    (unknown,) = ET.parse(tmp_path / "r.xml").getroot().findall(".//testcase/error")
    assert said in (unknown.text or "") + str(unknown.get("message"))
    assert said in (tmp_path / "page" / "index.html").read_text(encoding="utf-8")


def test_fuzz_on_two_hosts_names_the_one_that_vanishes(launched: Callable[..., Any], tmp_path: Path) -> None:
    ended = launched("fuzz", "fuzz_faults:KILLS_HOST", "--examples", "60", "--jobs", "1", "--state", "s")
    assert ended.code == 3, ended
    assert "ended early; all results so far are in s" in ended.out
    assert "rank 1 was lost with process 1 of the launcher on host" in ended.err
    assert ended.err.startswith("fsdp-verify: case ")
    assert (tmp_path / "s" / "state.json").is_file()
    assert not list(tmp_path.glob("s/found/*"))


@pytest.mark.parametrize("rank", ["0", "1"])
def test_what_needs_no_ranks_is_refused_once(
    verify: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, rank: str
) -> None:
    for name, value in {"RANK": rank, "WORLD_SIZE": "2", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    ended = verify("list", "capabilities")
    assert ended.code == 2
    assert ("list: expected one process, got one of 2 that torchrun started" in ended.err) is (rank == "0")
    assert not ended.out
