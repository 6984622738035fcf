"""Time and memory of a training step, beside torch's own data parallelism.

Every implementation trains the same model in the same processes, interleaved step by step, so that whatever else the
machine does hits all of them alike. A sample is a step of the slowest rank. `bench.py` runs it.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from figures import Comparison
from torch import nn


@dataclass(frozen=True)
class Setting:
    """One measurement: a model, a strategy, a number of ranks."""

    name: str
    ranks: int
    strategy: str
    width: int
    units: int
    batch: int
    steps: int
    warmup: int = 3


class Block(nn.Module):
    """Two linear layers with a residual: 8 * width^2 parameters."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.nn.functional.gelu(self.up(x)))


class Small(nn.Module):
    """One small linear layer: all overhead."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.linear(x)


def model_of(setting: Setting) -> tuple[nn.Module, type[nn.Module]]:
    torch.manual_seed(0)
    cls = Small if setting.name == "overhead" else Block
    return nn.Sequential(*(cls(setting.width) for _ in range(setting.units))), cls


def ours_wrapper(setting: Setting) -> nn.Module:
    from fsdp_ref import FullyShardedDataParallel, ShardingStrategy
    from fsdp_ref.wrap import ModuleWrapPolicy

    model, cls = model_of(setting)
    return FullyShardedDataParallel(
        model,
        sharding_strategy=ShardingStrategy[setting.strategy],
        auto_wrap_policy=ModuleWrapPolicy({cls}),
        use_orig_params=True,
    )


def ours_composable(setting: Setting) -> nn.Module:
    from fsdp_ref import ShardingStrategy, fully_shard
    from fsdp_ref.wrap import ModuleWrapPolicy

    model, cls = model_of(setting)
    return fully_shard(model, policy=ModuleWrapPolicy({cls}), strategy=ShardingStrategy[setting.strategy])


def torch_fsdp1(setting: Setting) -> nn.Module:
    from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    model, cls = model_of(setting)
    return FullyShardedDataParallel(
        model,
        sharding_strategy=ShardingStrategy[setting.strategy],
        auto_wrap_policy=ModuleWrapPolicy({cls}),
        use_orig_params=True,
        device_id=torch.device("cpu"),
    )


def torch_fsdp2(setting: Setting) -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    model, cls = model_of(setting)
    again = setting.strategy == "FULL_SHARD"
    mesh = dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),))
    for module in list(model.modules()):
        if isinstance(module, cls):
            fully_shard(module, mesh=mesh, reshard_after_forward=again)
    return fully_shard(model, mesh=mesh, reshard_after_forward=again)


def torch_ddp(setting: Setting) -> nn.Module:
    return nn.parallel.DistributedDataParallel(model_of(setting)[0])


IMPLEMENTATIONS: dict[str, Callable[[Setting], nn.Module]] = {
    "fsdp_ref-wrapper": ours_wrapper,
    "fsdp_ref-composable": ours_composable,
    "torch-fsdp1": torch_fsdp1,
    "torch-fsdp2": torch_fsdp2,
    "torch-ddp": torch_ddp,
}
BASELINES = ("torch-fsdp1", "torch-fsdp2")


class Runner:
    """One implementation in training."""

    def __init__(self, make: Callable[[Setting], nn.Module], setting: Setting) -> None:
        self.model = make(setting)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3)
        generator = torch.Generator().manual_seed(dist.get_rank())
        self.x = torch.randn(setting.batch, setting.width, generator=generator)
        self.times: list[float] = []

    def step(self) -> None:
        dist.barrier()
        start = time.perf_counter()
        self.model(self.x).pow(2).mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.times.append(time.perf_counter() - start)


def resident_bytes() -> int:
    """Return this process's resident set, without what the C library keeps of freed memory for later."""
    with contextlib.suppress(AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def measure(rank: int, setting: Setting, store: str, out: str, names: list[str]) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo", store=dist.FileStore(store, setting.ranks), rank=rank, world_size=setting.ranks)
    runners = {name: Runner(IMPLEMENTATIONS[name], setting) for name in names}
    for _ in range(setting.warmup):
        for runner in runners.values():
            runner.step()
    for runner in runners.values():
        runner.times.clear()
    for _ in range(setting.steps):
        for runner in runners.values():
            runner.step()
    mine = {name: runner.times for name, runner in runners.items()}
    every: list[Any] = [None] * setting.ranks
    dist.all_gather_object(every, mine)
    slowest = {name: [max(times) for times in zip(*(each[name] for each in every))] for name in names}
    memory = measure_memory(setting) if setting.name == "blocks" else {}
    if rank == 0:
        Path(out).write_text(json.dumps({"samples": slowest, "memory": memory}), encoding="utf-8")
    dist.destroy_process_group()


def measure_memory(setting: Setting) -> dict[str, float]:
    """Return the peak of live full parameters in units of one block's, and resident growth over further steps."""
    from fsdp_ref.annotations import units_in
    from fsdp_ref.runtime.events import observe

    runner = Runner(ours_wrapper, setting)
    for _ in range(20):
        runner.step()
    handles = [unit.handle for unit in units_in(runner.model)]
    buffers = [handle.full_F().untyped_storage() for handle in handles]
    peak = 0

    def count(event: object) -> None:
        nonlocal peak
        peak = max(peak, sum(buffer.nbytes() for buffer in buffers))

    with observe(count):
        runner.step()
    before = resident_bytes()
    for _ in range(20 if setting.steps < 10 else 200):
        runner.step()
    block = sum(param.numel() for param in Block(setting.width).parameters()) * 4
    return {"peak_units": peak / block, "resident_growth_bytes": resident_bytes() - before}


def run(setting: Setting, names: list[str]) -> dict[str, Any]:
    """Return `samples`, seconds of each step of the slowest rank by implementation, and `memory`."""
    with tempfile.TemporaryDirectory() as folder:
        out = f"{folder}/out.json"
        mp.start_processes(
            measure, args=(setting, f"{folder}/store", out, names), nprocs=setting.ranks, start_method="fork"
        )
        return json.loads(Path(out).read_text(encoding="utf-8"))


GOALS = {("overhead", 2): 0.50, ("blocks", 2): 0.60, ("blocks", 4): 0.75}
"""Highest ratio to the faster of FSDP1 and FSDP2 that is promised, by model and ranks."""


CURVE = ("overhead", 2, "FULL_SHARD")
"""Model, ranks and strategy that several numbers of units are measured of."""


def compared(setting: Setting, names: list[str]) -> Comparison:
    """Measure one setting."""
    result = run(setting, names)
    if result["memory"]:
        print(f"memory of fsdp_ref-wrapper, {setting.width} wide: {result['memory']}", flush=True)
    size = f"{setting.units} {'small units' if setting.name == 'overhead' else f'blocks of width {setting.width}'}"
    goal = GOALS.get((setting.name, setting.ranks))
    return Comparison(
        f"a step of {size}, {setting.strategy}, {setting.ranks} ranks",
        "ms",
        {name: [1000 * seconds for seconds in samples] for name, samples in result["samples"].items()},
        tuple(name for name in BASELINES if name in names),
        curve="a step by small units" if (setting.name, setting.ranks, setting.strategy) == CURVE else "",
        size=setting.units,
        goal=dict.fromkeys(("fsdp_ref-wrapper", "fsdp_ref-composable"), goal) if goal else None,
    )


def overhead(ranks: int, strategy: str, units: int, *, quick: bool) -> Setting:
    """Return the setting of many small units, in which nothing but overhead counts."""
    return Setting("overhead", ranks, strategy, 64, units, 8, 12 if quick else 25)


def settings(ranks: Sequence[int], *, quick: bool) -> list[Setting]:
    """Return what is measured: blocks, small units, and small units of several numbers for the curve."""
    chosen = []
    for size in ranks:
        for strategy in ("FULL_SHARD", "SHARD_GRAD_OP"):
            chosen.append(Setting("blocks", size, strategy, 512, 8, 64, 12 if quick else 25))
            if not quick:
                chosen.append(Setting("blocks", size, strategy, 720, 12, 64, 15))
            chosen.append(overhead(size, strategy, 60, quick=quick))
    return chosen + [overhead(2, "FULL_SHARD", units, quick=quick) for units in (15, 30, 120, 240)[: 3 if quick else 4]]


def comparisons(*, quick: bool, ranks: Sequence[int] = (2, 4), only: Sequence[str] = ()) -> Iterator[Comparison]:
    """Measure a step of every setting."""
    for setting in settings(ranks, quick=quick):
        yield compared(setting, list(only or IMPLEMENTATIONS))
