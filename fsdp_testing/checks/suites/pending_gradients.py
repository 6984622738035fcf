"""What a user does between a micro-batch in no_sync and the one that reduces: nothing of it is forbidden.

"Gradients will be accumulated in module variables, which will later be synchronized in the first forward-backward pass
after exiting the context" (torch's FSDP and DDP): whatever comes between finds gradients that are there, or clears them.
"""

from __future__ import annotations

from collections.abc import Iterable

from fsdp_testing.cases.operations import (
    AssignData,
    BuildOptimizer,
    EditFullParameters,
    Freeze,
    Interrupt,
    Move,
    Reload,
)
from fsdp_testing.cases.records import Batch, Case, Observe, Operation, Step, ZeroGrad
from fsdp_testing.checks.suites.check import PLAIN_SGD, Builder, Place, Suite
from fsdp_testing.checks.suites.schedules import micro_batch, no_sync_batch

SUITE = Suite(source="torch.distributed.fsdp.FullyShardedDataParallel.no_sync")


def _between(*operations: Operation, models: tuple[str, ...] = ("mlp", "deep_nest")) -> Builder:
    """Each operation between a local micro-batch and a reduced one; then a step, and the same once more."""

    def build(place: Place) -> Iterable[Case]:
        for model in models:
            for one in operations:
                cycle = (no_sync_batch(0), one, micro_batch(1), Observe(), Step())
                again = (ZeroGrad(), no_sync_batch(2), one, micro_batch(3), Observe(), Step())
                yield place.case(model, *cycle, *again, optimizer=PLAIN_SGD)

    return build


for name, meaning, build in (
    (
        "cleared",
        "Gradients that are cleared before any reduction leave no trace.",
        _between(ZeroGrad(), ZeroGrad(False)),
    ),
    (
        "saved",
        "A model that is saved while gradients await reduction is saved as it is, and its successor begins without any.",
        _between(Reload(optimizer=False), models=("mlp",)),
    ),
    (
        "edited",
        "Editing full parameters changes no gradient that awaits reduction.",
        _between(EditFullParameters(("*",), 0.5)),
    ),
    (
        "assigned",
        "New storage of parameters changes no gradient that awaits reduction.",
        _between(AssignData(("*",), 0.5, Batch(7))),
    ),
    ("moved", "Moving the model to where it is changes no gradient that awaits reduction.", _between(Move())),
    (
        "frozen",
        "A parameter that is frozen while its gradient awaits reduction is reduced with the others.",
        _between(Freeze(("layers.1.*",)), models=("mlp",)),
    ),
    (
        "interrupted",
        "An exception after a local micro-batch, and cleared gradients, leave no trace of either.",
        _between(Interrupt(Batch(7)), Interrupt(Batch(7), 1, backward=True)),
    ),
):
    SUITE.add(f"accumulation.{name}", meaning, build)


@SUITE.check("accumulation.cleared_after_reduction")
def _after_reduction(place: Place) -> Iterable[Case]:
    """Clearing takes what was reduced and what awaits reduction alike."""
    for model in ("mlp", "deep_nest"):
        program = (micro_batch(0), no_sync_batch(1), ZeroGrad(), micro_batch(2), Observe(), Step())
        yield place.case(model, *program, optimizer=PLAIN_SGD)


@SUITE.check("accumulation.cleared_then_unused")
def _then_unused(place: Place) -> Iterable[Case]:
    """What was cleared to zeros stays zero, and of the parameter's own size, where the next micro-batch does not use it."""
    used, unused = ((True, True, True),), ((False, False, False),)
    for zeroed in (ZeroGrad(False), ZeroGrad()):
        before = (micro_batch(0, usage=used), Observe(), no_sync_batch(1, usage=used), zeroed)
        after = (micro_batch(2, usage=unused), Observe(), Step(), micro_batch(3, usage=used), Observe())
        yield place.case("conditional", *before, *after, optimizer=PLAIN_SGD)


@SUITE.check("accumulation.late_optimizer")
def _late_optimizer(place: Place) -> Iterable[Case]:
    """An optimizer that is built while gradients await reduction steps by all of them."""
    for model in ("mlp", "deep_nest"):
        program = (no_sync_batch(0), BuildOptimizer(), micro_batch(1), Step(), ZeroGrad(), micro_batch(2), Step())
        yield place.case(model, *program, optimizer=PLAIN_SGD)
