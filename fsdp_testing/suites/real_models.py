"""Two real models: a GPT block stack with tied embeddings, and a mixture of experts whose experts may get no token."""

from __future__ import annotations

from collections.abc import Iterable

from fsdp_testing.checkers.comparison import Comparison
from fsdp_testing.records import Case, Clip, MixedPrecisionSpec, Step, ZeroGrad
from fsdp_testing.suites.check import ADAMW, PLAIN_SGD, Builder, Check, Place, Suite
from fsdp_testing.suites.schedules import accumulated, forward, iterations, micro_batches

_GPT = frozenset({"shared_parameters"})


def _trained(model: str) -> Builder:
    def build(place: Place) -> Iterable[Case]:
        yield place.case(model, *iterations(3), optimizer=ADAMW)

    return build


def _schedule(model: str) -> Builder:
    def build(place: Place) -> Iterable[Case]:
        first = (*accumulated(0, 1), Clip(0.5), Step(), ZeroGrad(), forward(2, "no_grad"))
        last = (*micro_batches(3, 4), Clip(0.5, 1.0), Step(), ZeroGrad(), forward(5))
        yield place.case(model, *first, *last, dtype="float32")

    return build


_SCHEDULE = frozenset({"no_sync", "accumulate_without_no_sync", "clip_grad_norm", "forward_only"})


SUITE = Suite()


SUITE.add(
    Check("gpt.trained", "A GPT block stack trains as in one process.", "Radford et al. 2019", _trained("gpt"), _GPT)
)


SUITE.add(
    Check(
        "gpt.schedule",
        "With accumulation, clipping and evaluation in between.",
        "Radford et al. 2019",
        _schedule("gpt"),
        _GPT | _SCHEDULE,
    )
)


@SUITE.check(
    "gpt.bfloat16",
    source="pytorch PR 90660",
    needs=_GPT | {"mixed_precision", "reduce_dtype"},
    comparison=Comparison(lockstep=True),
)
def _low_precision(place: Place) -> Iterable[Case]:
    """In bfloat16 with float32 reduction, every cast at its place."""
    precision = MixedPrecisionSpec("bfloat16", "float32")
    yield place.case("gpt", *iterations(2), dtype="float32", precision=precision, optimizer=PLAIN_SGD)


SUITE.add(
    Check("moe.trained", "A mixture of experts trains as in one process.", "Shazeer et al. 2017", _trained("moe"))
)


SUITE.add(
    Check(
        "moe.schedule",
        "With accumulation, clipping and evaluation in between.",
        "Shazeer et al. 2017",
        _schedule("moe"),
        _SCHEDULE,
    )
)
