"""How long is a training step, and what does it cost in memory, beside torch's own data parallelism?

Every implementation trains the same model in the same processes, interleaved step by step, so that whatever else the
machine does hits all of them alike. Reported are medians over steps of the slowest rank, and ratios to the faster of
torch's FSDP1 and FSDP2.

    python benchmarks/step.py --ranks 2 4
    python benchmarks/step.py --quick --json out.json
    python benchmarks/step.py --setup

Only run it on an otherwise idle machine; the figures are relative, and a ratio from one busy run says little.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
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
        medians = {name: statistics.median(times) for name, times in slowest.items()}
        Path(out).write_text(json.dumps({"medians": medians, "memory": memory}), encoding="utf-8")
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


IMPORTING = "import torch, time; start = time.perf_counter(); {}; print(time.perf_counter() - start)"


def measure_import(statement: str, folder: str) -> float:
    """Return the median of seconds that an import takes in new processes, after torch; from bytecode, as when installed."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    command = [sys.executable, "-X", f"pycache_prefix={folder}", "-c", IMPORTING.format(statement)]
    runs = [subprocess.run(command, env=environment, capture_output=True, text=True, check=True) for _ in range(6)]
    return statistics.median(float(run.stdout) for run in runs[1:])  # the first writes the bytecode


def many_parameters(units: int, layers: int) -> nn.Module:
    """Return a stack of ``units`` blocks with ``2 * layers`` small parameters each."""
    block = lambda: nn.Sequential(*(nn.Linear(8, 8) for _ in range(layers)))
    return nn.Sequential(*(block() for _ in range(units)))


def build(rank: int, store: str, out: str) -> None:
    """Shard 10,000 parameters, in 100 units and in one, by each way of ours and torch's, on two ranks."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    from torch.distributed import fsdp

    from fsdp_ref import FullyShardedDataParallel, fully_shard
    from fsdp_ref.wrap import ModuleWrapPolicy

    dist.init_process_group("gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2)
    mesh, cpu = dist.device_mesh.init_device_mesh("cpu", (2,)), torch.device("cpu")
    blocks = ModuleWrapPolicy({nn.Sequential})
    fsdp1 = partial(fsdp.FullyShardedDataParallel, use_orig_params=True, device_id=cpu)
    fsdp2 = partial(fsdp.fully_shard, mesh=mesh)
    ways: dict[str, Callable[[nn.Module], nn.Module]] = {
        "torch-fsdp1, 100 units": lambda m: fsdp1(m, auto_wrap_policy=fsdp.wrap.ModuleWrapPolicy({nn.Sequential})),
        "torch-fsdp1, 1 unit": fsdp1,
        "torch-fsdp2, 100 units": lambda m: fsdp2(nn.Sequential(*map(fsdp2, m))),
        "torch-fsdp2, 1 unit": fsdp2,
        "wrapper, 100 units": lambda m: FullyShardedDataParallel(m, auto_wrap_policy=blocks, use_orig_params=True),
        "wrapper, 1 unit": lambda m: FullyShardedDataParallel(m, use_orig_params=True),
        "composable, 100 units": lambda m: fully_shard(m, policy=blocks),
        "composable, 1 unit": fully_shard,
    }
    for shard in ways.values():
        shard(many_parameters(2, 2))  # what is imported and made once
    seconds = {}
    for name, shard in ways.items():
        model = many_parameters(100, 50)
        assert sum(1 for _ in model.parameters()) == 10_000
        dist.barrier()
        start = time.process_time()
        kept = shard(model)
        seconds[name] = time.process_time() - start
        del kept
    if rank == 0:
        Path(out).write_text(json.dumps(seconds), encoding="utf-8")
    dist.destroy_process_group()


def measure_setup() -> dict[str, float]:
    """Return seconds before the first step: importing, and processor time of rank 0 for sharding 10,000 parameters."""
    with tempfile.TemporaryDirectory() as folder:
        out = f"{folder}/out.json"
        mp.start_processes(build, args=(f"{folder}/store", out), nprocs=2, start_method="fork")
        built = json.loads(Path(out).read_text(encoding="utf-8"))
        names = ("import fsdp_ref", "from fsdp_ref import FullyShardedDataParallel")
        imports = {f"{name}, after torch": measure_import(name, folder) for name in names}
    return imports | {f"10,000 parameters, {name}": seconds for name, seconds in built.items()}


def show_setup(setup: dict[str, float]) -> None:
    print("setup")
    for name, seconds in setup.items():
        base = setup.get(f"10,000 parameters, torch-fsdp1, {name.rpartition(', ')[2]}")
        print(f"  {name:58s} {1000 * seconds:9.2f} ms" + ("" if base is None else f"  {seconds / base:5.2f}"))


def run(setting: Setting, names: list[str]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        out = f"{folder}/out.json"
        mp.start_processes(
            measure, args=(setting, f"{folder}/store", out, names), nprocs=setting.ranks, start_method="fork"
        )
        result = json.loads(Path(out).read_text(encoding="utf-8"))
    medians = result["medians"]
    base = min((medians[name] for name in BASELINES if name in medians), default=None)
    result["ratios"] = {} if base is None else {name: value / base for name, value in medians.items()}
    return {"setting": asdict(setting), **result}


def settings(ranks: list[int], *, quick: bool) -> list[Setting]:
    chosen = []
    for size in ranks:
        for strategy in ("FULL_SHARD", "SHARD_GRAD_OP"):
            chosen.append(Setting("blocks", size, strategy, 512, 8, 64, 8 if quick else 25))
            if not quick:
                chosen.append(Setting("blocks", size, strategy, 720, 12, 64, 15))
            chosen.append(Setting("overhead", size, strategy, 64, 60 if quick else 200, 8, 5 if quick else 10))
    return chosen


def show(result: dict[str, Any]) -> None:
    setting = result["setting"]
    print(
        f"{setting['name']} ranks={setting['ranks']} {setting['strategy']} width={setting['width']} units={setting['units']}"
    )
    for name, value in result["medians"].items():
        ratio = result["ratios"].get(name)
        print(f"  {name:22s} {1000 * value:9.2f} ms" + ("" if ratio is None else f"  {ratio:5.2f}"))
    if result["memory"]:
        print("  memory of fsdp_ref-wrapper:", result["memory"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--quick", action="store_true", help="small models, few steps")
    parser.add_argument("--json", type=Path, help="write all figures here")
    parser.add_argument("--only", nargs="+", choices=list(IMPLEMENTATIONS), default=list(IMPLEMENTATIONS))
    parser.add_argument("--setting", choices=["blocks", "overhead"], help="only these")
    parser.add_argument("--setup", action="store_true", help="only importing and sharding, no steps")
    options = parser.parse_args()
    setup = measure_setup()
    show_setup(setup)
    results: list[dict[str, Any]] = [{"setup": setup}]
    if options.setup:
        options.ranks = []
    for setting in settings(options.ranks, quick=options.quick):
        if options.setting is None or setting.name == options.setting:
            results.append(run(setting, options.only))
            show(results[-1])
    if options.json is not None:
        options.json.write_text(json.dumps(results, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
