"""Odd sizes: what the number of ranks does not divide, fewer elements than ranks, 0-dim, empty, strided."""

from __future__ import annotations

from collections.abc import Iterable

from fsdp_testing.records import Case, Clip, Observe, Step, WrappingPlan, ZeroGrad
from fsdp_testing.suites.check import ADAMW, Builder, Check, Place, Suite
from fsdp_testing.suites.schedules import accumulated, iterations, micro_batch


def _trained(*models: str) -> Builder:
    def build(place: Place) -> Iterable[Case]:
        for model in models:
            yield place.case(model, *iterations(3), optimizer=ADAMW)
            yield place.case(model, micro_batch(0), Observe(), Step(), ZeroGrad(False), micro_batch(1), Observe())

    return build


SUITE = Suite()


SUITE.add(
    Check(
        "sizes.uneven",
        "Sizes that the number of ranks does not divide, padding never seen.",
        "pytorch PR 88769; issue 176076",
        _trained("uneven", "embedding"),
        frozenset({"uneven_parameters"}),
    )
)


SUITE.add(
    Check(
        "sizes.fewer_elements_than_ranks",
        "Parameters of one element: some ranks hold none of it.",
        "pytorch PR 94109",
        _trained("one_element"),
        frozenset({"uneven_parameters"}),
    )
)


SUITE.add(
    Check(
        "sizes.zero_dim",
        "0-dimensional parameters train.",
        "torch.nn.Parameter of shape ()",
        _trained("scalars"),
        frozenset({"zero_dim_parameters"}),
    )
)


SUITE.add(
    Check(
        "sizes.empty",
        "Parameters without elements are carried along.",
        "torch.nn.Linear with out_features=0",
        _trained("empty_parameters"),
        frozenset({"empty_parameters"}),
    )
)


SUITE.add(
    Check(
        "sizes.strided",
        "Parameters that are not contiguous keep their elements in place.",
        "torch.channels_last",
        _trained("strided"),
        frozenset({"strided_parameters"}),
    )
)


@SUITE.check("sizes.two_dtypes", source="pytorch issue 154082", needs=frozenset({"mixed_dtype_units"}))
def _two_dtypes(place: Place) -> Iterable[Case]:
    """Parameters of two dtypes inside one unit."""
    for wrapping in (None, WrappingPlan()):
        yield place.case("two_dtypes", *iterations(2), micro_batch(2), Observe(), Step(), wrapping=wrapping)


@SUITE.check(
    "sizes.clipped_and_accumulated",
    source="pytorch PR 88769",
    needs=frozenset({"uneven_parameters", "no_sync", "clip_grad_norm"}),
)
def _clipped_and_accumulated(place: Place) -> Iterable[Case]:
    """Padding counts in no norm and no accumulation."""
    for model in ("uneven", "one_element"):
        yield place.case(model, *accumulated(0, 1), Clip(0.1), Step(), dtype="float32")
