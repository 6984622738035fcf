"""Full parameters gathered, edited and written back between iterations."""

from __future__ import annotations

from collections.abc import Iterable

from fsdp_testing.records import Case, EditFullParameters, Observe, Step, ZeroGrad
from fsdp_testing.suites.check import ADAMW, Check, Place, iterations, look, micro

_NEEDS = frozenset({"summon_writeback"})
_SOURCE = "torch.distributed.fsdp.FullyShardedDataParallel.summon_full_params"


def _edit(patterns: tuple[str, ...] = ("*",), *, writeback: bool = True) -> EditFullParameters:
    return EditFullParameters(patterns, 0.5, writeback)


def _written(place: Place) -> Iterable[Case]:
    for model in ("mlp", "uneven"):
        program = (
            *iterations(1),
            _edit(),
            Observe(),
            look(9),
            *iterations(1, first=1),
            _edit(("*.weight",)),
            Observe(),
        )
        yield place.case(model, *program, optimizer=ADAMW)


def _before_first(place: Place) -> Iterable[Case]:
    yield place.case("mlp", _edit(), look(9), *iterations(2))


def _between(place: Place) -> Iterable[Case]:
    yield place.case("mlp", micro(0), _edit(), Observe(), Step(), ZeroGrad(), *iterations(1, first=1))


def _read_only(place: Place) -> Iterable[Case]:
    yield place.case("mlp", *iterations(1), _edit((), writeback=False), Observe(), *iterations(1, first=1))


CHECKS = (
    Check(
        "summon.edits_are_kept",
        "Edits of full parameters persist on every rank.",
        _SOURCE,
        _written,
        _NEEDS | {"forward_only"},
    ),
    Check(
        "summon.before_first_forward",
        "Editing before the first forward.",
        "pytorch PR 90862",
        _before_first,
        _NEEDS | {"forward_only"},
    ),
    Check(
        "summon.between_backward_and_step", "Editing leaves gradients that wait for a step.", _SOURCE, _between, _NEEDS
    ),
    Check("summon.reading", "Gathering to read changes nothing.", _SOURCE, _read_only, _NEEDS),
)
