"""Full parameters gathered, edited and written back between iterations."""

from __future__ import annotations

from collections.abc import Iterable

from fsdp_testing.cases.operations import AssignData, ReplaceParameters
from fsdp_testing.cases.records import Batch, Case, EditFullParameters, Observe, Step
from fsdp_testing.checks.suites.check import ADAMW, Place, Suite
from fsdp_testing.checks.suites.schedules import forward, iteration, iterations, micro_batch


def _edit(patterns: tuple[str, ...] = ("*",), *, writeback: bool = True) -> EditFullParameters:
    return EditFullParameters(patterns, 0.5, writeback)


SUITE = Suite(source="torch.distributed.fsdp.FullyShardedDataParallel.summon_full_params")


@SUITE.check("summon.edits_are_kept")
def _written(place: Place) -> Iterable[Case]:
    """Edits of full parameters persist on every rank."""
    for model in ("mlp", "uneven"):
        first = (*iteration(0), _edit(), Observe(), forward(9))
        program = (*first, *iteration(1), _edit(("*.weight",)), Observe())
        yield place.case(model, *program, optimizer=ADAMW)


@SUITE.check("summon.before_first_forward", source="pytorch PR 90862")
def _before_first(place: Place) -> Iterable[Case]:
    """Editing before the first forward."""
    yield place.case("mlp", _edit(), forward(9), *iterations(2))


@SUITE.check("summon.between_backward_and_step")
def _between(place: Place) -> Iterable[Case]:
    """Editing leaves gradients that wait for a step."""
    yield place.case("mlp", *iteration(0, _edit(), Observe()), *iteration(1))


@SUITE.check(
    "summon.edits_are_discarded",
    source="pytorch summon_full_params: writeback, which its documentation limits to sharded strategies",
    strategies=("full_shard", "shard_grad_op"),
)
def _discarded(place: Place) -> Iterable[Case]:
    """Without writeback, edits of gathered parameters are gone once the context is left."""
    for model in ("mlp", "uneven"):
        edit = _edit(writeback=False)
        program = (*iteration(0), edit, Observe(), forward(9), micro_batch(1), edit, Step())
        yield place.case(model, *program, optimizer=ADAMW)


@SUITE.check("summon.data_assigned", source="pytorch issue 151223")
def _assigned(place: Place) -> Iterable[Case]:
    """A parameter that is given new storage between iterations trains from there."""

    def assign(seed: int) -> AssignData:
        return AssignData(("layers.0.*", "layers.2.weight"), 0.5, Batch(seed))

    program = (assign(8), Observe(), *iteration(0), assign(9), forward(10), *iteration(1), Observe())
    yield place.case("mlp", *program, optimizer=ADAMW)
    program = (*iteration(0), micro_batch(1), forward(7, "no_grad"), assign(8), Observe(), Step(), forward(9))
    yield place.case("mlp", *program)


@SUITE.check("summon.parameters_replaced")
def _replaced(place: Place) -> Iterable[Case]:
    """What is put in the place of a gathered parameter is its value from then on."""
    some, other = ReplaceParameters(("*.weight",), 0.5), ReplaceParameters(("layers.2.*",), -1.0)
    for model in ("mlp", "uneven"):
        program = (some, forward(8), *iteration(0), *iteration(1, other, Observe()), *iteration(2))
        yield place.case(model, *program, optimizer=ADAMW)


@SUITE.check("summon.storage_replaced", source="pytorch issue 107081")
def _storage_replaced(place: Place) -> Iterable[Case]:
    """New storage of a gathered parameter is its value from then on."""
    replaced = ReplaceParameters(("*.weight",), 0.5, storage=True)
    yield place.case("mlp", replaced, forward(8), *iteration(0, replaced, Observe()), *iteration(1))


@SUITE.check("summon.reading")
def _read_only(place: Place) -> Iterable[Case]:
    """Gathering to read changes nothing."""
    yield place.case("mlp", *iteration(0), _edit((), writeback=False), Observe(), *iteration(1))
