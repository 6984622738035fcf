"""The functions that rank processes run for the harness; they are named, not sent: one case per call."""

from __future__ import annotations

import gc
import time
import warnings
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from fsdp_testing.adapters import registry
from fsdp_testing.adapters.adapter import Adapter
from fsdp_testing.adapters.protocol import Division
from fsdp_testing.cases.records import OUTLIVES, PARAMETERS_OUTLIVE, UNIT_ROUNDOFF, Case, RankObservation
from fsdp_testing.oracle import oracle
from fsdp_testing.oracle.accounts import AccountedObservation, AccountedProgram, program_for
from fsdp_testing.oracle.assemble import GatheredState
from fsdp_testing.oracle.disturbance import Disturbance
from fsdp_testing.oracle.execute import RankProgram
from fsdp_testing.oracle.gradient_terms import GradientTerm
from fsdp_testing.oracle.gradient_terms import gradient_terms as terms_of
from fsdp_testing.oracle.models import dtype_of
from fsdp_testing.oracle.module_values import Seen, WatchedObservation, WatchedProgram
from fsdp_testing.oracle.module_values import expect_modules as modules_of
from fsdp_testing.oracle.quantities import Expectation, Expected
from fsdp_testing.oracle.replay import Replay
from fsdp_testing.oracle.setup import division_of, module_to_wrap
from fsdp_testing.ranks.ledger.interception import listen
from fsdp_testing.ranks.ledger.records import Call
from fsdp_testing.ranks.pool import Failed
from fsdp_testing.ranks.pool.world import current_world

_FREEZE_AFTER = 2
_ROUNDS = 4
_PAUSE_SECONDS, _PATIENCE_SECONDS = 0.01, 1.0
_collections = [0]


@dataclass(frozen=True, slots=True)
class Otherwise:
    """Deviations of an implementation from its own description, for the oracle's lockstep.

    Attributes:
        sums: Dtype in which local micro-batches add up; None for that of the reduction.
        division: How the mean is formed; None for what the adapter says.
    """

    sums: str | None = None
    division: Division | None = None


def run_case(
    implementation: Adapter | str, case: Case, observe_all: bool, parameters: bool = False
) -> RankObservation | Failed:
    """Run `case` through an implementation on this rank of the current world, and watch whether its model stays in memory.

    `parameters`: Watch the model's parameters instead.

    Where the implementation reports its units, the accounts of operations are taken too.

    Collectives: those of the implementation; every rank of the world runs the same call.
    """
    observation, model, kept = _run_case(implementation, case, observe_all)
    # After an exception the traceback may refer to the model, but then the world is replaced.
    if isinstance(observation, Failed):
        return observation
    left = survivors([(0, model), *((1, parameter) for parameter in kept if parameters)])
    leaks = (PARAMETERS_OUTLIVE,) if parameters and 1 in left else (OUTLIVES,) if 0 in left else ()
    return replace(observation, leaks=leaks)


def _run_case(
    implementation: Adapter | str, case: Case, observe_all: bool
) -> tuple[RankObservation | Failed, weakref.ref[Any], list[weakref.ref[Any]]]:
    """In a separate frame, which is gone with all its references before models are searched."""
    program = program_for(case, registry.adapter_of(implementation), current_world().rank)
    if not isinstance(program, AccountedProgram):
        return run_program(program, observe_all), *_weakly(program.model)
    with listen(lambda group, call, _site: program.collective(group, call)):
        observation = run_program(program, observe_all)
    if not isinstance(observation, Failed):
        observation = observation.extended(AccountedObservation, accounts=tuple(program.accounts))
    return observation, *_weakly(program.model)


def _weakly(model: nn.Module) -> tuple[weakref.ref[Any], list[weakref.ref[Any]]]:
    return weakref.ref(model), [weakref.ref(parameter) for parameter in model.parameters()]


def survivors(models: Sequence[tuple[int, weakref.ref[Any]]]) -> list[int]:
    """Collect garbage, and return the ended cases whose model is still alive."""
    for _ in range(_ROUNDS):
        # Only the next round sees what a finalizer of this round released.
        gc.collect()
        if all(model() is None for _, model in models):
            break
    limit = time.monotonic() + _PATIENCE_SECONDS
    while any(model() is not None for _, model in models) and time.monotonic() < limit:
        # The autograd engine's thread of a device lets go of the last graph after it has told the caller of backward.
        time.sleep(_PAUSE_SECONDS)
        gc.collect()
    _collections[0] += 1
    if _collections[0] == _FREEZE_AFTER:
        # Freeze the objects imported and cached so far, which stay for good: that makes later collections cheap.
        gc.freeze()
    return [index for index, model in models if model() is not None]


def run_program(program: RankProgram, observe_all: bool) -> RankObservation | Failed:
    """Run a program to its end on this rank, and let its adapter finish.

    Collectives: those of the implementation; every rank of the world runs the same call.
    """
    with no_warnings():
        observation = program.run(observe_all=observe_all)
        if observation.error is None:
            program.adapter.finish(program.model)
            return observation
        # The world is replaced after an exception; what the adapter cannot finish now goes with it.
        with suppress(Exception):
            program.adapter.finish(program.model)
    return Failed(observation)


