"""Gradient clipping by the total norm over all ranks."""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import partial

from fsdp_testing.cases.records import Case, Clip, Observe, Step, WrappingPlan, ZeroGrad
from fsdp_testing.checks.suites.check import PLAIN_SGD, Place, Suite
from fsdp_testing.checks.suites.schedules import iteration, micro_batch

_SOURCE = "torch.nn.utils.clip_grad_norm_"


def _clipped(norm_type: float, dtype: str, place: Place) -> Iterable[Case]:
    for model in ("mlp", "uneven"):
        first = iteration(0, Clip(0.1, norm_type), Observe())
        yield place.case(model, *first, micro_batch(1), Clip(0.5, norm_type), Step(), dtype=dtype)


SUITE = Suite(source=_SOURCE)

for name, value, source in (
    ("1", 1.0, _SOURCE),
    ("2", 2.0, "pytorch PR 88955"),
    ("3", 3.0, _SOURCE),
    ("inf", math.inf, "pytorch PR 73405; torchrec PR 3199"),
):
    SUITE.add(
        f"clipping.norm_{name}",
        f"The {name}-norm counts every element of every rank once, and gradients are scaled by it.",
        partial(_clipped, value, "float32"),
        source=source,
    )


@SUITE.check("clipping.not_needed")
def _not_needed(place: Place) -> Iterable[Case]:
    """Gradients below the limit are left alone."""
    for norm_type in (1.0, 2.0, math.inf):
        yield place.case("mlp", micro_batch(0), Clip(1e6, norm_type), Observe(), Step(), dtype="float32")


@SUITE.check("clipping.frozen_parameters", source="pytorch PR 88955")
def _frozen(place: Place) -> Iterable[Case]:
    """Frozen parameters count nothing, and units without gradient do not harm."""
    for norm_type in (2.0, math.inf):
        yield place.case("frozen_body", micro_batch(0), Clip(0.1, norm_type), Step(), dtype="float32")


@SUITE.check("clipping.shared_parameters")
def _shared(place: Place) -> Iterable[Case]:
    """A shared parameter counts once."""
    yield place.case("tied_within", micro_batch(0), Clip(0.1), Observe(), Step(), dtype="float32")


@SUITE.check("clipping.ignored_trained", source="https://pytorch.org/docs/stable/fsdp.html", needs={"nested_wrapping"})
def _ignored(place: Place) -> Iterable[Case]:
    """Parameters that stay outside count in the norm once, and are scaled with the others."""
    plan = WrappingPlan(units=("layers.1", "layers.2"), ignored=("layers.0",))
    for norm_type in (1.0, 2.0, math.inf):
        # Nobody reduces what is ignored: with equal inputs it is equal on all ranks without that.
        program = (micro_batch(0, alike=True), Clip(0.1, norm_type), Observe(), Step())
        yield place.case("mlp", *program, dtype="float32", wrapping=plan, optimizer=PLAIN_SGD)


@SUITE.check("clipping.repeated")
def _repeated(place: Place) -> Iterable[Case]:
    """Clipping what is clipped already."""
    yield place.case(
        "mlp", *iteration(0), micro_batch(1), Clip(0.5), Clip(0.1), Clip(0.1, 1.0), Step(), dtype="float32"
    )


@SUITE.check("clipping.ranks_without_elements", source="torchrec PR 3199", needs={"uneven_parameters"})
def _some_ranks_empty(place: Place) -> Iterable[Case]:
    """Ranks that hold no element of a parameter take part."""
    for norm_type in (1.0, 2.0, math.inf):
        yield place.case("one_element", micro_batch(0), Clip(0.1, norm_type), Observe(), Step(), dtype="float32")


SUITE.add(
    "clipping.double_precision",
    "Gradients in float64 are clipped by a norm in float64.",
    partial(_clipped, 2.0, "float64"),
)


@SUITE.check("clipping.unit_dtypes", source="pytorch issue 171517, PR 173641", needs={"nested_wrapping"})
def _unit_dtypes(place: Place) -> Iterable[Case]:
    """Units of different dtypes share one norm."""
    for norm_type in (1.0, 2.0, math.inf):
        yield place.case("two_dtypes", micro_batch(0), Clip(0.1, norm_type), Observe(), Step(), dtype="float32")


@SUITE.check(
    "clipping.ranks_without_gradients",
    source="pytorch PR 88955; B060",
    needs={"frozen_mixed_unit", "uneven_parameters"},
)
def _no_gradient_on_some_rank(place: Place) -> Iterable[Case]:
    """A rank that holds no trainable element takes part in the norm and in every reduction."""
    # The last bias alone trains: the first ranks hold none of it where a unit is flattened; nor do the last of one element.
    frozen = (
        ("mlp", ("layers.0.*", "layers.1.*", "layers.2.weight")),
        ("one_element", ("first.*", "second.linear.*", "second.linear")),
    )
    for model, patterns in frozen:
        for norm_type in (2.0, math.inf) if model == "mlp" else (2.0,):
            program = (*iteration(0, Clip(0.1, norm_type), Observe()), *iteration(1))
            yield place.case(model, *program, dtype="float32", freeze=patterns)


@SUITE.check(
    "clipping.earlier_norms",
    source="found by fuzzing FSDP1, which adds the first infinity norm to every later norm",
    needs={"frozen_mixed_unit"},
)
def _earlier_norms(place: Place) -> Iterable[Case]:
    """A norm counts nothing of the norms before it, on ranks without gradients neither."""
    frozen = ("layers.0.*", "layers.1.*", "layers.2.weight")
    for norm_type in (2.0, math.inf):
        first = (micro_batch(0), Clip(1e6, math.inf), ZeroGrad())
        then = (micro_batch(1), Clip(0.1, norm_type), Observe(), Step())
        yield place.case("mlp", *first, *then, dtype="float32", freeze=frozen)
