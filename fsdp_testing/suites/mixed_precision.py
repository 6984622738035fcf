"""Mixed precision: every cast at its place, compared with a replay of the same casts.

At two ranks equality is bitwise: two summands commute and the division is exact. With more ranks a sum may be formed in
any order: the bound is (N-1) x u x sum |g_r| with u the unit roundoff of the reduction's dtype.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

from fsdp_testing.checkers.comparison import Comparison
from fsdp_testing.records import Case, MixedPrecisionSpec, Observe, Step, Thaw, ZeroGrad
from fsdp_testing.suites.check import ADAMW, PLAIN_SGD, Place, Suite
from fsdp_testing.suites.schedules import accumulated, forward, iteration, iterations, micro_batch, micro_batches

_LOCKSTEP = Comparison(lockstep=True)


def _trained(precision: MixedPrecisionSpec, place: Place) -> Iterable[Case]:
    for model in ("mlp", "uneven"):
        yield place.case(model, *iterations(2), micro_batch(2), dtype="float32", optimizer=ADAMW, precision=precision)


SUITE = Suite(source="pytorch PR 90660, 90657", comparison=_LOCKSTEP)


SUITE.add(
    "mixed_precision.param_bfloat16",
    "Computes in bfloat16, reduces in bfloat16, stores and steps in float32.",
    partial(_trained, MixedPrecisionSpec("bfloat16")),
)
SUITE.add(
    "mixed_precision.param_float16",
    "Computes and reduces in float16.",
    partial(_trained, MixedPrecisionSpec("float16")),
)
SUITE.add(
    "mixed_precision.reduce_float32",
    "Computes in bfloat16 and reduces in float32.",
    partial(_trained, MixedPrecisionSpec("bfloat16", "float32")),
)
SUITE.add(
    "mixed_precision.reduce_bfloat16",
    "Computes in float32 and reduces in bfloat16.",
    partial(_trained, MixedPrecisionSpec(None, "bfloat16")),
)


@SUITE.check("mixed_precision.same_dtype", source="pytorch PR 90660")
def _same_dtype(place: Place) -> Iterable[Case]:
    """Naming the dtype that parameters have already changes nothing."""
    yield place.case("mlp", *iterations(2), dtype="float32", precision=MixedPrecisionSpec("float32"))


@SUITE.check("mixed_precision.accumulated", source="pytorch PR 91193", needs={"accumulate_without_no_sync"})
def _accumulated(place: Place) -> Iterable[Case]:
    """Local and reduced micro-batches add up in the dtypes they must."""
    for precision in (MixedPrecisionSpec("bfloat16", "float32"), MixedPrecisionSpec("bfloat16")):
        program = (*accumulated(0, 1), Observe(), Step(), ZeroGrad(), *micro_batches(2, 3))
        yield place.case("mlp", *program, dtype="float32", optimizer=PLAIN_SGD, precision=precision)


@SUITE.check("mixed_precision.evaluated", source="pytorch issue 103862")
def _evaluated(place: Place) -> Iterable[Case]:
    """Evaluation casts as training does."""
    program = (*iteration(0), forward(5, "eval"), forward(6, "no_grad"), *iteration(1), forward(7, "eval"))
    yield place.case("mlp", *program, dtype="float32", precision=MixedPrecisionSpec("bfloat16"))


@SUITE.check("mixed_precision.buffers", source="pytorch PR 87935; issue 143900")
def _buffers(place: Place) -> Iterable[Case]:
    """Floating buffers are held in buffer_dtype, others as they were."""
    yield place.case("buffers", *iterations(2), dtype="float32", precision=MixedPrecisionSpec(buffer_dtype="bfloat16"))
    precision = MixedPrecisionSpec("bfloat16", "float32", "bfloat16")
    yield place.case("buffers", *iterations(2), dtype="float32", precision=precision)


@SUITE.check("mixed_precision.thawed", source="pytorch issue 186998")
def _thawed(place: Place) -> Iterable[Case]:
    """A unit that was frozen in the first forward is reduced and stepped in the right dtypes once it is thawed."""
    for precision in (MixedPrecisionSpec("bfloat16", "float32"), MixedPrecisionSpec("bfloat16")):
        program = (*iteration(0), Thaw(("layers.1.*",)), Observe(), *iterations(2, first=1), micro_batch(3))
        yield place.case("mlp", *program, dtype="float32", precision=precision, freeze=("layers.1.*",))
