"""Gradient clipping by the total norm over all ranks."""

from __future__ import annotations

import math
from collections.abc import Iterable

from fsdp_testing.records import Case, Clip, Observe, Step, ZeroGrad
from fsdp_testing.suites.check import Builder, Check, Place
from fsdp_testing.suites.schedules import iterations, micro_batch

_NEEDS = frozenset({"clip_grad_norm"})
_SOURCE = "torch.nn.utils.clip_grad_norm_"


def _clipped(norm_type: float, dtype: str = "float32") -> Builder:
    def build(place: Place) -> Iterable[Case]:
        for model in ("mlp", "uneven"):
            program = (
                micro_batch(0),
                Clip(0.1, norm_type),
                Observe(),
                Step(),
                ZeroGrad(),
                micro_batch(1),
                Clip(0.5, norm_type),
                Step(),
            )
            yield place.case(model, *program, dtype=dtype)

    return build


def _not_needed(place: Place) -> Iterable[Case]:
    for norm_type in (1.0, 2.0, math.inf):
        yield place.case("mlp", micro_batch(0), Clip(1e6, norm_type), Observe(), Step(), dtype="float32")


def _frozen(place: Place) -> Iterable[Case]:
    for norm_type in (2.0, math.inf):
        yield place.case("frozen_body", micro_batch(0), Clip(0.1, norm_type), Step(), dtype="float32")


def _shared(place: Place) -> Iterable[Case]:
    yield place.case("tied_within", micro_batch(0), Clip(0.1), Observe(), Step(), dtype="float32")


def _repeated(place: Place) -> Iterable[Case]:
    yield place.case(
        "mlp", *iterations(1), micro_batch(1), Clip(0.5), Clip(0.1), Clip(0.1, 1.0), Step(), dtype="float32"
    )


def _some_ranks_empty(place: Place) -> Iterable[Case]:
    for norm_type in (1.0, 2.0, math.inf):
        yield place.case("one_element", micro_batch(0), Clip(0.1, norm_type), Observe(), Step(), dtype="float32")


def _unit_dtypes(place: Place) -> Iterable[Case]:
    for norm_type in (1.0, 2.0, math.inf):
        yield place.case("two_dtypes", micro_batch(0), Clip(0.1, norm_type), Observe(), Step(), dtype="float32")


def _no_gradient_on_some_rank(place: Place) -> Iterable[Case]:
    # The last bias alone trains: the first ranks hold none of it where a unit is flattened; nor do the last of one element.
    frozen = (
        ("mlp", ("layers.0.*", "layers.1.*", "layers.2.weight")),
        ("one_element", ("first.*", "second.linear.*", "second.linear")),
    )
    for model, patterns in frozen:
        for norm_type in (2.0, math.inf) if model == "mlp" else (2.0,):
            program = (micro_batch(0), Clip(0.1, norm_type), Observe(), Step(), ZeroGrad(), *iterations(1, first=1))
            yield place.case(model, *program, dtype="float32", freeze=patterns)


def _earlier_norms(place: Place) -> Iterable[Case]:
    frozen = ("layers.0.*", "layers.1.*", "layers.2.weight")
    for norm_type in (2.0, math.inf):
        program = (
            micro_batch(0),
            Clip(1e6, math.inf),
            ZeroGrad(),
            micro_batch(1),
            Clip(0.1, norm_type),
            Observe(),
            Step(),
        )
        yield place.case("mlp", *program, dtype="float32", freeze=frozen)


CHECKS = (
    *(
        Check(
            f"clipping.norm_{name}",
            f"The {name}-norm counts every element of every rank once, and gradients are scaled by it.",
            source,
            _clipped(value),
            _NEEDS,
        )
        for name, value, source in (
            ("1", 1.0, _SOURCE),
            ("2", 2.0, "pytorch PR 88955"),
            ("3", 3.0, _SOURCE),
            ("inf", math.inf, "pytorch PR 73405; torchrec PR 3199"),
        )
    ),
    Check("clipping.not_needed", "Gradients below the limit are left alone.", _SOURCE, _not_needed, _NEEDS),
    Check(
        "clipping.frozen_parameters",
        "Frozen parameters count nothing, and units without gradient do not harm.",
        "pytorch PR 88955",
        _frozen,
        _NEEDS | {"frozen_parameters"},
    ),
    Check(
        "clipping.shared_parameters",
        "A shared parameter counts once.",
        _SOURCE,
        _shared,
        _NEEDS | {"shared_parameters"},
    ),
    Check("clipping.repeated", "Clipping what is clipped already.", _SOURCE, _repeated, _NEEDS),
    Check(
        "clipping.ranks_without_elements",
        "Ranks that hold no element of a parameter take part.",
        "torchrec PR 3199",
        _some_ranks_empty,
        _NEEDS | {"uneven_parameters"},
    ),
    Check(
        "clipping.double_precision",
        "Gradients in float64 are clipped by a norm in float64.",
        _SOURCE,
        _clipped(2.0, "float64"),
        _NEEDS,
    ),
    Check(
        "clipping.unit_dtypes",
        "Units of different dtypes share one norm.",
        "pytorch issue 171517, PR 173641",
        _unit_dtypes,
        _NEEDS | {"nested_wrapping"},
    ),
    Check(
        "clipping.ranks_without_gradients",
        "A rank that holds no trainable element takes part in the norm and in every reduction.",
        "pytorch PR 88955; B060",
        _no_gradient_on_some_rank,
        _NEEDS | {"frozen_parameters", "frozen_mixed_unit", "uneven_parameters"},
    ),
    Check(
        "clipping.earlier_norms",
        "A norm counts nothing of the norms before it, on ranks without gradients neither.",
        "found by fuzzing FSDP1, which adds the first infinity norm to every later norm",
        _earlier_norms,
        _NEEDS | {"frozen_parameters", "frozen_mixed_unit"},
    ),
)
