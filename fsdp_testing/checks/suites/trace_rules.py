"""Traces: what ranks did, judged by the promises of sharding. The numbers are compared besides, and must hold first."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial

from fsdp_testing.adapters.adapter import Adapter
from fsdp_testing.cases.records import Case, Finding, RankObservation, Step, WrappingPlan
from fsdp_testing.checks.suites.check import FLAT, Place, Suite
from fsdp_testing.checks.suites.checkpointing import plan
from fsdp_testing.checks.suites.schedules import accumulated, forward, iterations
from fsdp_testing.explain.trace.run import trace_case
from fsdp_testing.judging.case_runner import RunMode
from fsdp_testing.judging.checkers import event_rules
from fsdp_testing.judging.checkers.event_rules import Rule, TracedObservation
from fsdp_testing.oracle import rank_jobs
from fsdp_testing.oracle.models import build_model
from fsdp_testing.oracle.quantities import Expectation
from fsdp_testing.ranks.pool import Failed

_SHARDED = ("full_shard", "shard_grad_op")


def run_traced(adapter: Adapter, case: Case, observe_all: bool) -> RankObservation | Failed:
    """Run the case and record what this rank does; without a record where snapshots after every operation would be in it.

    Collectives: those of the implementation; every rank of the world runs the same call.
    """
    if observe_all and not adapter.observes_locally:
        return rank_jobs.run_case(adapter, case, observe_all)
    traced = trace_case(adapter, case, observe_all)
    if isinstance(traced, Failed):
        return Failed(traced.value.observation)
    shapes = {fqn: tuple(p.shape) for fqn, p in build_model(case).named_parameters()}
    return traced.observation.extended(TracedObservation, events=traced.events, units=traced.units, shapes=shapes)


def _review(rules: Sequence[Rule], case: Case, ranks: Sequence[RankObservation], _seen: Expectation) -> Finding | None:
    return event_rules.review(rules, case, ranks)


def _by(*rules: Rule) -> RunMode:
    return RunMode(run_traced, review=partial(_review, rules), kept=True)


def _trained(place: Place) -> Iterable[Case]:
    yield place.case("deep_nest", *iterations(2))


def _side_by_side(place: Place) -> Iterable[Case]:
    yield place.case("mlp", *iterations(2))
    yield place.case("deep_nest", *iterations(2))


SUITE = Suite(needs={"unit_trace"}, source="PyTorch FSDP, VLDB 2023, section 3")


@SUITE.check(
    "trace.same_collectives",
    source="torch.distributed: collectives of a group match in order",
    mode=_by(event_rules.same_collectives),
)
def _scheduled(place: Place) -> Iterable[Case]:
    """Every rank issues the same collectives in the same order."""
    yield place.case("deep_nest", *accumulated(0, 1), Step(), forward(2, "no_grad"), *accumulated(3, 4))


SUITE.add(
    "trace.gathered_and_freed",
    "Each unit is gathered and freed in turn, and after the last backward none is gathered.",
    _trained,
    mode=_by(event_rules.gathered_once, event_rules.all_freed),
    strategies=_SHARDED,
)
SUITE.add(
    "trace.held_while_used",
    "No module runs while the full parameters of its unit are freed.",
    _trained,
    mode=_by(event_rules.held_while_used),
    strategies=_SHARDED,
)
SUITE.add(
    "trace.gathers_needed",
    "No unit is gathered more often than the strategy needs, nor more bytes than parameters and padding.",
    _side_by_side,
    mode=_by(event_rules.gathers_needed),
    strategies=FLAT,
)


@SUITE.check("trace.reductions_needed", mode=_by(event_rules.reductions_needed))
def _accumulated(place: Place) -> Iterable[Case]:
    """Gradients are reduced once for every unit and synchronised backward, and not in no_sync."""
    yield place.case("mlp", *accumulated(0, 1, 2), Step())


@SUITE.check("trace.recomputed", source="pytorch PR 89781", mode=_by(event_rules.reductions_needed))
def _recomputed(place: Place) -> Iterable[Case]:
    """Recomputing activations reduces nothing twice."""
    for outside in (False, True):
        yield place.case("mlp", *iterations(2), wrapping=plan("mlp", outside=outside))


SUITE.add(
    "trace.memory_bound",
    "Never more full parameters are held than the unit that runs, those around it, and one ahead.",
    _side_by_side,
    mode=_by(event_rules.within_memory),
    strategies=_SHARDED,
)


@SUITE.check(
    "trace.order",
    source="PyTorch FSDP, VLDB 2023, section 3.3.2; B009",
    mode=_by(event_rules.in_order),
    strategies=_SHARDED,
)
def _single_units(place: Place) -> Iterable[Case]:
    """Units are gathered in the order in which they run, and for backward in the reverse of it."""
    yield place.case("mlp", *iterations(2))
    yield place.case("deep_nest", *iterations(2), wrapping=WrappingPlan(("inner",)))
