"""Mixed precision: every cast at its place, compared with a replay of the same casts.

At two ranks equality is bitwise: two summands commute and the division is exact. With more ranks a sum may be formed in
any order: the bound is (N-1) x u x sum |g_r| with u the unit roundoff of the reduction's dtype.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

from fsdp_testing.cases.operations import LocalMicroBatches
from fsdp_testing.cases.records import Batch, Case, MixedPrecisionSpec, Observe, Step, Thaw, ZeroGrad
from fsdp_testing.checks.suites.check import ADAMW, PLAIN_SGD, Place, Suite
from fsdp_testing.checks.suites.schedules import accumulated, forward, iteration, iterations, micro_batch, micro_batches
from fsdp_testing.oracle.comparison import Comparison

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


@SUITE.check("mixed_precision.local_sums", source="torch.distributed.fsdp.MixedPrecisionPolicy")
def _local_sums(place: Place) -> Iterable[Case]:
    """Local micro-batches of a narrower dtype add up in the dtype of the reduction, in which their sum is exact."""
    # The sum of seventeen numbers of 8 bits fits into 24 bits, and into 8 it does not.
    local = LocalMicroBatches(tuple(Batch(seed) for seed in range(16)))
    precision = MixedPrecisionSpec("bfloat16", "float32")
    for model in ("mlp", "uneven"):
        program = (local, micro_batch(16), Observe(), Step())
        yield place.case(model, *program, dtype="float32", optimizer=PLAIN_SGD, precision=precision)


@SUITE.check("mixed_precision.smallest_numbers", source="pytorch issue 90784")
def _smallest_numbers(place: Place) -> Iterable[Case]:
    """Gradients near the smallest numbers of float16 are divided where the implementation says that it divides."""
    # The gradient of the first layer's weight is as small as its inputs are: a few of float16's smallest steps, of which
    # each division loses a part, so that it matters which are before the sum.
    for power in (20, 21, 22):
        program = (micro_batch(0, scale=2.0**-power), Observe(), Step())
        precision = MixedPrecisionSpec(None, "float16")
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
