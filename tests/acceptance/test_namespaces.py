"""Two network namespaces are two hosts, joined by torchrun over a link of their own: one that loses its power is named."""

from __future__ import annotations

import os
import select
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

from fsdp_testing.cases.records import RunReport, Verdict

ROOT = Path(__file__).parents[2]
FOLDERS = (ROOT / "tests" / "fsdp_testing" / "search" / "campaign", ROOT / "tests" / "quality" / "broken")
ADDRESSES = ("10.213.57.1", "10.213.57.2")
LOST = "rank 1 was lost with process 1 of the launcher on host second"

TESTS = """
import os, threading
from pathlib import Path
import pytest, socket, torch
import torch.distributed as dist

@pytest.mark.world([2, 3, 4])
def test_sum(world):
    value = torch.ones(3)
    dist.all_reduce(value, group=world.group)
    assert value.tolist() == [float(world.size)] * 3
    assert {"first", "second"} == set(world.all_gather_object(socket.gethostname()))

@pytest.mark.world(2)
def test_one_raises(world):
    if world.rank == 1:
        raise ValueError("planted")
    dist.all_reduce(torch.ones(3))

@pytest.mark.world(2)
def test_host_dies(world):
    if world.rank == 1:
        Path(os.environ["KILL_THIS_HOST"]).write_text("now")
        threading.Event().wait()
    dist.all_reduce(torch.ones(3))

@pytest.mark.world(2)
def test_never_begun(world):
    pass
"""


class Hosts:
    """Two namespaces with a link between them, and what runs in them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.names = [f"fsdp-{os.getpid()}-{name}" for name in ("first", "second")]
        self.fifo = folder / "kill"
        os.mkfifo(self.fifo)

    def make(self) -> str:
        """Make both; return why that is not allowed here, or an empty text."""
        if shutil.which("ip") is None or shutil.which("unshare") is None:
            return "no `ip` or `unshare` is installed"
        first, second = self.names
        commands = [f"netns add {first}", f"netns add {second}"]
        commands += [f"-n {first} link add link0 type veth peer name link0 netns {second}"]
        for name, address in zip(self.names, ADDRESSES, strict=True):
            commands += [f"-n {name} address add {address}/30 dev link0"]
            commands += [f"-n {name} link set {device} up" for device in ("lo", "link0")]
        for command in commands:
            done = subprocess.run(["ip", *command.split()], capture_output=True, text=True, check=False)
            if done.returncode:
                return f"`ip {command}`: {done.stderr.strip()}"
        return ""

    def run(self, *command: str) -> str:
        """Run a command in both under torchrun, take the second host away when it asks for that, and return the first's words."""
        asked = os.open(self.fifo, os.O_RDONLY | os.O_NONBLOCK)
        agents = [self._start(number, command) for number in (0, 1)]
        # Until a rank of the second host writes: now.
        while not select.select([asked], [], [], 1.0)[0] and all(agent.poll() is None for agent in agents):
            pass
        os.close(asked)
        self.power_off()
        return [agent.communicate(timeout=900)[0] for agent in agents][0]

    def _start(self, number: int, command: tuple[str, ...]) -> subprocess.Popen[str]:
        named = ["ip", "netns", "exec", self.names[number], "unshare", "--uts", "sh", "-c"]
        named += ['hostname "$0"; exec "$@"', ("first", "second")[number]]
        launcher = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1"]
        launcher += [
            "--rdzv-backend=c10d",
            f"--rdzv-endpoint={ADDRESSES[0]}:29400",
            f"--local-addr={ADDRESSES[number]}",
        ]
        launcher += [f"--rdzv-conf=is_host={1 - number}", "--no-python"]
        paths = os.pathsep.join([*map(str, FOLDERS), *filter(None, sys.path)])
        variables = {
            "PYTHONPATH": paths,
            "OMP_NUM_THREADS": "1",
            **({"KILL_THIS_HOST": str(self.fifo)} if number else {}),
        }
        return subprocess.Popen(
            [*named, *launcher, *command],
            cwd=self.folder,
            env={**os.environ, **variables},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def power_off(self) -> None:
        """End the second host as a power cut does: no connection is closed, packets vanish."""
        subprocess.run(["ip", "-n", self.names[1], "link", "set", "link0", "down"], check=False)
        self._kill(self.names[1])

    def _kill(self, name: str) -> None:
        listed = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True, check=False)
        for pid in listed.stdout.split():
            with suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)

    def remove(self) -> None:
        for name in self.names:
            self._kill(name)
            subprocess.run(["ip", "netns", "delete", name], stderr=subprocess.DEVNULL, check=False)


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Callable[..., str]]:
    hosts = Hosts(tmp_path)
    try:
        refused = hosts.make()
        if refused:
            pytest.skip(f"network namespaces cannot be made here: {refused}")
        yield hosts.run
    finally:
        hosts.remove()


@pytest.mark.slow
def test_the_plugin(run: Callable[..., str], tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(TESTS)
    said = run(sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", "--junitxml=report.xml", "test_it.py")
    print(said)
    assert "2 processes of the launcher (1 on first, 1 on second)" in said
    for size in (2, 3, 4):
        assert f"test_it.py::test_sum[world={size}] PASSED" in said
    assert "rank 1: ValueError: planted" in said
    assert f"test_it.py::test_host_dies: {LOST} ({ADDRESSES[1]}" in said
    assert "1 failed, 3 passed, 1 error" in said
    suite = ET.parse(tmp_path / "report.xml").getroot()[0]
    (error,) = suite.findall("testcase[@name='test_host_dies']/error")
    assert LOST in str(error.get("message"))


@pytest.mark.slow
def test_run(run: Callable[..., str], tmp_path: Path) -> None:
    names = ("training.sgd_momentum", "clipping.not_needed", "clipping.shared_parameters")
    checks = [word for name in names for word in ("--check", name)]
    command = [sys.executable, "-m", "fsdp_testing.cli", "run", "fuzz_faults:KILLS_HOST", *checks, "--jobs", "1"]
    said = run(*command, "--json", "r.json")
    print(said)
    verdicts = {found.check: found for found in RunReport.from_json((tmp_path / "r.json").read_text()).results}
    assert verdicts["training.sgd_momentum"].verdict is Verdict.PASS
    assert verdicts["clipping.not_needed"].verdict is Verdict.UNKNOWN
    assert any(LOST in case.error for case in verdicts["clipping.not_needed"].cases)
    assert LOST in said
    assert "exit code 3" in said


@pytest.mark.slow
def test_fuzz(run: Callable[..., str], tmp_path: Path) -> None:
    command = ("fuzz", "fuzz_faults:KILLS_HOST", "--examples", "60", "--jobs", "1", "--state", "s")
    said = run(sys.executable, "-m", "fsdp_testing.cli", *command)
    print(said)
    assert "ended early; all results so far are in s" in said
    assert LOST in said
    assert (tmp_path / "s" / "state.json").is_file()
    assert not list(tmp_path.glob("s/found/*"))
