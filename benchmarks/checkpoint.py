"""Time and memory of saving and loading a model and its optimizer, beside torch's FSDP1 and FSDP2.

All have the same model in the same processes and take turns, so that whatever else the machine does hits all of them alike.
Reported are medians over repeats of the slowest rank with ratios to the faster of torch's two, processor seconds of all
ranks together, and the most memory that rank 0, and any other rank, had beside what it had before, in units of the model.

    python benchmarks/checkpoint.py
    python benchmarks/checkpoint.py --params 2_000_000 --repeats 1 --json out.json

`bench.py` runs it beside everything else, with intervals.

`full`: whole tensors on rank 0 alone, `torch.save`; every rank reads the file and loads it (the optimizer's: rank 0 reads and
sends). `sharded`: each rank's rows, `torch.distributed.checkpoint`. Both figures of memory include the state that was asked
for: all 12 units of the model (24 of Adam's two moments) where it is full, 1/ranks of that where it is sharded; torch's FSDP2
saves the shards that it trains on and needs none. Memory is what the kernel counts, with the C library told to keep nothing
of what is freed: then it is what torch's profiler counts for tensors, to a tenth of a unit. Files lie in memory where the
machine has a file system there, so that no disk is measured. Only times need an otherwise idle machine.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from figures import Comparison
from step import Block, Setting, ours_composable, ours_wrapper, resident_bytes, torch_fsdp1, torch_fsdp2
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

import fsdp_ref

RANKS = 2
UNITS = 12
BASELINES = ("torch-fsdp1", "torch-fsdp2")
FORMS = ("full", "sharded")
MMAP_THRESHOLD = -3  # of <malloc.h>


@dataclass
class ModelOf:
    """One implementation's model, and its own ways to collect and load its state.

    Attributes:
        calls: what has `optim_state_dict` and the like.
        form: sets the form of states while it lasts; None: torch's functions for FSDP2, which take it as an option.
    """

    model: nn.Module
    calls: Any
    form: Callable[[str], AbstractContextManager[Any]] | None

    def collect(self, form: str) -> dict[str, Any]:
        if self.form is not None:
            with self.form(form):
                return self.model.state_dict()
        return get_model_state_dict(self.model, options=self.options(form))

    @staticmethod
    def options(form: str) -> StateDictOptions:
        return StateDictOptions(full_state_dict=form == "full", cpu_offload=form == "full")

    def read(self, file: Path) -> dict[str, Any]:
        return torch.load(file, weights_only=True)

    def put(self, form: str, state: dict[str, Any]) -> None:
        if self.form is None:
            set_model_state_dict(self.model, state, options=StateDictOptions(full_state_dict=form == "full"))
            return
        with self.form(form):
            self.model.load_state_dict(state)

    def save(self, form: str, folder: Path) -> None:
        state = self.collect(form)
        if form == "sharded":
            dcp.save({"saved": state}, checkpoint_id=folder / "directory")
        elif dist.get_rank() == 0:
            torch.save(state, folder / "state.pt")

    def load(self, form: str, folder: Path) -> None:
        if form == "full":
            self.put(form, self.read(folder / "state.pt"))
            return
        state = self.collect(form)
        dcp.load({"saved": state}, checkpoint_id=folder / "directory")
        self.put(form, state)

    def tensors(self) -> list[torch.Tensor]:
        return list(self.model.parameters())

    def total(self) -> float:
        """Return a number that differs where a loaded number does. Collectives: one all-reduce."""
        parts = [p.to_local() if hasattr(p, "to_local") else p for p in self.tensors()]
        sums = ((1 + n % 7) * part.detach().double().square().sum() for n, part in enumerate(parts))
        total = sum(sums, torch.zeros((), dtype=torch.float64))
        dist.all_reduce(total)
        return float(total)

    def clear(self) -> None:
        with torch.no_grad():
            for tensor in self.tensors():
                tensor.zero_()


class OptimizerOf(ModelOf):
    """The same of an Adam of that model, after one step."""

    def __init__(self, of: ModelOf) -> None:
        super().__init__(of.model, of.calls, of.form)
        self.optim = torch.optim.Adam(self.model.parameters(), lr=1e-3, foreach=False)
        torch.manual_seed(dist.get_rank())
        for param in self.model.parameters():
            param.grad = torch.zeros_like(param)
            (param.grad.to_local() if hasattr(param.grad, "to_local") else param.grad).normal_()
        self.optim.step()
        self.optim.zero_grad()

    def collect(self, form: str) -> dict[str, Any]:
        if self.form is None:
            return get_optimizer_state_dict(self.model, self.optim, options=self.options(form))
        with self.form(form):
            return self.calls.optim_state_dict(self.model, self.optim)

    def read(self, file: Path) -> dict[str, Any]:
        return torch.load(file, weights_only=True) if dist.get_rank() == 0 else {}

    def put(self, form: str, state: dict[str, Any]) -> None:
        if self.form is None:
            options = StateDictOptions(full_state_dict=form == "full", broadcast_from_rank0=form == "full")
            set_optimizer_state_dict(self.model, self.optim, state, options=options)
            return
        with self.form(form):
            to_load = self.calls.optim_state_dict_to_load(self.model, self.optim, state)
            self.optim.load_state_dict(to_load)

    def tensors(self) -> list[torch.Tensor]:
        states = (self.optim.state.get(param, {}) for param in self.model.parameters())
        return [state.get(name, torch.zeros(0)) for state in states for name in ("exp_avg", "exp_avg_sq")]


def models(setting: Setting) -> dict[str, ModelOf]:
    from torch.distributed import fsdp

    def of(api: Any, calls: Any, model: nn.Module) -> ModelOf:
        def form(name: str) -> AbstractContextManager[Any]:
            if name == "sharded":
                return calls.state_dict_type(model, api.StateDictType.SHARDED_STATE_DICT)
            config = api.FullStateDictConfig(rank0_only=True)  # with offload_to_cpu torch's crashes on the CPU
            optim = api.FullOptimStateDictConfig(rank0_only=True, offload_to_cpu=False)  # and mixes up the moments
            return calls.state_dict_type(model, api.StateDictType.FULL_STATE_DICT, config, optim)

        return ModelOf(model, calls, form)

    return {
        "fsdp_ref-wrapper": of(fsdp_ref, fsdp_ref, ours_wrapper(setting)),
        "fsdp_ref-composable": of(fsdp_ref, fsdp_ref, ours_composable(setting)),
        "torch-fsdp1": of(fsdp, fsdp.FullyShardedDataParallel, torch_fsdp1(setting)),
        "torch-fsdp2": ModelOf(torch_fsdp2(setting), None, None),
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


@dataclass(frozen=True)
class Cost:
    """What one save or load took: seconds of the slowest rank, processor seconds of all, bytes beside what was there before."""

    seconds: float
    processor: float
    extra_on_rank_0: int
    extra_elsewhere: int


def cost_of(action: Callable[[], None]) -> Cost:
    before = forget_peak()
    dist.barrier()
    start, processor = time.perf_counter(), time.process_time()
    action()
    mine = (time.perf_counter() - start, time.process_time() - processor, max(0, peak_bytes() - before))
    every: list[Any] = [None] * RANKS
    dist.all_gather_object(every, mine)
    seconds, processors, extra = zip(*every, strict=True)
    return Cost(max(seconds), sum(processors), extra[0], max(extra[1:]))


def save_and_load(name: str, saver: ModelOf, form: str, files: Path) -> tuple[Cost, Cost]:
    if dist.get_rank() == 0:
        files.mkdir(parents=True)
    want = saver.total()
    saved = cost_of(partial(saver.save, form, files))
    saver.clear()
    loaded = cost_of(partial(saver.load, form, files))
    if saver.total() != want:
        raise SystemExit(f"{name} loaded other numbers than it saved ({form} of {type(saver).__name__})")
    for path in files.rglob("*") if dist.get_rank() == 0 else ():
        if path.is_file():
            path.unlink()
    return saved, loaded


def measure(rank: int, folder: str, setting: Setting, repeats: int) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    ctypes.CDLL(None).mallopt(MMAP_THRESHOLD, 1 << 16)  # else the C library keeps up to 32 MB of what is freed
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", RANKS), rank=rank, world_size=RANKS)
    found: dict[str, dict[str, list[Cost]]] = {}
    subjects: dict[str, dict[str, ModelOf]] = {"model": models(setting)}
    subjects["optimizer"] = {name: OptimizerOf(saver) for name, saver in subjects["model"].items()}
    for repeat in range(repeats + 1):  # the first one imports, allocates and connects
        for subject, savers in subjects.items():
            for form in FORMS:
                for name, saver in savers.items():
                    costs = save_and_load(name, saver, form, Path(folder) / subject / name / form / str(repeat))
                    for verb, cost in zip(("save", "load"), costs, strict=True):
                        if repeat:
                            found.setdefault(f"{verb} {subject} {form}", {}).setdefault(name, []).append(cost)
    if rank == 0:
        flat = {what: {name: [asdict(c) for c in costs] for name, costs in of.items()} for what, of in found.items()}
        Path(folder, "out.json").write_text(json.dumps(flat), encoding="utf-8")
    dist.destroy_process_group()


def summary(found: dict[str, dict[str, list[dict[str, float]]]]) -> dict[str, Any]:
    """Return medians, ratios to the faster of torch's two, and peaks, by what was done and implementation."""
    made: dict[str, Any] = {}
    for what, by_name in found.items():
        medians = {name: statistics.median(run["seconds"] for run in runs) for name, runs in by_name.items()}
        base = min(medians[name] for name in BASELINES)
        made[what] = {
            name: {
                "seconds": medians[name],
                "ratio": medians[name] / base,
                "processor_seconds": statistics.median(run["processor"] for run in runs),
                "extra_on_rank_0": max(run["extra_on_rank_0"] for run in runs),
                "extra_elsewhere": max(run["extra_elsewhere"] for run in runs),
            }
            for name, runs in by_name.items()
        }
    return made


