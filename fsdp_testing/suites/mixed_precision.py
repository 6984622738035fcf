"""Mixed precision: every cast at its place, compared with a replay of the same casts.

At two ranks equality is bitwise: two summands commute and the division is exact. With more ranks a sum may be formed in
any order: the bound is (N-1) x u x sum |g_r| with u the unit roundoff of the reduction's dtype.
"""

from __future__ import annotations

from collections.abc import Iterable

from fsdp_testing.checkers.comparison import Comparison
from fsdp_testing.records import Case, MixedPrecisionSpec, Observe, Step, Thaw, ZeroGrad
from fsdp_testing.suites.check import ADAMW, PLAIN_SGD, Builder, Check, Place
from fsdp_testing.suites.schedules import accumulated, forward, iterations, micro_batch, micro_batches

_LOCKSTEP = Comparison(lockstep=True)
_SOURCE = "pytorch PR 90660, 90657"


def _trained(precision: MixedPrecisionSpec, *models: str) -> Builder:
    def build(place: Place) -> Iterable[Case]:
        for model in models or ("mlp", "uneven"):
            yield place.case(
                model, *iterations(2), micro_batch(2), dtype="float32", optimizer=ADAMW, precision=precision
            )

    return build


def _accumulated(place: Place) -> Iterable[Case]:
    for precision in (MixedPrecisionSpec("bfloat16", "float32"), MixedPrecisionSpec("bfloat16")):
        program = (*accumulated(0, 1), Observe(), Step(), ZeroGrad(), *micro_batches(2, 3))
        yield place.case("mlp", *program, dtype="float32", optimizer=PLAIN_SGD, precision=precision)


def _evaluated(place: Place) -> Iterable[Case]:
    program = (*iterations(1), forward(5, "eval"), forward(6, "no_grad"), *iterations(1, first=1), forward(7, "eval"))
    yield place.case("mlp", *program, dtype="float32", precision=MixedPrecisionSpec("bfloat16"))


def _buffers(place: Place) -> Iterable[Case]:
    yield place.case("buffers", *iterations(2), dtype="float32", precision=MixedPrecisionSpec(buffer_dtype="bfloat16"))
    precision = MixedPrecisionSpec("bfloat16", "float32", "bfloat16")
    yield place.case("buffers", *iterations(2), dtype="float32", precision=precision)


def _thawed(place: Place) -> Iterable[Case]:
    for precision in (MixedPrecisionSpec("bfloat16", "float32"), MixedPrecisionSpec("bfloat16")):
        program = (*iterations(1), Thaw(("layers.1.*",)), Observe(), *iterations(2, first=1), micro_batch(3))
        yield place.case("mlp", *program, dtype="float32", precision=precision, freeze=("layers.1.*",))


def _same_dtype(place: Place) -> Iterable[Case]:
    yield place.case("mlp", *iterations(2), dtype="float32", precision=MixedPrecisionSpec("float32"))


_PARAM = frozenset({"mixed_precision"})
_REDUCE = frozenset({"reduce_dtype"})

CHECKS = (
    Check(
        "mixed_precision.param_bfloat16",
        "Computes in bfloat16, reduces in bfloat16, stores and steps in float32.",
        _SOURCE,
        _trained(MixedPrecisionSpec("bfloat16")),
        _PARAM,
        _LOCKSTEP,
    ),
    Check(
        "mixed_precision.param_float16",
        "Computes and reduces in float16.",
        _SOURCE,
        _trained(MixedPrecisionSpec("float16")),
        _PARAM,
        _LOCKSTEP,
    ),
    Check(
        "mixed_precision.reduce_float32",
        "Computes in bfloat16 and reduces in float32.",
        _SOURCE,
        _trained(MixedPrecisionSpec("bfloat16", "float32")),
        _PARAM | _REDUCE,
        _LOCKSTEP,
    ),
    Check(
        "mixed_precision.reduce_bfloat16",
        "Computes in float32 and reduces in bfloat16.",
        _SOURCE,
        _trained(MixedPrecisionSpec(None, "bfloat16")),
        _REDUCE,
        _LOCKSTEP,
    ),
    Check(
        "mixed_precision.same_dtype",
        "Naming the dtype that parameters have already changes nothing.",
        "pytorch PR 90660",
        _same_dtype,
        _PARAM,
        _LOCKSTEP,
    ),
    Check(
        "mixed_precision.accumulated",
        "Local and reduced micro-batches add up in the dtypes they must.",
        "pytorch PR 91193",
        _accumulated,
        _PARAM | _REDUCE | {"no_sync", "accumulate_without_no_sync"},
        _LOCKSTEP,
    ),
    Check(
        "mixed_precision.evaluated",
        "Evaluation casts as training does.",
        "pytorch issue 103862",
        _evaluated,
        _PARAM | {"forward_only"},
        _LOCKSTEP,
    ),
    Check(
        "mixed_precision.buffers",
        "Floating buffers are held in buffer_dtype, others as they were.",
        "pytorch PR 87935; issue 143900",
        _buffers,
        _PARAM | _REDUCE | {"buffer_dtype", "buffers"},
        _LOCKSTEP,
    ),
    Check(
        "mixed_precision.thawed",
        "A unit that was frozen in the first forward is reduced and stepped in the right dtypes once it is thawed.",
        "pytorch issue 186998",
        _thawed,
        _PARAM | _REDUCE | {"frozen_parameters", "thawed_parameters"},
        _LOCKSTEP,
    ),
)
