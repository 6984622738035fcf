"""Frozen parameters, and parameters that are frozen or thawed while training."""

from __future__ import annotations

from collections.abc import Iterable

from fsdp_testing.cases.records import Case, Freeze, Observe, Step, Thaw, ZeroGrad
from fsdp_testing.checks.suites.check import ADAMW, Place, Suite
from fsdp_testing.checks.suites.schedules import accumulated, forward, iteration, iterations, micro_batches
from fsdp_testing.oracle.comparison import Comparison

# A parameter frozen inside a unit that trains may be given zeros where one process leaves None.
_LENIENT = Comparison(none_is_zero=True)

SUITE = Suite()


@SUITE.check("frozen.unit_in_the_middle", source="pytorch PR 101982, 110948")
def _body(place: Place) -> Iterable[Case]:
    """A frozen unit passes gradients on, gets none, and does not move."""
    yield place.case("frozen_body", *iterations(3), optimizer=ADAMW)


@SUITE.check("frozen.schedule", source="pytorch PR 101982")
def _schedule(place: Place) -> Iterable[Case]:
    """A frozen unit in a schedule of local micro-batches and forward passes."""
    yield place.case("frozen_body", *accumulated(0, 1), Step(), ZeroGrad(), forward(2), *iteration(3))


@SUITE.check("frozen.units_at_the_start", source="pytorch issue 117510")
def _stem(place: Place) -> Iterable[Case]:
    """Frozen first units end the backward pass without harm."""
    yield place.case("frozen_stem", *iterations(3), optimizer=ADAMW)
    yield place.case("mlp", *iterations(3), freeze=("layers.0.*", "layers.1.*"))


@SUITE.check("frozen.inside_a_unit", source="pytorch PR 101982")
def _in_unit(place: Place) -> Iterable[Case]:
    """A unit may mix frozen and trainable parameters; frozen ones get no gradient."""
    yield place.case("frozen_bias", *iterations(3), optimizer=ADAMW)
    yield place.case("frozen_bias", *micro_batches(0, 1), Observe(), Step())


@SUITE.check("frozen.everything", source="pytorch PR 101982", needs={"all_parameters_frozen"})
def _all(place: Place) -> Iterable[Case]:
    """A model without trainable parameters runs and does not move."""
    yield place.case("mlp", *iterations(2), freeze=("*",))


@SUITE.check("frozen.thawed_later", source="pytorch issue 104148, PR 104186")
def _thawed(place: Place) -> Iterable[Case]:
    """A unit frozen at construction and thawed later trains from then on."""
    program = (*iterations(2), Thaw(("layers.1.*",)), *iterations(2, first=2))
    yield place.case("mlp", *program, freeze=("layers.1.*",))
    yield place.case("mlp", *program[:6], Thaw(("layers.0.*",)), *iterations(2, first=2), freeze=("layers.0.*",))


@SUITE.check("frozen.frozen_later", source="pytorch issue 104148", comparison=_LENIENT)
def _frozen_later(place: Place) -> Iterable[Case]:
    """A unit frozen between iterations stops, and goes on when thawed."""
    program = (*iterations(2), Freeze(("layers.1.*",)), *iterations(2, first=2))
    yield place.case("mlp", *program, Thaw(("layers.1.*",)), *iteration(4))


@SUITE.check("frozen.toggled", source="pytorch issue 186998", comparison=_LENIENT)
def _toggled(place: Place) -> Iterable[Case]:
    """Freezing and thawing in turns."""
    first, last = ("layers.0.*",), ("layers.2.*",)
    program = (Freeze(first), *iteration(0), Thaw(first), Freeze(last), *iteration(1), Thaw(("*",)), *iteration(2))
    yield place.case("mlp", *program)
