"""The processor time of a plan: layout, messages, peak and time of a step of a model with many parameters; no ranks.

    python benchmarks/plan.py                       # 100,000 parameters in 1,000 units over 1,024 ranks; the goal is 1 s
    python benchmarks/plan.py --parameters 1000000

Processor time says the same on a busy machine, or nearly. The model is made first, and is not counted.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
from torch import nn

from fsdp_ref.plan.traffic import LIBRARIES, messages, peak_bytes, step_seconds
from fsdp_ref.plan.unit_layouts import unit_layouts

LAYERS = 50  # of a unit, with two parameters each


def seconds(model: nn.Module, units: list[str], ranks: int) -> float:
    """Plan once and return the processor time."""
    began = time.process_time()
    layouts = unit_layouts(model, world_size=ranks, units=units)
    for library in LIBRARIES:
        sent = messages(layouts, strategy="FULL_SHARD", replicas=1, library=library)
        peak_bytes(layouts, strategy="FULL_SHARD", library=library)
        step_seconds(sent, 10**9, tokens=4096, link_bytes=5e10, flops=4e14)
    return time.process_time() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parameters", type=int, default=100_000)
    parser.add_argument("--ranks", type=int, default=1024)
    parser.add_argument("--repeat", type=int, default=5)
    options = parser.parse_args()
    names = [str(number) for number in range(options.parameters // (2 * LAYERS))]
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Sequential(*(nn.Linear(3, 3) for _ in range(LAYERS))) for _ in names))
    taken = [seconds(model, names, options.ranks) for _ in range(options.repeat)]
    print(
        f"{sum(1 for _ in model.parameters()):,} parameters in {len(names):,} units over {options.ranks:,} ranks: "
        f"{min(taken):.2f} s at best, {statistics.median(taken):.2f} s median of {options.repeat}"
    )


if __name__ == "__main__":
    main()
