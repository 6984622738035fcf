"""What comes before the first step: importing, and sharding a model of many parameters.

Ways to shard take turns, in the same two processes; a sample is processor time of rank 0. `bench.py` runs it.
"""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from figures import Comparison
from torch import nn

LAYERS = 50
"""Of each unit: 100 parameters."""
OURS, TORCHS = ("fsdp_ref-wrapper", "fsdp_ref-composable"), ("torch-fsdp1", "torch-fsdp2")
GOAL = 0.7
"""Highest ratio to FSDP1 or FSDP2 that is promised for sharding."""
IMPORTING = "import torch, time; start = time.perf_counter(); {}; print(time.perf_counter() - start)"
IMPORTS = {
    "fsdp_ref": "from fsdp_ref import FullyShardedDataParallel",
    "torch": "from torch.distributed.fsdp import FullyShardedDataParallel",
}


def import_seconds(statement: str, folder: str) -> float:
    """Return seconds that an import takes in a new process, after torch; from bytecode, as when installed."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    command = [sys.executable, "-X", f"pycache_prefix={folder}", "-c", IMPORTING.format(statement)]
    return float(subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout)


def imports(rounds: int) -> Comparison:
    """Measure the wrapper's import beside torch's."""
    samples: dict[str, list[float]] = {name: [] for name in IMPORTS}
    with tempfile.TemporaryDirectory() as folder:
        for turn in range(rounds + 1):  # the first writes the bytecode
            for name, statement in IMPORTS.items():
                seconds = import_seconds(statement, folder)
                if turn:
                    samples[name].append(1000 * seconds)
    return Comparison("importing FullyShardedDataParallel, after torch", "ms", samples, ("torch",))


def many_parameters(units: int, layers: int) -> nn.Module:
    """Return a stack of ``units`` blocks with ``2 * layers`` small parameters each."""
    return nn.Sequential(*(nn.Sequential(*(nn.Linear(8, 8) for _ in range(layers))) for _ in range(units)))


def ways(*, nested: bool) -> dict[str, Callable[[nn.Module], nn.Module]]:
    """Return each way to shard a stack, as a unit for each block or as one unit."""
    from torch.distributed import fsdp

    from fsdp_ref import FullyShardedDataParallel, fully_shard
    from fsdp_ref.wrap import ModuleWrapPolicy

    mesh, cpu = dist.device_mesh.init_device_mesh("cpu", (2,)), torch.device("cpu")
    blocks = ModuleWrapPolicy({nn.Sequential}) if nested else None
    theirs = fsdp.wrap.ModuleWrapPolicy({nn.Sequential}) if nested else None
    fsdp1 = partial(fsdp.FullyShardedDataParallel, use_orig_params=True, device_id=cpu, auto_wrap_policy=theirs)
    fsdp2 = partial(fsdp.fully_shard, mesh=mesh)
    return {
        "fsdp_ref-wrapper": partial(FullyShardedDataParallel, auto_wrap_policy=blocks, use_orig_params=True),
        "fsdp_ref-composable": partial(fully_shard, policy=blocks) if nested else fully_shard,
        "torch-fsdp1": fsdp1,
        "torch-fsdp2": (lambda model: fsdp2(nn.Sequential(*map(fsdp2, model)))) if nested else fsdp2,
    }


def shard_in_turns(rank: int, store: str, out: str, units: int, nested: bool, rounds: int) -> None:
    """Shard ``100 * units`` parameters on two ranks, each way in turn, and write the samples of rank 0."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2)
    samples: dict[str, list[float]] = {}
    chosen = ways(nested=nested)
    for shard in chosen.values():
        shard(many_parameters(2, 2))  # what is imported and made once
    for _ in range(rounds):
        for name, shard in chosen.items():
            model = many_parameters(units, LAYERS)
            gc.collect()  # else it comes at random places, and takes longer than sharding does
            dist.barrier()
            start = time.process_time()
            kept = shard(model)
            samples.setdefault(name, []).append(1000 * (time.process_time() - start))
            del kept
    if rank == 0:
        Path(out).write_text(json.dumps(samples), encoding="utf-8")
    dist.destroy_process_group()


def sharding(units: int, rounds: int, *, nested: bool) -> Comparison:
    """Measure sharding a stack of blocks with 100 parameters each."""
    with tempfile.TemporaryDirectory() as folder:
        out = f"{folder}/out.json"
        arguments = (f"{folder}/store", out, units, nested, rounds)
        mp.start_processes(shard_in_turns, args=arguments, nprocs=2, start_method="fork")
        samples = json.loads(Path(out).read_text(encoding="utf-8"))
    into = f"{units} units" if nested else "1 unit"
    return Comparison(
        f"sharding {100 * units:,} parameters into {into}, 2 ranks, processor time",
        "ms",
        samples,
        TORCHS,
        curve=f"sharding by parameters, {'a unit for each hundred' if nested else 'one unit'}",
        size=100 * units,
        goal=dict.fromkeys(OURS, GOAL),
    )


def comparisons(*, quick: bool) -> Iterator[Comparison]:
    """Measure importing, and sharding by numbers of parameters."""
    yield imports(5 if quick else 15)
    for nested in (True, False):
        for units in (10, 30, 100) if quick else (10, 20, 50, 100, 200):
            yield sharding(units, 3 if quick else 7, nested=nested)
