"""Two real models: a GPT block stack with tied embeddings, and a mixture of experts whose experts may get no token."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

from fsdp_testing.cases.records import Case, Clip, MixedPrecisionSpec, Step, ZeroGrad
from fsdp_testing.checks.suites.check import ADAMW, PLAIN_SGD, Place, Suite
from fsdp_testing.checks.suites.schedules import accumulated, forward, iterations, micro_batches
from fsdp_testing.oracle.comparison import Comparison


def _trained(model: str, place: Place) -> Iterable[Case]:
    yield place.case(model, *iterations(3), optimizer=ADAMW)


def _schedule(model: str, place: Place) -> Iterable[Case]:
    first = (*accumulated(0, 1), Clip(0.5), Step(), ZeroGrad(), forward(2, "no_grad"))
    last = (*micro_batches(3, 4), Clip(0.5, 1.0), Step(), ZeroGrad(), forward(5))
    yield place.case(model, *first, *last, dtype="float32")


SUITE = Suite()

SUITE.add(
    "gpt.trained",
    "A GPT block stack trains as in one process.",
    partial(_trained, "gpt"),
    source="Radford et al. 2019",
)
SUITE.add(
    "gpt.schedule",
    "With accumulation, clipping and evaluation in between.",
    partial(_schedule, "gpt"),
    source="Radford et al. 2019",
    needs={"accumulate_without_no_sync"},
)


@SUITE.check("gpt.bfloat16", source="pytorch PR 90660", comparison=Comparison(lockstep=True))
def _low_precision(place: Place) -> Iterable[Case]:
    """In bfloat16 with float32 reduction, every cast at its place."""
    precision = MixedPrecisionSpec("bfloat16", "float32")
    yield place.case("gpt", *iterations(2), dtype="float32", precision=precision, optimizer=PLAIN_SGD)


SUITE.add(
    "moe.trained",
    "A mixture of experts trains as in one process.",
    partial(_trained, "moe"),
    source="Shazeer et al. 2017",
)
SUITE.add(
    "moe.schedule",
    "With accumulation, clipping and evaluation in between.",
    partial(_schedule, "moe"),
    source="Shazeer et al. 2017",
    needs={"accumulate_without_no_sync"},
)
