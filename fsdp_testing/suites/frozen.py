"""Frozen parameters, and parameters that are frozen or thawed while training."""

from __future__ import annotations

from collections.abc import Iterable

from fsdp_testing.checkers.comparison import Comparison
from fsdp_testing.records import Case, Freeze, Observe, Step, Thaw, ZeroGrad
from fsdp_testing.suites.check import ADAMW, Check, Place
from fsdp_testing.suites.schedules import accumulated, forward, iterations, micro_batches

_FROZEN = frozenset({"frozen_parameters"})
_THAWED = _FROZEN | {"thawed_parameters"}
# A parameter frozen inside a unit that trains may be given zeros where one process leaves None.
_LENIENT = Comparison(none_is_zero=True)


def _body(place: Place) -> Iterable[Case]:
    yield place.case("frozen_body", *iterations(3), optimizer=ADAMW)


def _schedule(place: Place) -> Iterable[Case]:
    yield place.case("frozen_body", *accumulated(0, 1), Step(), ZeroGrad(), forward(2), *iterations(1, first=3))


def _stem(place: Place) -> Iterable[Case]:
    yield place.case("frozen_stem", *iterations(3), optimizer=ADAMW)
    yield place.case("mlp", *iterations(3), freeze=("layers.0.*", "layers.1.*"))


def _in_unit(place: Place) -> Iterable[Case]:
    yield place.case("frozen_bias", *iterations(3), optimizer=ADAMW)
    yield place.case("frozen_bias", *micro_batches(0, 1), Observe(), Step())


def _all(place: Place) -> Iterable[Case]:
    yield place.case("mlp", *iterations(2), freeze=("*",))


def _thawed(place: Place) -> Iterable[Case]:
    program = (*iterations(2), Thaw(("layers.1.*",)), *iterations(2, first=2))
    yield place.case("mlp", *program, freeze=("layers.1.*",))
    yield place.case("mlp", *program[:6], Thaw(("layers.0.*",)), *iterations(2, first=2), freeze=("layers.0.*",))


def _frozen_later(place: Place) -> Iterable[Case]:
    program = (*iterations(2), Freeze(("layers.1.*",)), *iterations(2, first=2))
    yield place.case("mlp", *program, Thaw(("layers.1.*",)), *iterations(1, first=4))


def _toggled(place: Place) -> Iterable[Case]:
    program = (
        Freeze(("layers.0.*",)),
        *iterations(1),
        Thaw(("layers.0.*",)),
        Freeze(("layers.2.*",)),
        *iterations(1, 1),
    )
    yield place.case("mlp", *program, Thaw(("*",)), *iterations(1, first=2))


CHECKS = (
    Check(
        "frozen.unit_in_the_middle",
        "A frozen unit passes gradients on, gets none, and does not move.",
        "pytorch PR 101982, 110948",
        _body,
        _FROZEN,
    ),
    Check(
        "frozen.schedule",
        "A frozen unit in a schedule of local micro-batches and forward passes.",
        "pytorch PR 101982",
        _schedule,
        _FROZEN | {"no_sync", "forward_only"},
    ),
    Check(
        "frozen.units_at_the_start",
        "Frozen first units end the backward pass without harm.",
        "pytorch issue 117510",
        _stem,
        _FROZEN,
    ),
    Check(
        "frozen.inside_a_unit",
        "A unit may mix frozen and trainable parameters; frozen ones get no gradient.",
        "pytorch PR 101982",
        _in_unit,
        _FROZEN | {"frozen_mixed_unit"},
    ),
    Check(
        "frozen.everything",
        "A model without trainable parameters runs and does not move.",
        "pytorch PR 101982",
        _all,
        _FROZEN | {"all_parameters_frozen"},
    ),
    Check(
        "frozen.thawed_later",
        "A unit frozen at construction and thawed later trains from then on.",
        "pytorch issue 104148, PR 104186",
        _thawed,
        _THAWED,
    ),
    Check(
        "frozen.frozen_later",
        "A unit frozen between iterations stops, and goes on when thawed.",
        "pytorch issue 104148",
        _frozen_later,
        _THAWED,
        _LENIENT,
    ),
    Check("frozen.toggled", "Freezing and thawing in turns.", "pytorch issue 186998", _toggled, _THAWED, _LENIENT),
)
