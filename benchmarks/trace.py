"""The cost of recording a trace, or streams: training steps with the recorder on and off, in turns, in the same ranks.

Reported are medians over steps of the slowest rank, and their ratio; the goal is below 1.10. Streams are recorded of a model
that is made under observation, so that turns are rounds of several steps there, and a step has its part of the search for
races; the goal is below 5.

    python benchmarks/trace.py
    python benchmarks/trace.py --ranks 4 --width 64 --steps 100 --json out.json
    python benchmarks/trace.py --streams

The narrower the layers the larger the share of the recorder: at --width 16 nothing but overhead is left. Only run it on an
otherwise idle machine.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fsdp_testing import run_ranks
from fsdp_testing.adapters import registry
from fsdp_testing.adapters.protocol import Setup
from fsdp_testing.adapters.shared import naming
from fsdp_testing.explain.trace.run import TraceRecorder, watch_modules, watch_waits
from fsdp_testing.ranks.ledger import interception
from fsdp_testing.ranks.pool.world import current_world
from fsdp_testing.ranks.streams.observation import observe
from fsdp_testing.ranks.streams.races import races

NAMES = ("torch-fsdp1", "torch-fsdp2", "fsdp_ref-wrapper", "fsdp_ref-composable")
UNITS = 8
WARMUP = 4
ROUNDS = 5

Clock = Callable[[], float]


class Block(nn.Module):
    """Two linear layers with a residual."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.nn.functional.gelu(self.up(x)))


class Training:
    """A model of an implementation, made on this rank, and one step of it."""

    def __init__(self, name: str, width: int, batch: int, clock: Clock) -> None:
        self.clock = clock
        self.world = world = current_world()
        torch.manual_seed(0)
        self.adapter = adapter = registry.load(name)
        module = nn.Sequential(*(Block(width) for _ in range(UNITS)))
        units = tuple(str(index) for index in range(UNITS))
        setup = Setup(world.rank, world.size, world.device, group=world.group, mesh=world.mesh, units=units)
        self.model = adapter.wrap(module, setup)
        self.optimizer = torch.optim.SGD([each for _, each in adapter.named_parameters(self.model)], lr=1e-3)
        self.inputs = torch.randn(batch, width)

    def seconds(self) -> float:
        """Take one step and return how long it took."""
        self.world.barrier()
        start = self.clock()
        self.model(self.inputs).sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return self.clock() - start


def measure_streams(name: str, width: int, batch: int, steps: int, clock: Clock) -> dict[str, Any]:
    """As `measure`, with streams recorded in every other round of steps."""
    seconds: dict[bool, list[float]] = {False: [], True: []}
    events = 0
    for turn in range(2 * ROUNDS):
        on, here = turn % 2 == 1, steps // ROUNDS + WARMUP
        with observe(current_world().device) if on else nullcontext() as history:
            training = Training(name, width, batch, clock)
            taken = [training.seconds() for _ in range(here)]
            training.adapter.finish(training.model)
        judging = 0.0
        if history is not None:
            start = clock()
            assert not races(history)
            judging, events = (clock() - start) / here, len(history.entries) // here
        seconds[on] += [each + judging for each in taken[WARMUP:]]
    return {"off": seconds[False], "on": seconds[True], "events": events}


def measure(name: str, width: int, batch: int, steps: int, clock: Clock) -> dict[str, Any]:
    """Seconds of every step with the recorder off and on, and how many events a step has; runs in each rank."""
    training = Training(name, width, batch, clock)
    adapter, model = training.adapter, training.model
    names = {inner: naming.original(fqn) for fqn, inner in model.named_modules()}
    seconds: dict[bool, list[float]] = {False: [], True: []}
    events = 0
    for step in range(2 * (steps + WARMUP)):
        recorder = TraceRecorder(lambda: 0)
        on = step % 2 == 1
        with ExitStack() as stack:
            if on:
                stack.enter_context(interception.listen(recorder.collective))
                stack.enter_context(adapter.trace_units(model, recorder.unit))
                stack.enter_context(watch_modules(recorder, names))
                stack.enter_context(watch_waits(recorder))
            taken = training.seconds()
            if step >= 2 * WARMUP:
                seconds[on].append(taken)
        events = max(events, len(recorder.events))
    adapter.finish(model)
    return {"off": seconds[False], "on": seconds[True], "events": events}


def report(name: str, options: argparse.Namespace) -> dict[str, Any]:
    what = measure_streams if options.streams else measure
    clock = time.process_time if options.processor else time.perf_counter
    ranks = run_ranks(what, name, options.width, options.batch, options.steps, clock, size=options.ranks, timeout=None)
    off = max(statistics.median(rank["off"]) for rank in ranks)
    on = max(statistics.median(rank["on"]) for rank in ranks)
    return {"implementation": name, "off_ms": 1000 * off, "on_ms": 1000 * on, "events": ranks[0]["events"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--names", nargs="+", default=NAMES)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--streams", action="store_true", help="what recording streams costs, and the search for races")
    parser.add_argument(
        "--processor", action="store_true", help="processor time of a rank, which a busy machine spoils less"
    )
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    found = []
    print(f"{UNITS} units of width {options.width}, {options.ranks} ranks, medians of {options.steps} steps")
    for name in options.names:
        row = report(name, options)
        found.append(row)
        ratio = row["on_ms"] / row["off_ms"]
        print(
            f"{name:20} off {row['off_ms']:8.2f} ms  on {row['on_ms']:8.2f} ms  ratio {ratio:.3f}  {row['events']} events"
        )
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
