"""Axes of the wrapping plan."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from fsdp_testing.cases.records.axes.axis import Axis, Step, demand, planned
from fsdp_testing.cases.records.specs import LAYOUTS, POLICIES, SETTINGS, TOLD_TO_ORACLE, WrappingPlan

if TYPE_CHECKING:
    from fsdp_testing.cases.records.case import Case


class Units(Axis):
    """Inner units chosen by name, and the plan as a whole."""

    features = {"wrap.nested": ("nested_wrapping",)}
    scripted = True

    def needs(self, case: Case) -> Iterable[str]:
        return ("nested_wrapping",) if case.wrapping.units else ()

    def tags(self, case: Case) -> Iterable[str]:
        return (f"units:{min(len(case.wrapping.units), 3)}",)

    def simpler(self, case: Case) -> Iterable[Step]:
        units = case.wrapping.units
        if case.wrapping != WrappingPlan():
            yield ("wrapping",), replace(case, wrapping=WrappingPlan())
        for name in units:
            yield ("wrapping", name), planned(case, units=tuple(unit for unit in units if unit != name))

    def for_oracle(self, case: Case) -> Case:
        told = tuple(name for name in case.wrapping.settings if name in TOLD_TO_ORACLE)
        return replace(case, wrapping=WrappingPlan(settings=told))

    def setup(self, case: Case) -> Mapping[str, Any]:
        return {"units": case.wrapping.units}


class Policy(Axis):
    """Units chosen by a policy."""

    features = {"wrap.policy": ("policy_wrapping",)}

    def needs(self, case: Case) -> Iterable[str]:
        beside = ("policy_beside_units",) if case.wrapping.policy and case.wrapping.units else ()
        return ("policy_wrapping", *beside) if case.wrapping.policy else ()

    def problems(self, case: Case) -> Iterable[str]:
        return demand("wrapping.policy.kind", case.wrapping.policy.kind, POLICIES) if case.wrapping.policy else ()

    def tags(self, case: Case) -> Iterable[str]:
        return (f"policy:{case.wrapping.policy.kind}",) if case.wrapping.policy else ()


class Ignored(Axis):
    """Modules whose parameters stay outside."""

    features = {"wrap.ignored": ("ignored_parameters", "frozen_parameters")}

    def needs(self, case: Case) -> Iterable[str]:
        return ("ignored_parameters",) if case.wrapping.ignored else ()

    def simpler(self, case: Case) -> Iterable[Step]:
        if case.wrapping.ignored:
            yield ("wrapping", ".ignored"), planned(case, ignored=())

    def setup(self, case: Case) -> Mapping[str, Any]:
        return {"ignored": case.wrapping.ignored}


class Layouts(Axis):
    """How tensor parallelism cuts modules."""

    scripted = True

    def problems(self, case: Case) -> Iterable[str]:
        for fqn, layout in case.wrapping.layouts:
            yield from demand(f"wrapping.layouts of {fqn!r}", layout, LAYOUTS)

    def tags(self, case: Case) -> Iterable[str]:
        return (f"layout:{layout}" for _, layout in case.wrapping.layouts if case.world.tensor_parallel > 1)

    def simpler(self, case: Case) -> Iterable[Step]:
        plan = dict(case.wrapping.layouts)
        for fqn, layout in plan.items():
            # Paired layouts, whose partner would have no meaning alone, are first replaced by ones for whole activations.
            others = {**plan, fqn: layout.removesuffix("_cut")}
            ways = [others] if others != plan else []
            ways += [{**others, fqn: "replicated"}] if layout != "replicated" else []
            ways.append({name: other for name, other in others.items() if name != fqn})
            for number, layouts in enumerate(ways):
                yield ("wrapping", ".layouts", fqn, number), planned(case, layouts=tuple(layouts.items()))

    def setup(self, case: Case) -> Mapping[str, Any]:
        return {"layouts": case.wrapping.layouts if case.world.tensor_parallel > 1 else ()}


class Checkpointed(Axis):
    """Modules whose forward is recomputed in backward."""

    def needs(self, case: Case) -> Iterable[str]:
        again = "activation_checkpointing", "reentrant_checkpointing"
        return again[: 1 + case.wrapping.checkpoint_reentrant] if case.wrapping.checkpointed else ()

    def tags(self, case: Case) -> Iterable[str]:
        again = case.wrapping.checkpointed
        if again:
            yield "recomputed:around" if case.wrapping.checkpoint_outside else "recomputed:inside"
        if any(inner.startswith(f"{outer}.") for inner in again for outer in again):
            yield "recomputed_inside_recomputed"

    def simpler(self, case: Case) -> Iterable[Step]:
        if case.wrapping.checkpointed:
            yield ("wrapping", ".checkpointed"), planned(case, checkpointed=(), checkpoint_outside=False)

    def setup(self, case: Case) -> Mapping[str, Any]:
        return {
            name: getattr(case.wrapping, name)
            for name in ("checkpointed", "checkpoint_reentrant", "checkpoint_outside")
        }


class Settings(Axis):
    """Options that change no number, by name."""

    def needs(self, case: Case) -> Iterable[str]:
        return case.wrapping.settings

    def problems(self, case: Case) -> Iterable[str]:
        for name in case.wrapping.settings:
            yield from demand("wrapping.settings", name, SETTINGS)

    def simpler(self, case: Case) -> Iterable[Step]:
        settings = case.wrapping.settings
        for name in settings:
            yield ("wrapping", ".settings", name), planned(case, settings=tuple(n for n in settings if n != name))

    def setup(self, case: Case) -> Mapping[str, Any]:
        return {"settings": frozenset(case.wrapping.settings)}
