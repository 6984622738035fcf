"""What do rank processes run for the harness? Functions that are named, not sent: one case per call."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress

from torch import nn

from fsdp_testing.checkers.gathered_state import GatheredState
from fsdp_testing.checkers.quantities import Expectation
from fsdp_testing.implementations import registry
from fsdp_testing.implementations.protocol import Setup
from fsdp_testing.pool import Failed
from fsdp_testing.pool.world import current_world
from fsdp_testing.programs import oracle
from fsdp_testing.programs.execute import RankProgram, SetupMaker
from fsdp_testing.programs.setup import division_of, setup_of
from fsdp_testing.records import Case, RankObservation


def run_case(name: str, case: Case, observe_all: bool) -> RankObservation | Failed:
    """Runs `case` through implementation `name` on this rank of the current world.

    Collectives: those of the implementation; every rank of the world runs the same call.
    """
    world = current_world()
    adapter = registry.adapter_of(name)
    program = RankProgram(case, adapter, world.rank, _setup_maker())
    with _no_warnings():
        observation = program.run(observe_all=observe_all)
        if observation.error is None:
            adapter.finish(program.model)
            return observation
        # The world is replaced after an exception; what the adapter cannot finish now goes with it.
        with suppress(Exception):
            adapter.finish(program.model)
    return Failed(observation)


@contextmanager
def _no_warnings() -> Iterator[None]:
    """Warnings decide nothing here: ranks may have inherited filters of a test session that make errors of them."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _setup_maker() -> SetupMaker:
    world = current_world()

    def make(case: Case, module: nn.Module) -> Setup:
        return setup_of(case, module, world.rank, world.device, world.group, world.mesh)

    return make


def expect_free(case: Case, observe_all: bool) -> Expectation:
    """Runs the oracle freely, in this process alone."""
    with _no_warnings():
        return oracle.expect_free(case, observe_all=observe_all)


def expect_lockstep(case: Case, name: str, adopted: Mapping[int, GatheredState]) -> Expectation:
    """Runs the oracle in lockstep with what implementation `name` did, in this process alone."""
    with _no_warnings():
        return oracle.expect_lockstep(case, division_of(case, registry.adapter_of(name)), adopted)
