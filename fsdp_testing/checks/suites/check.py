"""What is a check? Data: a name, a meaning, a source, the capabilities it needs, and the cases that decide it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any

from fsdp_testing.adapters.adapter import Adapter
from fsdp_testing.cases.models import MODELS
from fsdp_testing.cases.records import (
    STRATEGIES,
    Case,
    MixedPrecisionSpec,
    ModelSpec,
    Operation,
    OptimizerSpec,
    WorldSpec,
    WrappingPlan,
)
from fsdp_testing.judging.case_runner import ORDINARY, CaseRunner, JudgedCase, RunMode
from fsdp_testing.oracle.comparison import Comparison
from fsdp_testing.oracle.fitting import fitted

FLAT = ("full_shard", "shard_grad_op", "no_shard")
"""Strategies over one group of ranks; a check runs under each that is claimed."""

HYBRID = ("hybrid_shard", "hybrid_shard_zero2")

MOMENTUM = OptimizerSpec("sgd", {"lr": 0.05, "momentum": 0.9})
PLAIN_SGD = OptimizerSpec("sgd", {"lr": 0.0625})
ADAMW = OptimizerSpec("adamw", {"lr": 0.01, "eps": 1e-3, "weight_decay": 0.1})
"""`eps` is large, so that a gradient that is zero but for rounding does not become a step of full size: Adam divides by
`|g| + eps`, and nothing could be said of such a step."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a check's cases run: one world size, one strategy.

    Attributes:
        world_size: Number of ranks.
        strategy: Sharding strategy.
        backend: Backend of the world.
        mesh: Shape of the mesh, for the hybrid strategies.
    """

    world_size: int
    strategy: str
    backend: str = "gloo"
    mesh: tuple[int, ...] = ()

    def case(
        self,
        model: str,
        *program: Operation,
        optimizer: OptimizerSpec = MOMENTUM,
        wrapping: WrappingPlan | None = None,
        precision: MixedPrecisionSpec | None = None,
        **model_fields: Any,
    ) -> Case:
        """Return a case at this place.

        Args:
            model: Name of a zoo model.
            program: Operations.
            optimizer: Optimizer.
            wrapping: Wrapping plan; every unit that the zoo suggests for the model by default.
            precision: Mixed precision.
            **model_fields: Fields of `ModelSpec` (`arguments`, `dtype`, `freeze`).
        """
        return Case(
            model=ModelSpec(model, **model_fields),
            world=WorldSpec(self.world_size, self.backend, self.mesh),
            program=tuple(program),
            seed=1,
            wrapping=WrappingPlan(units=MODELS[model].units) if wrapping is None else wrapping,
            strategy=self.strategy,
            mixed_precision=precision,
            optimizer=optimizer,
        )


Builder = Callable[[Place], Iterable[Case]]
Judge = Callable[[CaseRunner, Adapter, Case, Comparison], JudgedCase]


@dataclass(frozen=True, slots=True)
class Check:
    """One named claim and how it is decided.

    Attributes:
        name: `suite.check`, unique.
        meaning: The claim in one line.
        source: Where the behaviour is described or was once broken.
        build: Gives the cases at a place.
        needs: Capabilities without which the check is not asked.
        comparison: How observations are compared with the oracle.
        mode: How its cases are run, where they are not run as they are.
        judge: Judges one case by itself, where that takes more than one run.
        profile: `default` runs always, `extended` when asked for.
        strategies: Strategies under which it runs, of those that are claimed.
        meshes: For hybrid strategies, the mesh shapes by world size.
    """

    name: str
    meaning: str
    source: str
    build: Builder
    needs: frozenset[str] = frozenset()
    comparison: Comparison = field(default_factory=Comparison)
    mode: RunMode = ORDINARY
    judge: Judge | None = None
    profile: str = "default"
    strategies: tuple[str, ...] = FLAT
    meshes: Mapping[int, tuple[tuple[int, ...], ...]] = field(default_factory=dict)

    def places(self, claimed: frozenset[str], world_sizes: Iterable[int], backend: str) -> list[Place]:
        """Return where the check runs for an implementation that claims `claimed`."""
        strategies = [name for name in self.strategies if STRATEGIES[name] in claimed]
        found: list[Place] = []
        for size in world_sizes:
            for strategy in strategies:
                meshes = self.meshes.get(size, ()) if strategy in HYBRID else ((),)
                found += [Place(size, strategy, backend, mesh) for mesh in meshes]
        return found

    def judged(self, runner: CaseRunner, adapter: Adapter, case: Case) -> JudgedCase:
        """Return what `case` shows of an implementation."""
        if self.judge is not None:
            return self.judge(runner, adapter, case, self.comparison)
        return runner.judge(adapter, case, self.comparison, mode=self.mode)

    def matches(self, patterns: Iterable[str]) -> bool:
        """Whether the check's name, or its suite, matches one of the patterns (fnmatch)."""
        suite = self.name.partition(".")[0]
        return any(fnmatchcase(self.name, pattern) or suite == pattern for pattern in patterns)


class Suite:
    """The checks of one file, in the order in which a report lists them.

    Args:
        needs: Capabilities that every check of the file needs, whatever its cases ask for.
        **defaults: Fields of `Check` for those that do not say otherwise.
    """

    def __init__(self, *, needs: Collection[str] = (), **defaults: Any) -> None:
        self.checks: list[Check] = []
        self._needs = frozenset(needs)
        self._defaults = defaults

    def add(self, name: str, meaning: str, build: Builder, *, needs: Collection[str] = (), **options: Any) -> None:
        """Add a check; several may share the function that builds their cases.

        Args:
            name: `suite.check`, unique.
            meaning: The claim in one line.
            build: Gives the cases at a place; which capabilities they ask for depends on no place.
            needs: Capabilities without which the check is not asked, besides those that its cases ask for by themselves.
            **options: The other fields of `Check`.
        """
        fields: dict[str, Any] = self._defaults | options
        found = Check(name, meaning, build=build, **fields)
        strategy = found.strategies[0]
        cases = build(Place(4, strategy, mesh=(2, 2) if strategy in HYBRID else ()))
        asked = frozenset[str]().union(*map(needs_of, cases)) - set(STRATEGIES.values())
        self.checks.append(replace(found, needs=asked | self._needs | set(needs)))

    def check(self, name: str, *, needs: Collection[str] = (), **options: Any) -> Callable[[Builder], Builder]:
        """Make a check of the function that builds its cases; the function's docstring is the claim."""

        def make(build: Builder) -> Builder:
            self.add(name, inspect.getdoc(build) or "", build, needs=needs, **options)
            return build

        return make


def needs_of(case: Case) -> frozenset[str]:
    """Return every capability that a case needs, its model's included, but for the wrapping by hand.

    An implementation that knows no units is given none: whole models are its claim.
    """
    return (case.required() | MODELS[case.model.name].needs) - {"nested_wrapping"}


def adapt(case: Case, adapter: Adapter) -> Case:
    """Return the case as this implementation runs it: fitted, and without inner units if it knows none."""
    if "nested_wrapping" not in adapter.capabilities and case.wrapping.units:
        case = replace(case, wrapping=replace(case.wrapping, units=()))
    return fitted(case, adapter)
