"""Accumulation: several micro-batches before a step, reduced each or only at the end, ending on either."""

from __future__ import annotations

from collections.abc import Iterable

from fsdp_testing.cases.operations import SeveralForwards
from fsdp_testing.cases.records import Batch, Case, Clip, Observe, Step, ZeroGrad
from fsdp_testing.checks.suites.check import ADAMW, PLAIN_SGD, Place, Suite
from fsdp_testing.checks.suites.schedules import (
    accumulated,
    forward,
    iteration,
    micro_batch,
    micro_batches,
    no_sync_batch,
)

SUITE = Suite()


@SUITE.check("accumulation.no_sync_then_reduced", source="pytorch PR 90546")
def _then_reduced(place: Place) -> Iterable[Case]:
    """Local micro-batches and a reduced one give the gradient of all of them."""
    for model in ("mlp", "deep_nest", "uneven"):
        cycle = [*accumulated(0, 1, 2), Step(), ZeroGrad()]
        yield place.case(model, *cycle, *accumulated(3, 4), Observe(), Step(), optimizer=ADAMW)


@SUITE.check(
    "accumulation.without_no_sync", source="pytorch issue 73784, PR 73535", needs={"accumulate_without_no_sync"}
)
def _without(place: Place) -> Iterable[Case]:
    """Reduced micro-batches add up."""
    for model in ("mlp", "deep_nest", "uneven"):
        cycle = [*micro_batches(0, 1, 2), Step(), ZeroGrad()]
        yield place.case(model, *cycle, *micro_batches(3, 4), Observe(), Step(), optimizer=ADAMW)


@SUITE.check("accumulation.alternating", source="pytorch PR 91193", needs={"accumulate_without_no_sync"})
def _alternating(place: Place) -> Iterable[Case]:
    """Local and reduced micro-batches in any order add up."""
    yield place.case(
        "mlp", micro_batch(0), *accumulated(1, 2), Step(), ZeroGrad(), micro_batch(3), *accumulated(4, 5, 6), Step()
    )
    yield place.case("deep_nest", *accumulated(0, 1), *accumulated(2, 3), Step(), ZeroGrad(), *iteration(4))


@SUITE.check("accumulation.ends_on_local", source="pytorch PR 124193")
def _ends_local(place: Place) -> Iterable[Case]:
    """A local micro-batch that nothing reduces yet changes neither parameters nor what follows."""
    yield place.case("mlp", *iteration(0), no_sync_batch(1))
    yield place.case("mlp", *iteration(0), no_sync_batch(1), forward(2), micro_batch(3), Step(), optimizer=PLAIN_SGD)
    yield place.case("deep_nest", no_sync_batch(0))


@SUITE.check("accumulation.forward_between", source="pytorch PR 110139")
def _looks_between(place: Place) -> Iterable[Case]:
    """Forward passes between micro-batches disturb no gradient."""
    for mode in ("eval", "no_grad"):
        local = (no_sync_batch(0), forward(1, mode), no_sync_batch(2), forward(3, mode))
        yield place.case("mlp", *local, micro_batch(4), forward(5, mode), Step(), forward(6, mode))


@SUITE.check("accumulation.magnitudes", source="Megatron-LM PR 3023, 7186", needs={"accumulate_without_no_sync"})
def _magnitudes(place: Place) -> Iterable[Case]:
    """No micro-batch is rescaled or lost, whatever its size."""
    program = (no_sync_batch(0, scale=1.0), no_sync_batch(1, scale=10.0), micro_batch(2, scale=0.1), Observe(), Step())
    yield place.case("mlp", *program, optimizer=PLAIN_SGD)
    other = (no_sync_batch(0, scale=0.1), micro_batch(1, scale=1.0), micro_batch(2, scale=10.0), Step())
    yield place.case("mlp", *other, optimizer=PLAIN_SGD)


@SUITE.check("accumulation.clipped", source="torch.nn.utils.clip_grad_norm_")
def _clipped(place: Place) -> Iterable[Case]:
    """Accumulated gradients are clipped by the norm of their sum."""
    yield place.case("mlp", *accumulated(0, 1), Clip(0.5), Step(), ZeroGrad(), *accumulated(2, 3), dtype="float32")


@SUITE.check(
    "accumulation.fresh_weights",
    source="Zhao et al., PyTorch FSDP, section 3.3: communication and accumulation",
)
def _stale_weights(place: Place) -> Iterable[Case]:
    """After a step no unit computes with weights gathered before it."""
    # A unit that stays gathered after a local micro-batch must see the step that follows.
    yield place.case(
        "mlp", *accumulated(0, 1), Step(), ZeroGrad(), forward(2), *accumulated(3, 4), Step(), ZeroGrad(), forward(5)
    )
    yield place.case("deep_nest", *iteration(0), no_sync_batch(1), forward(2, "train"), *iteration(3), forward(4))


@SUITE.check("accumulation.several_forwards", source="pytorch issue 47260, 106637, 136861")
def _several_forwards(place: Place) -> Iterable[Case]:
    """Each of several forwards may have its backward later, in either order, and every gradient is reduced."""
    for reverse in (False, True):
        for model in ("mlp", "deep_nest"):
            first = SeveralForwards((Batch(0), Batch(1)), reverse)
            second = SeveralForwards((Batch(2), Batch(3), Batch(4)), reverse)
            yield place.case(model, first, Observe(), Step(), ZeroGrad(), micro_batch(5), second, Observe(), Step())
