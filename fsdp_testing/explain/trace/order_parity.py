"""Compares the order in which two implementations do things: the runs, and their comparisons.

Four aspects, on every rank: the units with their parameters in the implementation's order; what was asked of units
(unshard, reshard); what that did to memory (gather, free); the collectives. Models: several levels of nesting, a plain
stack, a transformer with tied weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from fsdp_testing.adapters import registry
from fsdp_testing.base.documentation import page
from fsdp_testing.cases.models import MODELS
from fsdp_testing.cases.records import (
    Batch,
    Case,
    Forward,
    ForwardBackward,
    ModelSpec,
    Operation,
    Step,
    WorldSpec,
    WrappingPlan,
    ZeroGrad,
)
from fsdp_testing.errors import InvalidArgument
from fsdp_testing.explain.trace.run import Trace, trace
from fsdp_testing.judging.checkers.event_order import (
    OrderComparison,
    collective_steps,
    compare_steps,
    ranks_agree,
    transition_steps,
)
from fsdp_testing.judging.checkers.event_rules import check_lifecycle

PARITY_MODELS = ("mlp", "deep_nest", "gpt")
PARITY_STRATEGIES = ("full_shard", "shard_grad_op", "no_shard")
ASPECTS = {"requests": frozenset({"unshard", "reshard"}), "memory": frozenset({"gather", "free"})}


@dataclass(frozen=True, slots=True)
class CaseParity:
    """One case on both implementations: its comparisons, and the broken rules of each."""

    case: Case
    left: Trace
    right: Trace
    comparisons: tuple[OrderComparison, ...]
    faults: tuple[str, ...]

    @property
    def equal(self) -> bool:
        """True if nothing differs and neither implementation breaks a rule."""
        return not self.faults and all(comparison.equal for comparison in self.comparisons)


def parity_program() -> tuple[Operation, ...]:
    """Two iterations, a forward without gradients between them, and an accumulation without `no_sync`."""
    return (
        ForwardBackward(Batch(1)),
        Step(),
        ZeroGrad(),
        Forward(Batch(2), mode="no_grad"),
        ForwardBackward(Batch(3)),
        ForwardBackward(Batch(4)),
        Step(),
        ZeroGrad(),
    )


def parity_cases(left: str, right: str, size: int, models: Sequence[str] = ()) -> tuple[Case, ...]:
    """Return the cases that both implementations claim.

    Raises:
        InvalidArgument: an unknown model, an implementation that cannot be traced, or nothing that both claim.
    """
    chosen = tuple(models) or PARITY_MODELS
    unknown = [name for name in chosen if name not in MODELS]
    if unknown:
        raise InvalidArgument(
            f"parity: expected models among {', '.join(MODELS)}, got {unknown}. Choose from the list."
        )
    claims = [registry.adapter_of(name).capabilities for name in (left, right)]
    for name, claimed in zip((left, right), claims, strict=True):
        if "unit_trace" not in claimed:
            raise InvalidArgument(
                f"parity: expected implementations that claim `unit_trace`, got {name}, which does not. "
                f"Its adapter must report its units and transitions ({page('docs/adapters.md')})."
            )
    both = claims[0] & claims[1]
    cases = tuple(case for case in _candidates(chosen, size) if case.required() | MODELS[case.model.name].needs <= both)
    if not cases:
        raise InvalidArgument(f"parity: expected something that {left} and {right} both claim, got nothing in common.")
    return cases


def _candidates(models: Sequence[str], size: int) -> Iterator[Case]:
    for name in models:
        for strategy in PARITY_STRATEGIES:
            yield Case(
                model=ModelSpec(name),
                world=WorldSpec(size),
                program=parity_program(),
                strategy=strategy,
                wrapping=WrappingPlan(units=MODELS[name].units),
            )


def compare_case(left: str, right: str, case: Case) -> CaseParity:
    """Trace `case` on both implementations and compare.

    Raises:
        WorldFailed: the case did not run to its end on one of them.
    """
    mine, theirs = trace(left, case), trace(right, case)
    comparisons: list[OrderComparison] = []
    for rank in range(case.world.size):
        comparisons.append(compare_steps("units", rank, _unit_steps(mine, rank), _unit_steps(theirs, rank)))
        for aspect, kinds in ASPECTS.items():
            transitions = [transition_steps(t.history, rank, kinds) for t in (mine, theirs)]
            comparisons.append(compare_steps(aspect, rank, *transitions))
        collectives = [collective_steps(t.history, rank) for t in (mine, theirs)]
        comparisons.append(compare_steps("collectives", rank, *collectives))
    faults = tuple(fault for traced in (mine, theirs) for fault in _faults(traced))
    return CaseParity(case, mine, theirs, tuple(comparisons), faults)


def _unit_steps(traced: Trace, rank: int) -> list[str]:
    return [f"{unit or '(root)'}: {', '.join(fqns) or 'no parameters'}" for unit, fqns in traced.units[rank]]


def _faults(traced: Trace) -> Iterator[str]:
    text = ranks_agree(traced.history)
    if text:
        yield f"{traced.implementation}: ranks disagree, {text}"
    for broken in check_lifecycle(traced.history):
        yield f"{traced.implementation}: rank {broken.rank}, operation {broken.operation}: {broken.sentence}"
