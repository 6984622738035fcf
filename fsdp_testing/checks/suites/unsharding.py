"""Units gathered and released by hand: what a forward then finds, and what a step leaves in them."""

from __future__ import annotations

from collections.abc import Iterable

from fsdp_testing.cases.models import MODELS
from fsdp_testing.cases.operations import UnshardFirst
from fsdp_testing.cases.records import Batch, Case, Observe, Step, ZeroGrad
from fsdp_testing.checks.suites.check import Place, Suite
from fsdp_testing.checks.suites.schedules import forward, iterations

SUITE = Suite(source="torch.distributed.fsdp.FSDPModule.unshard", needs={"nested_wrapping"})


def _iteration(model: str, seed: int, **fields: bool) -> tuple[UnshardFirst, Step, ZeroGrad]:
    return UnshardFirst(Batch(seed), ("", *MODELS[model].units), **fields), Step(), ZeroGrad()


@SUITE.check("unshard.before_forward")
def _before(place: Place) -> Iterable[Case]:
    """Units that were gathered before a micro-batch train as those that it gathers itself, waited for or not."""
    for model in ("deep_nest", "uneven"):
        yield place.case(model, *_iteration(model, 0), Observe(), *_iteration(model, 1), Observe())
        begun = (*_iteration(model, 2, asynchronous=True), *_iteration(model, 3, asynchronous=True))
        yield place.case(model, *begun, *_iteration(model, 4, asynchronous=True, reshard=True), Observe())


@SUITE.check("unshard.and_reshard")
def _released(place: Place) -> Iterable[Case]:
    """Units that were gathered and released are gathered again."""
    for model in ("deep_nest", "uneven"):
        yield place.case(model, *_iteration(model, 0, reshard=True), *_iteration(model, 1, reshard=True), Observe())


@SUITE.check("unshard.sees_the_step")
def _after_step(place: Place) -> Iterable[Case]:
    """What is gathered by hand is what the latest step has made."""
    yield place.case("mlp", *iterations(1), forward(1), *_iteration("mlp", 2), forward(3), *_iteration("mlp", 4))
