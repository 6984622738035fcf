"""Communication hooks: the user's own function reduces gradients, and is called when and with what it must be.

The hooks here are the user's: written with torch's public collectives, knowing nothing of any implementation. They
average like the built-in reduction, average after casting to 16 bits, or keep something else than the mean.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from fsdp_testing.adapters.adapter import Adapter
from fsdp_testing.adapters.protocol import Setup
from fsdp_testing.cases.records import Case, Finding, MixedPrecisionSpec, Observe, RankObservation, Step, ZeroGrad
from fsdp_testing.checks.suites.check import PLAIN_SGD, Place, Suite
from fsdp_testing.checks.suites.schedules import accumulated, iterations, micro_batch
from fsdp_testing.judging.case_runner import RunMode
from fsdp_testing.judging.checkers import hook_calls
from fsdp_testing.judging.checkers.hook_calls import HookCall, HookedObservation
from fsdp_testing.oracle import models, oracle, rank_jobs
from fsdp_testing.oracle.comparison import Comparison
from fsdp_testing.oracle.disturbance import Disturbance
from fsdp_testing.oracle.execute import RankProgram
from fsdp_testing.oracle.quantities import Expectation
from fsdp_testing.oracle.reduction import Reduced
from fsdp_testing.oracle.replay import Replay
from fsdp_testing.ranks.pool import Failed
from fsdp_testing.ranks.pool.world import current_world

_LOCKSTEP = Comparison(lockstep=True)
# `reduce_scatter_tensor` before torch 2.13.
_REDUCE_SCATTER: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@dataclass(frozen=True, slots=True)
class Way:
    """How the hook reduces: in `wire` (None: the gradient's own dtype), and what it multiplies the mean by."""

    wire: str | None = None
    factor: float = 1.0


@dataclass(slots=True)
class HookState:
    """What the hook is given first, on every call: one object for all units."""

    way: Way
    group: dist.ProcessGroup
    index: Callable[[], int]
    calls: list[HookCall]


def reduce_gradient(state: HookState, gradient: torch.Tensor, output: torch.Tensor | None = None) -> None:
    """Reduce as the user's hook. Collectives: one reduce-scatter or all-reduce over the group; every rank calls."""
    squares = float(gradient.detach().double().square().sum())
    given = -1 if output is None else output.numel()
    dtype = str(gradient.dtype).removeprefix("torch.")
    state.calls.append(HookCall(state.index(), gradient.numel(), dtype, squares, given))
    size = dist.get_world_size(state.group)
    wire = gradient if state.way.wire is None else gradient.to(models.dtype_of(state.way.wire))
    if output is None:
        total = wire.clone()
        dist.all_reduce(total, group=state.group)
        gradient.copy_(total / size * state.way.factor)
        return
    mine = torch.empty(output.numel(), dtype=wire.dtype, device=wire.device)
    _REDUCE_SCATTER(mine, wire.reshape(-1).contiguous(), group=state.group)
    output.copy_((mine / size * state.way.factor).view_as(output))


# ----------------------------------------------------------------------------------------------- on the ranks


def run_hooked(adapter: Adapter, case: Case, observe_all: bool, way: Way) -> RankObservation | Failed:
    """Run the case with the hook registered, and report its calls.

    Collectives: those of the implementation and of the hook; every rank of the world runs the same call.
    """
    world = current_world()
    calls: list[HookCall] = []
    state = HookState(way, world.group, lambda: program.index, calls)

    def wrap(module: nn.Module, setup: Setup) -> nn.Module:
        model = adapter.wrap(module, setup)
        adapter.register_comm_hook(model, state, reduce_gradient)
        return model

    program = RankProgram(case, replace(adapter, wrap=wrap), world.rank)
    seen = rank_jobs.run_program(program, observe_all)
    if isinstance(seen, Failed):
        return seen
    with rank_jobs.no_warnings():
        expected, elements = _own_gradients(case, world.rank)
    return seen.extended(HookedObservation, calls=tuple(calls), expected_squares=expected, elements=elements)


def _own_gradients(case: Case, rank: int) -> tuple[dict[int, float], int]:
    """Sum of squares of this rank's own gradient at each reduction, without any other rank; parameters never step."""
    model = models.build_model(case)
    found: dict[int, float] = {}
    for index, operation in enumerate(case.program):
        for batch in operation.batches() if operation.runs_backward else ():
            inputs = models.make_inputs(case, batch, rank)
            models.forward(model, case, batch, rank, inputs).loss.backward()
            if not operation.pending_after(False):
                grads = [p.grad for p in model.parameters() if p.grad is not None]
                found[index] = sum(float(grad.double().square().sum()) for grad in grads)
                model.zero_grad()
    return found, sum(parameter.numel() for parameter in model.parameters())


# ----------------------------------------------------------------------------------------------- what is right


def review_calls(case: Case, ranks: Sequence[RankObservation], _expectation: Expectation) -> Finding | None:
    """Review the calls of every rank: one for each unit that has trainable parameters of its own, outside inner units."""
    owners = set()
    for name, parameter in models.build_model(case).named_parameters():
        inside = [unit for unit in case.wrapping.units if name.startswith(f"{unit}.")]
        owners |= {max(inside, key=len, default="")} if parameter.requires_grad else set()
    return hook_calls.check_calls(case, ranks, len(owners), case.model.dtype)


def _as_reduced_in(wire: str, case: Case) -> Case:
    """Return the case as the oracle sees it: gradients are reduced in `wire`, by whoever does it."""
    return replace(case, mixed_precision=MixedPrecisionSpec(reduce_dtype=wire))


def _trained(place: Place) -> Iterable[Case]:
    yield place.case("uneven", *iterations(3))


def _compressed(place: Place) -> Iterable[Case]:
    yield place.case(
        "uneven", micro_batch(0), Observe(), Step(), ZeroGrad(), micro_batch(1), dtype="float32", optimizer=PLAIN_SGD
    )


# ----------------------------------------------------------------------------------------------- in the oracle


class _Scaled(Replay):
    """A replay whose reduction gives a multiple of the mean."""

    factor = 1.0

    def _add_mean(self, fqn: str, parameter: nn.Parameter, reduced: Reduced, summed: torch.dtype) -> None:
        super()._add_mean(fqn, parameter, replace(reduced, mean=reduced.mean * self.factor), summed)


def expect_scaled(case: Case, observe_all: bool, factor: float) -> Expectation:
    """Return what the case gives if the hook multiplies the mean by `factor`."""

    def make(disturbance: Disturbance) -> Replay:
        replay = _Scaled(case, disturbance=disturbance)
        replay.factor = factor
        return replay

    with rank_jobs.no_warnings():
        return oracle.expect_free(case, observe_all=observe_all, make=make)


_MEAN = Way()
_REVIEWED = RunMode(run_hooked, (_MEAN,), review=review_calls)
_QUARTER = Way(factor=0.25)


def _compressed_to(wire: str) -> RunMode:
    return RunMode(run_hooked, (Way(wire),), seen_as=partial(_as_reduced_in, wire))


SUITE = Suite(needs={"comm_hook"}, source="torch.distributed.fsdp.FullyShardedDataParallel.register_comm_hook")


@SUITE.check("comm_hook.called_once_per_unit", mode=_REVIEWED)
def _never_stepping(place: Place) -> Iterable[Case]:
    """Each backward calls the hook once for every unit, with the unit's whole gradient on this rank."""
    # No step: gradients are a function of the initial values, so the rank's own are known without the other ranks.
    for model in ("uneven", "deep_nest"):
        yield place.case(model, micro_batch(0), ZeroGrad(), micro_batch(1), Observe(), optimizer=PLAIN_SGD)


@SUITE.check("comm_hook.not_in_no_sync", mode=_REVIEWED)
def _accumulating(place: Place) -> Iterable[Case]:
    """Inside no_sync the hook is not called; the next reduction is given the sum of all micro-batches."""
    yield place.case("mlp", *accumulated(0, 1, 2), Observe(), ZeroGrad(), micro_batch(3), optimizer=PLAIN_SGD)
    yield place.case("deep_nest", *accumulated(0, 1), Observe(), optimizer=PLAIN_SGD)


SUITE.add(
    "comm_hook.averages",
    "Training with a hook that averages is training without a hook.",
    _trained,
    mode=RunMode(run_hooked, (_MEAN,)),
)
SUITE.add(
    "comm_hook.result_is_kept",
    "What the hook returns is the gradient: nothing else is reduced, divided or added.",
    _trained,
    mode=RunMode(
        run_hooked, (_QUARTER,), expect_scaled, (_QUARTER.factor,), besides="what the communication hook returns"
    ),
)
SUITE.add(
    "comm_hook.bfloat16",
    "A hook that reduces in bfloat16 gives what reduction in bfloat16 gives.",
    _compressed,
    comparison=_LOCKSTEP,
    mode=_compressed_to("bfloat16"),
)
SUITE.add(
    "comm_hook.float16",
    "A hook that reduces in float16 gives what reduction in float16 gives.",
    _compressed,
    comparison=_LOCKSTEP,
    mode=_compressed_to("float16"),
)
