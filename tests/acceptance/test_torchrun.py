"""Two agents of torchrun are two hosts: marked tests run on both, and a host that is killed is a verdict of the first process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree as ET

import torch.distributed as dist

TESTS = """
import os, signal
from pathlib import Path
import pytest, torch
import torch.distributed as dist

def parent(pid):
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])

def doubled(value):
    return value * 2 + dist.get_rank()

@pytest.mark.world([2, 3])
def test_sum(world, tmp_path):
    value = torch.ones(3)
    dist.all_reduce(value, group=world.group)
    assert value.tolist() == [float(world.size)] * 3
    (tmp_path / str(world.rank)).write_text("seen")
    # The launcher's variables are about its processes, which are no ranks.
    assert "RANK" not in os.environ
    assert len(set(world.all_gather_object(os.getppid()))) == 2

@pytest.mark.world(2)
def test_one_raises(world):
    if world.rank == 1:
        raise ValueError("planted")
    dist.all_reduce(torch.ones(3))

def test_plain(worlds):
    assert worlds(2).run(doubled, 4) == [8, 9]

@pytest.mark.world(8, backend="fake", rank=3)
def test_fake(world):
    assert (world.rank, world.size) == (3, 8)

@pytest.mark.world(2)
def test_host_dies(world):
    if world.rank == 1:
        serving = os.getppid()
        while b"forkserver" in Path(f"/proc/{serving}/cmdline").read_bytes():
            serving = parent(serving)
        agent = parent(serving)
        # Both are known before either is killed: of a process that has ended nothing can be read.
        assert b"torch.distributed.run" in Path(f"/proc/{agent}/cmdline").read_bytes()
        os.kill(agent, signal.SIGKILL)
        os.kill(serving, signal.SIGKILL)
    dist.all_reduce(torch.ones(3))

@pytest.mark.world(2)
def test_never_begun(world):
    pass
"""


def test_marked_tests_run_on_two_hosts_and_a_killed_one_is_named(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(TESTS)
    store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False, multi_tenant=True)
    tests = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", "--junitxml=report.xml", "test_it.py"]
    agents = []
    for node in (1, 2):
        launcher = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1"]
        launcher += ["--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{store.port}", "--rdzv-conf=is_host=0"]
        launcher += [f"--local-addr=127.0.0.{node}", "--no-python"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        agents.append(
            subprocess.Popen(
                [*launcher, *tests],
                cwd=tmp_path,
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
    texts = [agent.communicate(timeout=400)[0] for agent in agents]
    expected = next((text for text in texts if "test_sum" in text), "")
    assert "2 processes of the launcher" in expected, texts
    for name in ("test_sum[world=2]", "test_sum[world=3]", "test_plain", "test_fake"):
        assert f"test_it.py::{name} PASSED" in expected, expected
    assert "rank 1: ValueError: planted" in expected
    lost = "test_it.py::test_host_dies: rank 1 was lost with process 1 of the launcher on host"
    assert lost in expected
    assert "test_never_begun" not in expected.partition("=== ERRORS ===")[0].partition("test_host_dies")[2]
    assert "1 failed, 4 passed, 1 error" in expected
    suite = ET.parse(tmp_path / "report.xml").getroot()[0]
    (error,) = suite.findall("testcase[@name='test_host_dies']/error")
    assert lost in str(error.get("message"))
