"""Construction: wrapping changes where numbers live, and no number."""

from __future__ import annotations

from collections.abc import Iterable

from fsdp_testing.cases.records import Case, Observe, OptimizerSpec, PolicySpec, WrappingPlan
from fsdp_testing.checks.suites.check import ADAMW, Place, Suite
from fsdp_testing.checks.suites.schedules import forward, iteration, iterations, micro_batch
from fsdp_testing.oracle.comparison import Comparison

SUITE = Suite(source="https://pytorch.org/docs/stable/fsdp.html")


@SUITE.check("construction.keeps_numbers")
def _unchanged(place: Place) -> Iterable[Case]:
    """Wrapping keeps every value, dtype and requires_grad flag."""
    for model in ("mlp", "deep_nest", "uneven", "embedding"):
        yield place.case(model)


@SUITE.check("construction.keeps_buffers")
def _buffers(place: Place) -> Iterable[Case]:
    """Wrapping keeps every buffer."""
    yield place.case("buffers")


@SUITE.check("construction.first_forward")
def _first_forward(place: Place) -> Iterable[Case]:
    """The first forward gives what the unwrapped module gives."""
    for model in ("mlp", "deep_nest", "keywords", "bare_root"):
        yield place.case(model, forward(0, "train"), forward(1, "no_grad"))


@SUITE.check("wrapping.root_only")
def _root_only(place: Place) -> Iterable[Case]:
    """One unit that holds the whole model trains as one process does."""
    for model in ("mlp", "uneven"):
        yield place.case(model, *iterations(2), wrapping=WrappingPlan())


@SUITE.check("wrapping.nested", source="pytorch PR 90874", needs={"nested_wrapping"})
def _nested(place: Place) -> Iterable[Case]:
    """Units inside units, chosen by hand, train as one process does."""
    yield place.case("deep_nest", *iterations(2))
    yield place.case("deep_nest", *iterations(2), wrapping=WrappingPlan(units=("inner.inner",)))
    yield place.case("mlp", *iterations(2), wrapping=WrappingPlan(units=("layers.1",)))
    yield place.case("bare_root", *iterations(2))


@SUITE.check("wrapping.class_policy", source="pytorch PR 91044")
def _class_policy(place: Place) -> Iterable[Case]:
    """Units chosen by module class train as one process does."""
    plan = WrappingPlan(policy=PolicySpec("module_class", classes=("Linear",)))
    for model in ("mlp", "deep_nest"):
        yield place.case(model, *iterations(2), wrapping=plan)


@SUITE.check("wrapping.size_policy", source="torch.distributed.fsdp.wrap.size_based_auto_wrap_policy")
def _size_policy(place: Place) -> Iterable[Case]:
    """Units chosen by number of elements train as one process does."""
    yield place.case("deep_nest", *iterations(2), wrapping=WrappingPlan(policy=PolicySpec("size", min_numel=100)))


@SUITE.check("wrapping.ignored_frozen", source="pytorch issue 104258, PR 104418", needs={"nested_wrapping"})
def _ignored(place: Place) -> Iterable[Case]:
    """Ignored frozen modules stay whole and unchanged while the rest trains."""
    plan = WrappingPlan(units=("layers.1", "layers.2"), ignored=("layers.0",))
    yield place.case("mlp", *iterations(2), wrapping=plan, freeze=("layers.0.*",), optimizer=ADAMW)


@SUITE.check(
    "wrapping.ignored_trained",
    source="pytorch issue 98281",
    needs={"nested_wrapping"},
    comparison=Comparison(ignore=("layers.0.*",)),
)
def _ignored_trained(place: Place) -> Iterable[Case]:
    """Ignored modules that train keep gradients of their own and disturb no one else's."""
    plan = WrappingPlan(units=("layers.1", "layers.2"), ignored=("layers.0",))
    yield place.case("mlp", micro_batch(0), Observe(), wrapping=plan)


@SUITE.check("wrapping.ignored_stepped", source="pytorch issue 183207", needs={"nested_wrapping"})
def _ignored_stepped(place: Place) -> Iterable[Case]:
    """Parameters that stay outside are stepped with the others, by an optimizer that takes all of them at once."""
    plan = WrappingPlan(units=("layers.1", "layers.2"), ignored=("layers.0",))
    at_once = OptimizerSpec("sgd", {"lr": 0.05, "momentum": 0.9, "foreach": True})
    # Nobody reduces what is ignored: with equal inputs it is equal on all ranks without that.
    program = (*iteration(0, alike=True), *iteration(1, alike=True))
    yield place.case("mlp", *program, wrapping=plan, optimizer=at_once)


@SUITE.check("wrapping.keyword_inputs", source="pytorch PR 91078")
def _keyword_inputs(place: Place) -> Iterable[Case]:
    """Keyword and nested inputs reach the module unchanged."""
    yield place.case("keywords", *iterations(2))
