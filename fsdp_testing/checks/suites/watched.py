"""Runs that are watched in addition to their numbers: traced, with recorded streams, or beside DDP on the same ranks.

DDP is a second oracle, which shares no code with the first one and knows neither shards nor units. Both are right within the
oracle's bound, so they are within twice that bound of one another; where DDP has no value, nothing is compared. In mixed
precision DDP trains full parameters that are cast in each forward, and its own hook reduces in the requested dtype.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from fsdp_testing.adapters import registry
from fsdp_testing.adapters.adapter import Adapter
from fsdp_testing.adapters.protocol import Precision, Setup
from fsdp_testing.adapters.torch import ddp as torch_ddp
from fsdp_testing.cases.records import Case, FailureKind, Finding, RankObservation, WrappingPlan
from fsdp_testing.errors import HarnessError, InvalidImplementation
from fsdp_testing.explain.trace.run import trace_case
from fsdp_testing.judging.case_runner import RunMode
from fsdp_testing.judging.checkers import agreement, event_rules
from fsdp_testing.judging.checkers.event_rules import Rule, TracedObservation
from fsdp_testing.judging.checkers.explain import finding
from fsdp_testing.oracle import assemble, models, rank_jobs
from fsdp_testing.oracle.execute import RankProgram
from fsdp_testing.oracle.kept_groups import mesh_in
from fsdp_testing.oracle.quantities import Comparison, Expectation, Expected, ExpectedPoint, Quantity
from fsdp_testing.ranks.pool import Failed
from fsdp_testing.ranks.pool.world import current_world
from fsdp_testing.ranks.streams.history import stream_of_group
from fsdp_testing.ranks.streams.observation import observe
from fsdp_testing.ranks.streams.races import StreamAccount

TWICE = "twice the oracle's bound, since both are within it: "


@dataclass(frozen=True, slots=True)
class PairedObservation(RankObservation):
    """The report of a rank that ran the case a second time, with DDP.

    Attributes:
        other: What it reported then.
        gradients: Whether the implementation shows gradients.
    """

    other: RankObservation | None = None
    gradients: bool = True


def review_pair(case: Case, ranks: Sequence[RankObservation], expectation: Expectation) -> Finding | None:
    """Compare what the ranks hold with what DDP held at the same points.

    Raises:
        HarnessError: DDP did not run the case, so there is no second oracle; this is a failure of the harness.
    """
    references = [rank.other for rank in ranks if isinstance(rank, PairedObservation) and rank.other is not None]
    # A failing second oracle says nothing about the implementation.
    wrong = tuple(rank.rank for rank in references if rank.error is not None)
    if len(references) != len(ranks) or wrong:
        got = next((rank.error.message for rank in references if rank.error is not None), "it reported nothing")
        raise HarnessError(f"second oracle: expected DDP to run {case.identity}, got {got}. Run the case by itself.")
    states = assemble.states(references)
    points = tuple(_point(point, states[point.index]) for point in expectation.points if point.index in states)
    if expectation.notes.get("mode") == "lockstep":
        # Each bound is that of one operation, from the implementation's own state: DDP's is the same before the first.
        points = tuple(point for point in points if point.snapshot)[:1]
    shown = all(rank.gradients for rank in ranks if isinstance(rank, PairedObservation))
    due, comparison = replace(expectation, points=points), Comparison(outputs=False, gradients=shown, optimizer=False)
    finding, tally = agreement.review(case, due, ranks, comparison, "compared with DDP on the same ranks")
    if not tally.comparisons:
        raise HarnessError(
            f"second oracle: expected something to compare in {case.identity}, got nothing. Observe more."
        )
    return finding


def _point(point: ExpectedPoint, state: assemble.GatheredState) -> ExpectedPoint:
    quantities: dict[Quantity, Expected] = {}
    for quantity, expected in point.quantities.items():
        values = {"value": state.values, "gradient": state.gradients}.get(quantity.kind)
        value = None if values is None else values.get(quantity.name)
        if value is not None and expected.value is not None:
            why = TWICE + (expected.derivation or "bitwise")
            quantities[quantity] = Expected(value, 2 * expected.bound, why)
    return replace(point, quantities=quantities)


# ----------------------------------------------------------------------------------------------------- beside DDP


class LowPrecision(nn.Module):
    """A module whose parameters are stored in full and computed with in `dtype`."""

    def __init__(self, inner: nn.Module, dtype: torch.dtype) -> None:
        super().__init__()
        self.inner = inner
        self.dtype = dtype

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Cast parameters and inputs, then run the module."""
        cast, inputs, options = models.cast_floats((dict(self.inner.named_parameters()), args, kwargs), self.dtype)
        return torch.func.functional_call(self.inner, cast, inputs, options)