@contextmanager
def no_warnings() -> Iterator[None]:
    """Ignore warnings: ranks may have inherited filters of a test session that turn them into errors."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def expect_free(case: Case, observe_all: bool, narrow: bool = False) -> Expectation:
    """Run the oracle freely, in this process alone; `narrow`: without disturbed replays."""
    with no_warnings():
        return oracle.expect_free(case, observe_all=observe_all, draws=0 if narrow else oracle.DRAWS)


def run_luckily(
    implementation: Adapter | str, case: Case, observe_all: bool, late: bool, garbage: bool
) -> RankObservation | Failed:
    """Run `case` as `run_as` does, without late collectives or without garbage in fresh memory."""
    return run_as(implementation, case, observe_all, RankProgram, {"late": late, "garbage": garbage})


def run_as(
    implementation: Adapter | str,
    case: Case,
    observe_all: bool,
    program: type[RankProgram],
    settings: Mapping[str, Any],
) -> RankObservation | Failed:
    """Run `case` through an implementation as a program of another class does.

    Collectives: those of the implementation and of the class; every rank of the world runs the same call.
    """
    run = program(case, registry.adapter_of(implementation), current_world().rank)
    for name, value in settings.items():
        setattr(run, name, value)
    return run_program(run, observe_all)


def expect_as(case: Case, observe_all: bool, replay: type[Replay], settings: Mapping[str, Any]) -> Expectation:
    """Run the oracle freely as a replay of another class does, in this process alone."""

    def make(disturbance: Disturbance) -> Replay:
        run = replay(case, disturbance=disturbance)
        for name, value in settings.items():
            setattr(run, name, value)
        return run

    with no_warnings():
        return oracle.expect_free(case, observe_all=observe_all, make=make)


def run_watched(implementation: Adapter | str, case: Case, observe_all: bool) -> RankObservation | Failed:
    """Run `case` through an implementation, with what every call of every module computes.

    Collectives: those of the implementation; every rank of the world runs the same call.
    """
    program = WatchedProgram(case, registry.adapter_of(implementation), current_world().rank)
    observation = run_program(program, observe_all)
    return (
        observation
        if isinstance(observation, Failed)
        else observation.extended(WatchedObservation, modules=program.watch.values)
    )


def expect_modules(
    case: Case, implementation: Adapter | str, adopted: Mapping[int, GatheredState] | None
) -> dict[Seen, Expected]:
    """Return what every call of every module gives in one process, in this process alone."""
    with no_warnings():
        return modules_of(case, division_of(case, registry.adapter_of(implementation)), adopted)


def expect_lockstep(
    case: Case,
    implementation: Adapter | str,
    adopted: Mapping[int, GatheredState],
    otherwise: Otherwise | None = None,
    displaced: bool = True,
) -> Expectation:
    """Run the oracle in lockstep with what an implementation did, in this process alone.

    Args:
        case: The case.
        implementation: Name of the implementation.
        adopted: Its state after every operation.
        otherwise: Deviations from the implementation's description; None for none.
        displaced: As for `oracle.expect_lockstep`.
    """
    setting = otherwise or Otherwise()
    sums = None if setting.sums is None else dtype_of(setting.sums)
    with no_warnings():
        division = setting.division or division_of(case, registry.adapter_of(implementation))
        return oracle.expect_lockstep(case, division, adopted, displaced=displaced, sums=sums)


def first_values(case: Case, new: bool) -> list[dict[str, torch.Tensor]]:
    """Return the parameters and buffers with which each rank's model begins, in this process alone."""
    case = replace(case, seed=case.seed + new, wrapping=replace(case.wrapping, meta_init=False))
    modules = [module_to_wrap(case, rank, {})[0] for rank in range(case.world.size)]
    return [{name: t.detach() for name, t in (*m.named_parameters(), *m.named_buffers())} for m in modules]


def reducing_dtypes(implementation: Adapter | str, case: Case) -> set[str]:
    """Run `case` through an implementation, and return the dtypes of what this rank gave to sums over ranks.

    Collectives: those of the implementation; every rank of the world runs the same call.
    """
    dtypes: set[str] = set()

    def note(_group: object, call: Call, _site: object) -> None:
        operation, *details = call.what
        if "reduce" in operation:
            dtypes.update(set(details) & set(UNIT_ROUNDOFF))

    program = RankProgram(case, registry.adapter_of(implementation), current_world().rank)
    with listen(note):
        run_program(program, observe_all=False)
    return dtypes


def gradient_terms(
    case: Case, last: int, adopted: Mapping[int, GatheredState] | None = None
) -> tuple[GradientTerm, ...]:
    """Return what each backward added to gradients, up to operation `last`, in this process alone."""
    with no_warnings():
        return terms_of(case, last, adopted)
