"""The ways of running one multi-rank test that are compared: generated test files, one for each."""

from __future__ import annotations

from dataclasses import dataclass

CLOCK = """
import json, os, time
STARTS, TIMES = {}, []
def pytest_runtest_logstart(nodeid, location):
    STARTS[nodeid] = time.perf_counter()
def pytest_runtest_logfinish(nodeid, location):
    TIMES.append(time.perf_counter() - STARTS[nodeid])
OUTCOMES = []
def pytest_runtest_logreport(report):
    if report.failed or report.when == "call":
        OUTCOMES.append(report.outcome)
def pytest_sessionfinish(session):
    with open(os.environ["BENCHMARK_TIMES"], "w") as stream:
        json.dump({"times": TIMES, "outcomes": OUTCOMES}, stream)
"""

BODY = """
def body(rank, size):
    value = torch.ones(4)
    dist.all_reduce(value)
    assert value[0] == size
"""

FSDP2 = """
def body(rank, size):
    from torch import nn
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor
    def model():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)).double()
    mine, plain = model(), model()
    for layer in (mine[0], mine[2], mine):
        fully_shard(layer)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (mine, plain)]
    inputs = [torch.randn(3, 16, dtype=torch.float64) for _ in range(size)]
    for _ in range(2):
        for optimizer in optimizers:
            optimizer.zero_grad()
        mine(inputs[rank]).square().mean().backward()
        (sum(plain(x).square().mean() for x in inputs) / size).backward()
        for optimizer in optimizers:
            optimizer.step()
    for a, b in zip(mine.parameters(), plain.parameters()):
        assert torch.allclose(a.full_tensor(), b, rtol=1e-12, atol=1e-12)
"""

IMPORTS = "import torch, pytest\nimport torch.distributed as dist\n"

PLAIN = """
import pytest
@pytest.mark.parametrize("i", range({tests}))
def test(i): ...
"""

MARKED = (
    IMPORTS
    + "{body}"
    + """
@pytest.mark.parametrize("i", range({tests}))
@pytest.mark.world({ranks}, isolation="{isolation}")
def test(world, i):
    body(world.rank, world.size)
"""
)

RUN_RANKS = (
    IMPORTS
    + "{body}"
    + """
from fsdp_testing import current_world, run_ranks
def in_rank():
    body(current_world().rank, current_world().size)
@pytest.mark.parametrize("i", range({tests}))
def test(i):
    run_ranks(in_rank, size={ranks}, isolation="{isolation}")
"""
)

CONTINUOUS = (
    IMPORTS
    + "{body}"
    + """
from torch.testing._internal.common_distributed import MultiProcContinuousTest
class TestContinuous(MultiProcContinuousTest):
    world_size = {ranks}
    @classmethod
    def backend_str(cls): return "gloo"
    @classmethod
    def device_type(cls): return "cpu"
{methods}
"""
)

CONTINUOUS_METHOD = """    def test_{i}(self): body(self.rank, self.world_size)
"""

MULTI_PROCESS = (
    IMPORTS
    + "{body}"
    + """
from torch.testing._internal.common_distributed import MultiProcessTestCase
class TestMultiProcess(MultiProcessTestCase):
    @property
    def world_size(self): return {ranks}
    def setUp(self):
        super().setUp()
        self._spawn_processes()
    def join(self):
        store = dist.FileStore(self.file_name, self.world_size)
        dist.init_process_group("gloo", store=store, rank=self.rank, world_size=self.world_size)
{methods}
"""
)

MULTI_PROCESS_METHOD = """    def test_{i}(self):
        self.join()
        body(self.rank, self.world_size)
        dist.destroy_process_group()
"""

SPAWN = (
    IMPORTS
    + "{body}"
    + """
import tempfile
def in_rank(rank, size, path):
    dist.init_process_group("gloo", init_method="file://" + path, rank=rank, world_size=size)
    body(rank, size)
    dist.destroy_process_group()
@pytest.mark.parametrize("i", range({tests}))
def test(i, tmp_path):
    torch.multiprocessing.spawn(in_rank, ({ranks}, str(tmp_path / "store")), nprocs={ranks})
"""
)

TORCHRUN = """
import pathlib, subprocess, sys, pytest
SCRIPT = '''
import torch, torch.distributed as dist
{body}
dist.init_process_group("gloo")
body(dist.get_rank(), dist.get_world_size())
dist.destroy_process_group()
'''
@pytest.mark.parametrize("i", range({tests}))
def test(i, tmp_path):
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node={ranks}", str(path)]
    subprocess.run(command, check=True, capture_output=True, timeout=300)
"""


@dataclass(frozen=True, slots=True)
class Setup:
    """One way of running the same test: generated source, and how many tests a round runs."""

    name: str
    template: str
    tests: int
    quick: int
    body: str = BODY
    isolation: str = ""
    method: str = ""
    ours: bool = False

    def source(self, ranks: int, tests: int) -> str:
        """The test file."""
        methods = "".join(self.method.format(i=i) for i in range(tests))
        return self.template.format(tests=tests, ranks=ranks, body=self.body, isolation=self.isolation, methods=methods)


SETUPS = (
    Setup("plain pytest item", PLAIN, 200, 50),
    Setup("warm, marker", MARKED, 200, 50, isolation="warm", ours=True),
    Setup("warm, run_ranks", RUN_RANKS, 200, 50, isolation="warm"),
    Setup("fresh, marker", MARKED, 30, 8, isolation="fresh", ours=True),
    Setup("fresh, run_ranks", RUN_RANKS, 30, 8, isolation="fresh"),
    Setup("MultiProcContinuousTest", CONTINUOUS, 50, 20, method=CONTINUOUS_METHOD),
    Setup("MultiProcessTestCase", MULTI_PROCESS, 3, 2, method=MULTI_PROCESS_METHOD),
    Setup("torch.multiprocessing.spawn", SPAWN, 3, 2),
    Setup("torchrun subprocess", TORCHRUN, 3, 2),
    Setup("FSDP2 parity, warm, run_ranks", RUN_RANKS, 20, 6, body=FSDP2, isolation="warm"),
    Setup("FSDP2 parity, fresh, run_ranks", RUN_RANKS, 12, 6, body=FSDP2, isolation="fresh"),
    Setup("FSDP2 parity, fresh, marker", MARKED, 12, 6, body=FSDP2, isolation="fresh", ours=True),
    Setup("FSDP2 parity, MultiProcContinuousTest", CONTINUOUS, 10, 4, body=FSDP2, method=CONTINUOUS_METHOD),
    Setup("FSDP2 parity, MultiProcessTestCase", MULTI_PROCESS, 2, 2, body=FSDP2, method=MULTI_PROCESS_METHOD),
)