def costs(params: int, repeats: int) -> tuple[int, dict[str, dict[str, list[dict[str, float]]]]]:
    """Return bytes of one unit, and the costs of each repeat by what was done and implementation."""
    width = max(1, round((params / UNITS / 8) ** 0.5))
    setting = Setting("blocks", RANKS, "FULL_SHARD", width, UNITS, 1, 0)
    memory = Path("/dev/shm")
    usable = memory if memory.is_dir() and os.access(memory, os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=usable) as folder:
        mp.start_processes(measure, (folder, setting, repeats), nprocs=RANKS, start_method="fork")
        repeated = json.loads(Path(folder, "out.json").read_text(encoding="utf-8"))
    return sum(p.numel() for p in Block(width).parameters()) * 4, repeated


def comparisons(*, quick: bool) -> Iterator[Comparison]:
    """Measure each save and load: the clock, and the processors of all ranks."""
    params = 12_000_000 if quick else 200_000_000
    _, repeated = costs(params, 5)
    for what, by_name in repeated.items():
        for figure, unit in (("seconds", "s"), ("processor", "processor s")):
            samples = {name: [run[figure] for run in runs] for name, runs in by_name.items()}
            yield Comparison(f"{what}, {params:,} parameters, {RANKS} ranks, {unit}", unit, samples, BASELINES)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--params", type=int, default=200_000_000, help="number of parameters (default 200 million)")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path, help="write all figures here")
    options = parser.parse_args()
    unit, repeated = costs(options.params, options.repeats)
    made = summary(repeated)
    print(
        f"{UNITS} units of {unit / 1e6:.1f} MB on {RANKS} ranks; ratio to the faster of torch's two; most memory beside"
    )
    for what, by_name in made.items():
        print(f"{what:24s} seconds ratio  processor   units on rank 0  elsewhere")
        for name, one in by_name.items():
            first, others = one["extra_on_rank_0"] / unit, one["extra_elsewhere"] / unit
            print(
                f"  {name:20s} {one['seconds']:8.3f} {one['ratio']:6.2f} {one['processor_seconds']:9.3f} s"
                f" {first:15.1f} {others:10.1f}"
            )
    if options.json is not None:
        options.json.write_text(json.dumps({"unit_bytes": unit, **made}, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
