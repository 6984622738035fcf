"""How long do saving and loading a model take, and how much memory beside it, next to torch's FSDP1 and FSDP2?

All have the same model in the same processes and take turns, so that whatever else the machine does hits all of them alike.
Reported are medians over repeats of the slowest rank, ratios to the faster of torch's two, and the most memory that a rank had
beside what it had before, as the kernel counts it.

    python benchmarks/checkpoint.py
    python benchmarks/checkpoint.py --params 2_000_000 --repeats 1 --json out.json

`full`: whole tensors on rank 0 alone, `torch.save`; every rank reads the file and loads it. `sharded`: each rank's rows,
`torch.distributed.checkpoint`. Files lie in memory where the machine has a file system there, so that no disk is measured.
Only run it on an otherwise idle machine.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from step import Block, Setting, ours_wrapper, resident_bytes, torch_fsdp1, torch_fsdp2
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict

import fsdp_ref

RANKS = 2
UNITS = 12
OURS, BASELINES = "fsdp_ref-wrapper", ("torch-fsdp1", "torch-fsdp2")
FORMS = ("full", "sharded")


@dataclass
class Saver:
    """One implementation's model, and its own ways to collect and load a state."""

    model: nn.Module
    form: Callable[[str], AbstractContextManager[Any]] | None

    def collect(self, form: str) -> dict[str, Any]:
        if self.form is not None:
            with self.form(form):
                return self.model.state_dict()
        on_rank_0 = StateDictOptions(full_state_dict=True, cpu_offload=True)
        return get_model_state_dict(self.model, options=on_rank_0 if form == "full" else StateDictOptions())

    def put(self, form: str, state: dict[str, Any]) -> None:
        if self.form is None:
            set_model_state_dict(self.model, state, options=StateDictOptions(full_state_dict=form == "full"))
            return
        with self.form(form):
            self.model.load_state_dict(state)

    def save(self, form: str, folder: Path) -> None:
        state = self.collect(form)
        if form == "sharded":
            dcp.save({"model": state}, checkpoint_id=folder / "directory")
        elif dist.get_rank() == 0:
            torch.save(state, folder / "state.pt")

    def load(self, form: str, folder: Path) -> None:
        if form == "full":
            self.put(form, torch.load(folder / "state.pt", weights_only=True))
            return
        state = self.collect(form)
        dcp.load({"model": state}, checkpoint_id=folder / "directory")
        self.put(form, state)

    def total(self) -> float:
        """Return a number that differs where a loaded parameter does. Collectives: one all-reduce."""
        parts = [p.to_local() if hasattr(p, "to_local") else p for p in self.model.parameters()]
        total = sum((part.detach().double().square().sum() for part in parts), torch.zeros((), dtype=torch.float64))
        dist.all_reduce(total)
        return float(total)

    def clear(self) -> None:
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.zero_()


def savers(setting: Setting) -> dict[str, Saver]:
    from torch.distributed import fsdp

    def of(api: Any, model: nn.Module) -> Callable[[str], AbstractContextManager[Any]]:
        def form(name: str) -> AbstractContextManager[Any]:
            if name == "sharded":
                return api.FullyShardedDataParallel.state_dict_type(model, api.StateDictType.SHARDED_STATE_DICT)
            config = api.FullStateDictConfig(rank0_only=True)  # with offload_to_cpu torch's crashes on the CPU
            return api.FullyShardedDataParallel.state_dict_type(model, api.StateDictType.FULL_STATE_DICT, config)

        return form

    ours, first, second = ours_wrapper(setting), torch_fsdp1(setting), torch_fsdp2(setting)
    return {
        OURS: Saver(ours, of(fsdp_ref, ours)),
        "torch-fsdp1": Saver(first, of(fsdp, first)),
        "torch-fsdp2": Saver(second, None),
    }


def peak_bytes() -> int:
    """Return the most memory that this process has had since `forget_peak`."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))


def forget_peak() -> int:
    """Let the kernel count the peak anew; return what the process has now."""
    gc.collect()
    now = resident_bytes()
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")
    return now


def timed(action: Callable[[], None]) -> tuple[float, int]:
    """Return seconds and the most bytes beside what was there before, of the rank that has most."""
    before = forget_peak()
    dist.barrier()
    start = time.perf_counter()
    action()
    mine = (time.perf_counter() - start, max(0, peak_bytes() - before))
    every: list[Any] = [None] * RANKS
    dist.all_gather_object(every, mine)
    return max(seconds for seconds, _ in every), max(extra for _, extra in every)


def measure(rank: int, folder: str, setting: Setting, repeats: int) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", RANKS), rank=rank, world_size=RANKS)
    found: dict[str, dict[str, list[tuple[float, int]]]] = {}
    all_savers = savers(setting)
    for repeat in range(repeats + 1):  # the first one imports, allocates and connects
        for form in FORMS:
            for name, saver in all_savers.items():
                files = Path(folder) / name / form / str(repeat)
                if rank == 0:
                    files.mkdir(parents=True)
                want = saver.total()
                saved = timed(partial(saver.save, form, files))
                saver.clear()
                loaded = timed(partial(saver.load, form, files))
                if saver.total() != want:
                    raise SystemExit(f"{name} loaded other numbers than it saved ({form})")
                for path in files.rglob("*") if rank == 0 else ():
                    if path.is_file():
                        path.unlink()
                if repeat:
                    for what, figures in ((f"save {form}", saved), (f"load {form}", loaded)):
                        found.setdefault(what, {}).setdefault(name, []).append(figures)
    if rank == 0:
        Path(folder, "out.json").write_text(json.dumps(found), encoding="utf-8")
    dist.destroy_process_group()


def summary(found: dict[str, dict[str, list[tuple[float, int]]]]) -> dict[str, Any]:
    """Return medians, ratios to the faster of torch's two, and peaks, by what was done and implementation."""
    made: dict[str, Any] = {}
    for what, by_name in found.items():
        medians = {name: statistics.median(seconds for seconds, _ in runs) for name, runs in by_name.items()}
        base = min(medians[name] for name in BASELINES)
        made[what] = {
            name: {"seconds": medians[name], "ratio": medians[name] / base, "peak_extra_bytes": max(b for _, b in runs)}
            for name, runs in by_name.items()
        }
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--params", type=int, default=200_000_000, help="number of parameters (default 200 million)")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path, help="write all figures here")
    options = parser.parse_args()
    width = max(1, round((options.params / UNITS / 8) ** 0.5))
    setting = Setting("blocks", RANKS, "FULL_SHARD", width, UNITS, 1, 0)
    memory = Path("/dev/shm")
    usable = memory if memory.is_dir() and os.access(memory, os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=usable) as folder:
        mp.start_processes(measure, (folder, setting, options.repeats), nprocs=RANKS, start_method="fork")
        made = summary(json.loads(Path(folder, "out.json").read_text(encoding="utf-8")))
    unit = sum(p.numel() for p in Block(width).parameters()) * 4
    print(
        f"{UNITS} units of {unit / 1e6:.1f} MB on {RANKS} ranks; ratio to the faster of torch's two; peak beside the model"
    )
    for what, by_name in made.items():
        print(what)
        for name, one in by_name.items():
            extra = one["peak_extra_bytes"]
            print(
                f"  {name:18s} {one['seconds']:8.3f} s  {one['ratio']:5.2f}   {extra / 1e6:8.1f} MB = {extra / unit:5.1f} units"
            )
    if options.json is not None:
        options.json.write_text(json.dumps({"unit_bytes": unit, **made}, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