def _reduce_in(wire: torch.dtype, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """DDP's hook: the bucket's mean over the ranks, reduced in `wire`. Collectives: one all-reduce; every rank calls."""
    total = bucket.buffer().to(wire)
    dist.all_reduce(total)
    done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    done.set_result(total.div_(dist.get_world_size()).to(bucket.buffer().dtype))
    return done


def ddp(module: nn.Module, setup: Setup) -> nn.Module:
    """DDP around the module, in the setup's precision. Collectives: those of DDP's construction; every rank calls."""
    precision = setup.precision
    if precision == Precision():
        return torch_ddp.wrap(module, setup)
    inner = module if precision.param_dtype is None else LowPrecision(module, precision.param_dtype)
    model = torch_ddp.wrap(inner, replace(setup, precision=Precision()))
    if precision.on_the_wire is not None and isinstance(model, DistributedDataParallel):
        # DDP reads annotations, and wants types where postponed ones are text: a lambda has none.
        model.register_comm_hook(precision.on_the_wire, lambda wire, bucket: _reduce_in(wire, bucket))  # noqa: PLW0108 - see above
    return model


def _named_parameters(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return [(fqn.removeprefix("module.").removeprefix("inner."), p) for fqn, p in model.named_parameters()]


SECOND = Adapter.of(replace(torch_ddp.IMPLEMENTATION, wrap=ddp, named_parameters=_named_parameters))
"""DDP, in any precision."""


def run_beside_ddp(adapter: Adapter, case: Case, observe_all: bool) -> RankObservation | Failed:
    """Run the case with the implementation, and then with DDP.

    Collectives: those of both; every rank of the world runs the same call.
    """
    plain = replace(case, strategy="no_shard", wrapping=WrappingPlan(), cpu_offload=False)
    observation = rank_jobs.run_case(adapter, case, observe_all)
    if isinstance(observation, Failed):
        return observation
    with rank_jobs.no_warnings():
        other = RankProgram(plain, SECOND, observation.rank).run(observe_all=observe_all)
    return observation.extended(PairedObservation, other=other, gradients=adapter.observes_gradients)


BESIDE_DDP = RunMode(run_beside_ddp, review=review_pair)

# --------------------------------------------------------------------------------------------------------- traces


def run_traced(adapter: Adapter, case: Case, observe_all: bool) -> RankObservation | Failed:
    """Run the case and record what this rank does; without a record where snapshots after every operation would be in it.

    Collectives: those of the implementation; every rank of the world runs the same call.
    """
    if observe_all and not adapter.observes_locally:
        return rank_jobs.run_case(adapter, case, observe_all)
    traced = trace_case(adapter, case, observe_all)
    if isinstance(traced, Failed):
        return Failed(traced.value.observation)
    shapes = {fqn: tuple(p.shape) for fqn, p in models.build_model(case).named_parameters()}
    return traced.observation.extended(TracedObservation, events=traced.events, units=traced.units, shapes=shapes)


def _review(rules: Sequence[Rule], case: Case, ranks: Sequence[RankObservation], _seen: Expectation) -> Finding | None:
    return event_rules.review(rules, case, ranks)


def traced(*rules: Rule) -> RunMode:
    """Return a mode in which events are recorded and judged by the rules."""
    return RunMode(run_traced, review=partial(_review, rules), kept=True)


# -------------------------------------------------------------------------------------------------------- streams


@dataclass(frozen=True, slots=True)
class StreamObservation(RankObservation):
    """The report of a rank with recorded streams."""

    account: StreamAccount = StreamAccount((), 0, (), 0)


def run_observed(adapter: Adapter, case: Case, observe_all: bool) -> RankObservation | Failed:
    """Run the case on this rank with its streams recorded.

    Collectives: those of the implementation; every rank of the world runs the same call.

    Raises:
        InvalidImplementation: The adapter claims `streams`, and nothing ran on a second stream.
    """
    program = RankProgram(case, registry.adapter_of(adapter), current_world().rank)
    # Late copies and garbage are writes that no real device makes.
    program.late = program.garbage = False
    with observe(current_world().device) as history:
        result = rank_jobs.run_program(program, observe_all)
    if isinstance(result, Failed):
        return result
    activations: tuple[str, ...] = ()
    if case.world.tensor_parallel > 1:
        activations = (stream_of_group(mesh_in(current_world(), case.world).get_group("tensor").group_name),)
    account = StreamAccount.of(history, activations)
    if len(account.streams) < 2 and current_world().size > 1:
        raise InvalidImplementation(
            f"{adapter.name}: expected work on several streams, got work on the default stream alone, so there is no verdict "
            "on its streams. Ask torch.get_device_module(device) for Stream, Event and current_stream when the model first "
            "runs; or do not claim `streams`."
        )
    return result.extended(StreamObservation, account=account)


def no_races(case: Case, ranks: Sequence[RankObservation], _expected: Expectation) -> Finding | None:
    """Return the first race of the first rank that has one."""
    racing = [rank for rank in ranks if isinstance(rank, StreamObservation) and rank.account.races]
    if not racing:
        return None
    first, account = racing[0], racing[0].account
    more = f" ({account.race_count - 1} more on this rank)" if account.race_count > 1 else ""
    statement = f"{account.races[0].summary}, on rank {first.rank}{more}"
    return finding(
        case,
        FailureKind.RACE,
        "streams",
        len(case.program),
        statement,
        ranks=tuple(rank.rank for rank in racing),
        detail="\n".join(str(each) for each in account.races),
    )


IN_FLIGHT = 2
"""The most all-gathers in flight on a limited host: FSDP1's number, which the reference uses too."""


def limited(case: Case, ranks: Sequence[RankObservation], _expected: Expectation) -> Finding | None:
    """Report a rank whose device may still use more full parameters than it holds at once plus `IN_FLIGHT`.

    Raises:
        HarnessError: A rank made no recognised all-gather, so nothing was counted.
    """
    accounts = [(rank.rank, rank.account.full_buffers) for rank in ranks if isinstance(rank, StreamObservation)]
    silent = [rank for rank, buffers in accounts if not buffers.held]
    if silent and case.world.size > 1:
        raise HarnessError(
            f"limited gathers: expected all-gathers on each rank, got none on {silent}, so nothing was counted. Gather by a "
            "collective of torch.distributed, or do not claim `limited_gathers`."
        )
    ahead = [(rank, buffers) for rank, buffers in accounts if buffers.occupied > buffers.held + IN_FLIGHT]
    if not ahead:
        return None
    first, buffers = ahead[0]
    return finding(
        case,
        FailureKind.KEPT,
        "gathers ahead",
        len(case.program),
        f"rank {first} holds {buffers.held} full parameters at once at most, and begins an all-gather while the device may "
        f"still use {buffers.occupied}, with those released; {buffers.held + IN_FLIGHT} are allowed",
        ranks=tuple(rank for rank, _ in ahead),
        detail="\n".join(("the all-gather is called at", *(f"  {place}" for place in buffers.site))),
    )


STREAMS_OBSERVED = RunMode(run_observed, review=no_races)

GATHERS_LIMITED = RunMode(run_observed, review=limited)
"""How many full parameters the device may still use when a gather begins."""
