"""Activation checkpointing: a forward that runs again in backward changes no number, whichever way it is done."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import partial

from fsdp_testing.cases.models import MODELS
from fsdp_testing.cases.records import Case, MixedPrecisionSpec, Observe, Step, WrappingPlan, ZeroGrad
from fsdp_testing.checks.suites.check import ADAMW, PLAIN_SGD, Place, Suite
from fsdp_testing.checks.suites.schedules import accumulated, forward, iteration, iterations, micro_batch
from fsdp_testing.oracle.comparison import Comparison

_FIRST = ("layers.0", "embed")
_LOCKSTEP = Comparison(lockstep=True)


def plan(model: str, *, reentrant: bool = False, outside: bool = False) -> WrappingPlan:
    """Every unit that the zoo suggests, each recomputed.

    The reentrant way gives no gradients to a module none of whose inputs needs one, so the first unit is left out.
    """
    units = MODELS[model].units
    recomputed = tuple(unit for unit in units if unit not in _FIRST) if reentrant else units
    return WrappingPlan(units, checkpointed=recomputed, checkpoint_reentrant=reentrant, checkpoint_outside=outside)


def _trained(place: Place, *, reentrant: bool = False, outside: bool = False) -> Iterable[Case]:
    for model in ("mlp",) if outside else ("mlp", "embedding"):
        wrapping = plan(model, reentrant=reentrant, outside=outside)
        yield place.case(model, *iterations(2), micro_batch(2), wrapping=wrapping, optimizer=ADAMW)


SUITE = Suite(source="torch.utils.checkpoint: the same results with less memory")

SUITE.add(
    "activation_checkpointing.inside_units",
    "Units whose modules recompute give the bits of a plain run.",
    _trained,
    comparison=_LOCKSTEP,
)
SUITE.add(
    "activation_checkpointing.around_units",
    "Recomputing whole units, gathered again in backward, gives the bits of a plain run.",
    partial(_trained, outside=True),
    comparison=_LOCKSTEP,
)
SUITE.add(
    "activation_checkpointing.reentrant_inside",
    "The reentrant way inside units gives the bits of a plain run.",
    partial(_trained, reentrant=True),
    source="pytorch PR 89791",
    comparison=_LOCKSTEP,
)
SUITE.add(
    "activation_checkpointing.reentrant_around",
    "The reentrant way around units gives the bits of a plain run.",
    partial(_trained, reentrant=True, outside=True),
    source="pytorch PR 89781, 87413; fairscale PR 780",
    comparison=_LOCKSTEP,
)


@SUITE.check("activation_checkpointing.nested", needs={"nested_wrapping"})
def _nested(place: Place) -> Iterable[Case]:
    """Recomputation inside recomputation, or of a part of a unit, trains as in one process."""
    # Recomputation inside recomputation, and of a part of a unit only.
    yield place.case("deep_nest", *iterations(2), wrapping=plan("deep_nest"))
    part = WrappingPlan(("inner",), checkpointed=("inner.inner",))
    yield place.case("deep_nest", *iterations(2), wrapping=part)


@SUITE.check("activation_checkpointing.accumulated", source="pytorch PR 90546")
def _accumulated(place: Place) -> Iterable[Case]:
    """Recomputed micro-batches inside and outside no_sync add up, each once."""
    program = (*accumulated(0, 1, 2), Observe(), Step(), ZeroGrad(), *iteration(3))
    for outside in (False, True):
        yield place.case("mlp", *program, wrapping=plan("mlp", outside=outside), optimizer=PLAIN_SGD)


@SUITE.check("activation_checkpointing.after_no_grad", source="pytorch PR 110139")
def _evaluated(place: Place) -> Iterable[Case]:
    """A forward without gradients between recomputed iterations changes nothing."""
    wrapping = plan("mlp")
    # A forward without gradients never runs again, and must leave nothing for a later backward.
    yield place.case("mlp", *iteration(0), forward(5, "no_grad"), micro_batch(1), Step(), wrapping=wrapping)


@SUITE.check("activation_checkpointing.mixed_precision", source="pytorch PR 90660", comparison=_LOCKSTEP)
def _mixed(place: Place) -> Iterable[Case]:
    """The second forward casts as the first did."""
    precision = MixedPrecisionSpec("bfloat16", "float32")
    case = place.case("mlp", *iterations(2), micro_batch(2), dtype="float32", optimizer=ADAMW, precision=precision)
    for outside in (False, True):
        yield replace(case, wrapping=plan("mlp", outside=outside))
