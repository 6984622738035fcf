"""States a case in the terms of this very implementation, and in those of the oracle.

An engine that owns its step may clear gradients there, and may train in no dtype wider than float32: such a case is asked,
of the engine and of the oracle alike, with gradients cleared after each step and in that dtype. Fitting twice is
fitting once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from fsdp_testing.adapters.adapter import Adapter
from fsdp_testing.cases.records import AXES, Case, Operation, ZeroGrad
from fsdp_testing.oracle.comparison import Comparison

_WIDEST = "float64"
_CLEARED = ZeroGrad()


def fitted(case: Case, adapter: Adapter) -> Case:
    """Return the case as the implementation is asked it."""
    if case.model.dtype == _WIDEST and adapter.widest_dtype != _WIDEST:
        case = replace(case, model=replace(case.model, dtype=adapter.widest_dtype))
    return replace(case, program=tuple(_cleared(case.program))) if adapter.step_clears_gradients else case


def _cleared(program: Sequence[Operation]) -> Iterator[Operation]:
    for index, operation in enumerate(program):
        yield operation
        if operation.steps and program[index + 1 : index + 2] != (_CLEARED,):
            yield _CLEARED


def as_observed(comparison: Comparison, adapter: Adapter) -> Comparison:
    """Return the comparison without what the adapter cannot show: gradients, where it gathers whole parameters."""
    return comparison if adapter.observes_gradients else replace(comparison, gradients=False)


def oracle_view(case: Case) -> Case:
    """Return what the oracle's free replay depends on; it knows no strategy, wrapping or offload."""
    for axis in AXES:
        case = axis.for_oracle(case)
    return case


def lockstep_view(case: Case) -> Case:
    """Return what the oracle's lockstep depends on, where it knows no units: whether gradients are replicated, besides.

    What was accumulated may be reduced with replicated gradients, which decides bounds (`Replay`).
    """
    replicated = case.strategy == "no_shard" or case.world.mesh_shape[-1] == 1
    return replace(oracle_view(case), strategy="no_shard" if replicated else "full_shard")
