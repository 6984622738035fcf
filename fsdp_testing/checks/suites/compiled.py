"""Models that users compile: each unit before it is wrapped, as torchtitan does, or the whole model once it is."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial

import torch
from torch import nn

from fsdp_testing.adapters.adapter import Adapter
from fsdp_testing.adapters.protocol import Setup
from fsdp_testing.base.compat import graphs_compiled
from fsdp_testing.cases.records import Case, MixedPrecisionSpec, Observe, RankObservation, Reload
from fsdp_testing.checks.suites.check import (
    ADAMW,
    LOCKSTEP,
    Check,
    accumulated,
    cases,
    check,
    forward,
    iteration,
    iterations,
)
from fsdp_testing.checks.suites.programs import review_remarks
from fsdp_testing.checks.suites.state_programs import RemarkingProgram
from fsdp_testing.judging.case_runner import RunMode
from fsdp_testing.oracle import rank_jobs

BACKEND = "aot_eager"
"""Traces backward, too, so that the compiler chooses what is saved for it, as inductor does; needs no C++ compiler."""


class CompiledProgram(RemarkingProgram):
    """A program whose model is compiled: its units one by one before they are wrapped, or the wrapped model."""

    quantity = "compilation"
    units = False

    def __init__(self, case: Case, adapter: Adapter, rank: int) -> None:
        super().__init__(case, adapter, rank)
        self.compiled_before = graphs_compiled()

    def run(self, *, observe_all: bool = False) -> RankObservation:
        """Run the case as a process does that has compiled nothing: torch gives up after eight versions of one function."""
        torch.compiler.reset()
        try:
            return super().run(observe_all=observe_all)
        finally:
            torch.compiler.reset()

    def _setup(self, case: Case, module: nn.Module) -> Setup:
        for name in case.wrapping.units if self.units else ():
            module.get_submodule(name).compile(backend=BACKEND)
        return super()._setup(case, module)

    def _model_of(self, case: Case, flags: Mapping[str, bool]) -> nn.Module:
        model = super()._model_of(case, flags)
        if not self.units:
            model.compile(backend=BACKEND)
        return model

    def statements(self) -> Iterator[str]:
        """Report that nothing was compiled, so that the numbers say nothing."""
        if graphs_compiled() == self.compiled_before:
            yield "the compiler made no graph of the model, expected one at least"


def _compiled(which: str) -> RunMode:
    return RunMode(rank_jobs.run_as, (CompiledProgram, {"units": which == "units"}), review=review_remarks)


_SCHEDULE = (*iteration(0), *accumulated(1, 2), Observe(), forward(5), *iterations(2, first=3))
# Each unit is of a user's class: the compiler makes no graph of a layer of torch by itself.
compiled = partial(
    check, source="torch.nn.Module.compile; torchtitan compiles each block, then shards it", needs={"compiled"}
)

CHECKS: tuple[Check, ...] = (
    compiled("compile.units", "Units that are compiled before they are wrapped train as in one process.",
             cases("deep_nest gpt", *_SCHEDULE, optimizer=ADAMW), mode=_compiled("units")),
    compiled("compile.reloaded", "Compiled units are saved and loaded into others, which train on.",
             cases("deep_nest", *iteration(0), Reload(), *iteration(1), optimizer=ADAMW), mode=_compiled("units"),
             strategies=("full_shard", "no_shard")),
    compiled("compile.low_precision", "Units that are compiled cast as others do.",
             cases("gpt", *iterations(2), dtype="float32", precision=MixedPrecisionSpec("bfloat16", "float32")),
             mode=_compiled("units"), comparison=LOCKSTEP, strategies=("full_shard", "shard_grad_op")),
    compiled("compile.model", "A wrapped model that is compiled trains as in one process.",
             cases("deep_nest", *_SCHEDULE, optimizer=ADAMW), mode=_compiled("model")),
)  # fmt: skip
"""The compiler chooses what is saved for backward, and calls hooks from code of its own."""
