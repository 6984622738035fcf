"""Construction: wrapping changes where numbers live, and no number."""

from __future__ import annotations

from collections.abc import Iterable

from fsdp_testing.checkers.comparison import Comparison
from fsdp_testing.records import Case, Observe, PolicySpec, WrappingPlan
from fsdp_testing.suites.check import ADAMW, Check, Place
from fsdp_testing.suites.schedules import forward, iterations, micro_batch

_WRAP_SOURCE = "https://pytorch.org/docs/stable/fsdp.html"


def _unchanged(place: Place) -> Iterable[Case]:
    for model in ("mlp", "deep_nest", "uneven", "embedding"):
        yield place.case(model)


def _buffers(place: Place) -> Iterable[Case]:
    yield place.case("buffers")


def _first_forward(place: Place) -> Iterable[Case]:
    for model in ("mlp", "deep_nest", "keywords", "bare_root"):
        yield place.case(model, forward(0, "train"), forward(1, "no_grad"))


def _root_only(place: Place) -> Iterable[Case]:
    for model in ("mlp", "uneven"):
        yield place.case(model, *iterations(2), wrapping=WrappingPlan())


def _nested(place: Place) -> Iterable[Case]:
    yield place.case("deep_nest", *iterations(2))
    yield place.case("deep_nest", *iterations(2), wrapping=WrappingPlan(units=("inner.inner",)))
    yield place.case("mlp", *iterations(2), wrapping=WrappingPlan(units=("layers.1",)))
    yield place.case("bare_root", *iterations(2))


def _class_policy(place: Place) -> Iterable[Case]:
    plan = WrappingPlan(policy=PolicySpec("module_class", classes=("Linear",)))
    for model in ("mlp", "deep_nest"):
        yield place.case(model, *iterations(2), wrapping=plan)


def _size_policy(place: Place) -> Iterable[Case]:
    yield place.case("deep_nest", *iterations(2), wrapping=WrappingPlan(policy=PolicySpec("size", min_numel=100)))


def _keyword_inputs(place: Place) -> Iterable[Case]:
    yield place.case("keywords", *iterations(2))


def _ignored(place: Place) -> Iterable[Case]:
    plan = WrappingPlan(units=("layers.1", "layers.2"), ignored=("layers.0",))
    yield place.case("mlp", *iterations(2), wrapping=plan, freeze=("layers.0.*",), optimizer=ADAMW)


def _ignored_trained(place: Place) -> Iterable[Case]:
    plan = WrappingPlan(units=("layers.1", "layers.2"), ignored=("layers.0",))
    yield place.case("mlp", micro_batch(0), Observe(), wrapping=plan)


CHECKS = (
    Check(
        "construction.keeps_numbers",
        "Wrapping keeps every value, dtype and requires_grad flag.",
        _WRAP_SOURCE,
        _unchanged,
    ),
    Check("construction.keeps_buffers", "Wrapping keeps every buffer.", _WRAP_SOURCE, _buffers, frozenset({"buffers"})),
    Check(
        "construction.first_forward",
        "The first forward gives what the unwrapped module gives.",
        _WRAP_SOURCE,
        _first_forward,
        frozenset({"forward_only"}),
    ),
    Check(
        "wrapping.root_only",
        "One unit that holds the whole model trains as one process does.",
        _WRAP_SOURCE,
        _root_only,
    ),
    Check(
        "wrapping.nested",
        "Units inside units, chosen by hand, train as one process does.",
        "pytorch PR 90874",
        _nested,
        frozenset({"nested_wrapping"}),
    ),
    Check(
        "wrapping.class_policy",
        "Units chosen by module class train as one process does.",
        "pytorch PR 91044",
        _class_policy,
        frozenset({"policy_wrapping"}),
    ),
    Check(
        "wrapping.size_policy",
        "Units chosen by number of elements train as one process does.",
        "torch.distributed.fsdp.wrap.size_based_auto_wrap_policy",
        _size_policy,
        frozenset({"policy_wrapping"}),
    ),
    Check(
        "wrapping.ignored_frozen",
        "Ignored frozen modules stay whole and unchanged while the rest trains.",
        "pytorch issue 104258, PR 104418",
        _ignored,
        frozenset({"ignored_parameters", "nested_wrapping", "frozen_parameters"}),
    ),
    Check(
        "wrapping.ignored_trained",
        "Ignored modules that train keep gradients of their own and disturb no one else's.",
        "pytorch issue 98281",
        _ignored_trained,
        frozenset({"ignored_parameters", "nested_wrapping"}),
        # Who averages what is ignored is the user's affair: only the others are compared.
        Comparison(ignore=("layers.0.*",)),
    ),
    Check(
        "wrapping.keyword_inputs",
        "Keyword and nested inputs reach the module unchanged.",
        "pytorch PR 91078",
        _keyword_inputs,
    ),
)
