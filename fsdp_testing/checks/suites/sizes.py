"""Odd sizes: what the number of ranks does not divide, fewer elements than ranks, 0-dim, empty, strided."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

from fsdp_testing.cases.records import Case, Clip, Observe, Step, WrappingPlan, ZeroGrad
from fsdp_testing.checks.suites.check import ADAMW, Place, Suite
from fsdp_testing.checks.suites.schedules import accumulated, iterations, micro_batch


def _trained(models: tuple[str, ...], place: Place) -> Iterable[Case]:
    for model in models:
        yield place.case(model, *iterations(3), optimizer=ADAMW)
        yield place.case(model, micro_batch(0), Observe(), Step(), ZeroGrad(False), micro_batch(1), Observe())


SUITE = Suite()

SUITE.add(
    "sizes.uneven",
    "Sizes that the number of ranks does not divide, padding never seen.",
    partial(_trained, ("uneven", "embedding")),
    source="pytorch PR 88769; issue 176076",
    needs={"uneven_parameters"},
)
SUITE.add(
    "sizes.fewer_elements_than_ranks",
    "Parameters of one element: some ranks hold none of it.",
    partial(_trained, ("one_element",)),
    source="pytorch PR 94109",
    needs={"uneven_parameters"},
)
SUITE.add(
    "sizes.zero_dim",
    "0-dimensional parameters train.",
    partial(_trained, ("scalars",)),
    source="torch.nn.Parameter of shape ()",
)
SUITE.add(
    "sizes.empty",
    "Parameters without elements are carried along.",
    partial(_trained, ("empty_parameters",)),
    source="torch.nn.Linear with out_features=0",
)
SUITE.add(
    "sizes.strided",
    "Parameters that are not contiguous keep their elements in place.",
    partial(_trained, ("strided",)),
    source="torch.channels_last",
)


@SUITE.check("sizes.two_dtypes", source="pytorch issue 154082", needs={"mixed_dtype_units"})
def _two_dtypes(place: Place) -> Iterable[Case]:
    """Parameters of two dtypes inside one unit."""
    for wrapping in (None, WrappingPlan()):
        yield place.case("two_dtypes", *iterations(2), micro_batch(2), Observe(), Step(), wrapping=wrapping)


@SUITE.check("sizes.clipped_and_accumulated", source="pytorch PR 88769", needs={"uneven_parameters"})
def _clipped_and_accumulated(place: Place) -> Iterable[Case]:
    """Padding counts in no norm and no accumulation."""
    for model in ("uneven", "one_element"):
        yield place.case(model, *accumulated(0, 1), Clip(0.1), Step(), dtype="float32")
