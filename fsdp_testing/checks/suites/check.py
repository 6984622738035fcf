"""A check is data: a name, a meaning, a source, the capabilities it needs, and the cases that decide it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any

from fsdp_testing.adapters.adapter import Adapter
from fsdp_testing.cases.models import MODELS
from fsdp_testing.cases.records import (
    STRATEGIES,
    Batch,
    Case,
    Forward,
    ForwardBackward,
    MixedPrecisionSpec,
    ModelSpec,
    Operation,
    OptimizerSpec,
    Step,
    WorldSpec,
    WrappingPlan,
    ZeroGrad,
)
from fsdp_testing.judging.case_runner import ORDINARY, CaseRunner, JudgedCase, RunMode
from fsdp_testing.oracle.quantities import Comparison
from fsdp_testing.oracle.setup import fitted

FLAT = ("full_shard", "shard_grad_op", "no_shard")
"""Strategies over one group of ranks; a check runs under each claimed one."""

HYBRID = ("hybrid_shard", "hybrid_shard_zero2")

ODD = (2, 3)
"""World sizes of checks that depend on the number of ranks: divisions, padding, norms, saved spans. Two ranks hide much: each
has one neighbour, one order of summation and an exact division, and powers of two divide most sizes.
"""
UP_TO_EIGHT = (*ODD, 8)
"""World sizes of checks of how gradients are divided: of up to seven ranks, a power of two divides them as none or two does."""
TWO_BY_TWO = (2, 4)
"""World sizes of hybrid sharding: only four ranks have groups of several ranks on both axes."""

MOMENTUM = OptimizerSpec("sgd", {"lr": 0.05, "momentum": 0.9})
PLAIN_SGD = OptimizerSpec("sgd", {"lr": 0.0625})
ADAMW = OptimizerSpec("adamw", {"lr": 0.01, "eps": 1e-3, "weight_decay": 0.1})
"""`eps` is large, so that a gradient that is zero except for rounding does not become a full-sized step: Adam divides by `|g| +
eps`, and such a step could not be judged.
"""

LOCKSTEP = Comparison(lockstep=True)
"""Each operation is judged from the implementation's own state before it."""


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

    def put(self, case: Case) -> Case:
        return replace(case, world=WorldSpec(self.world_size, self.backend, self.mesh), strategy=self.strategy)


Judge = Callable[[CaseRunner, Adapter, Case, Comparison], JudgedCase]


@dataclass(frozen=True, slots=True)
class Check:
    """One named claim and how it is decided.

    Attributes:
        name: `suite.check`, unique.
        meaning: The claim in one line.
        cases: The cases that decide it, at every place.
        source: Where the behaviour is documented or was once broken.
        needs: Capabilities without which the check is not asked.
        comparison: How observations are compared with the oracle.
        mode: How its cases run, if they need more than a plain run.
        judge: Judges one case, if that takes more than one run.
        profile: `default` runs always, `extended` when asked for.
        strategies: Strategies under which it runs, of those that are claimed.
        meshes: For hybrid strategies, the mesh shapes by world size.
        sizes: World sizes on which it is asked where the user names none.
        fit: What a place changes in a case besides its world and strategy.
        of_pieces: It looks at what each rank holds, which an adapter that gathers to show parameters cannot tell.
        by_name: It tells the optimizer's parameters apart by name, which an engine that steps its own cannot.
    """

    name: str
    meaning: str
    cases: tuple[Case, ...]
    source: str
    needs: frozenset[str] = frozenset()
    comparison: Comparison = field(default_factory=Comparison)
    mode: RunMode = ORDINARY
    judge: Judge | None = None
    profile: str = "default"
    strategies: tuple[str, ...] = FLAT
    meshes: Mapping[int, tuple[tuple[int, ...], ...]] = field(default_factory=dict)
    sizes: tuple[int, ...] = (2,)
    fit: Callable[[Case], Case] | None = None
    of_pieces: bool = False
    by_name: bool = False

    def places(
        self, claimed: frozenset[str], world_sizes: Iterable[int], backend: str, tensor_parallel: int = 1
    ) -> list[Place]:
        """Return where the check runs for an implementation that claims `claimed`; a mesh has one rank of each model."""
        strategies = [name for name in self.strategies if STRATEGIES[name] in claimed]
        places: list[Place] = []
        for size in world_sizes:
            if size == tensor_parallel and not {*HYBRID, "no_shard"} & set(self.strategies):
                continue  # one rank holds everything: there is no shard to ask about
            for strategy in strategies:
                meshes = self.meshes.get(size // tensor_parallel, ()) if strategy in HYBRID else ((),)
                places += [Place(size, strategy, backend, mesh) for mesh in meshes]
        return places

    def build(self, place: Place) -> list[Case]:
        cases = map(place.put, self.cases)
        return list(map(self.fit, cases) if self.fit is not None else cases)

    def judged(self, runner: CaseRunner, adapter: Adapter, case: Case) -> JudgedCase:
        """Return what `case` shows of an implementation."""
        comparison = self.comparison
        if "unused_gradient_is_none" not in adapter.capabilities and "unused_parameters" in needs_of(case):
            comparison = replace(comparison, none_is_zero=True)
        if self.judge is not None:
            return self.judge(runner, adapter, case, comparison)
        return runner.judge(adapter, case, comparison, mode=self.mode)

    def matches(self, patterns: Iterable[str]) -> bool:
        """Whether the check's name, or its suite, matches one of the patterns (fnmatch)."""
        suite = self.name.partition(".")[0]
        return any(fnmatchcase(self.name, pattern) or suite == pattern for pattern in patterns)


def check(name: str, meaning: str, *cases: Iterable[Case], needs: Collection[str] = (), **options: Any) -> Check:
    """Return a check; with `partial` several checks share a source or a mode.

    Args:
        name: `suite.check`, unique.
        meaning: The claim in one line.
        cases: The cases that decide it, as `cases` returns them.
        needs: Capabilities without which the check does not run, besides those that its cases need.
        **options: The other fields of `Check`.
    """
    every_case = tuple(case for group in cases for case in group)
    inherent = frozenset[str]().union(*map(needs_of, every_case)) - set(STRATEGIES.values())
    return Check(name, meaning, every_case, needs=inherent | set(needs), **options)


def cases(
    models: str,
    *program: Operation,
    optimizer: OptimizerSpec = MOMENTUM,
    wrapping: WrappingPlan | None = None,
    precision: MixedPrecisionSpec | None = None,
    offload: bool = False,
    **model_fields: Any,
) -> tuple[Case, ...]:
    """Return one program on each of several models, on two ranks unless a place changes that.

    Args:
        models: Names of zoo models, with spaces between.
        program: Operations.
        optimizer: Optimizer.
        wrapping: Wrapping plan; every unit that the zoo suggests for the model by default.
        precision: Mixed precision.
        offload: Parameters live on the CPU.
        **model_fields: Fields of `ModelSpec` (`arguments`, `dtype`, `freeze`).
    """
    return tuple(
        Case(
            model=ModelSpec(model, **model_fields),
            world=WorldSpec(2),
            program=program,
            seed=1,
            wrapping=every_unit(model) if wrapping is None else wrapping,
            mixed_precision=precision,
            cpu_offload=offload,
            optimizer=optimizer,
        )
        for model in models.split()
    )


def every_unit(model: str, **fields: Any) -> WrappingPlan:
    """Return a plan with every unit that the zoo suggests for a model, and other fields of `WrappingPlan`."""
    return WrappingPlan(MODELS[model].units, **fields)


def needs_of(case: Case) -> frozenset[str]:
    """Return every capability that a case needs, including its model's, except the wrapping by hand.

    An implementation without units gets none: it claims whole models.
    """
    return (case.required() | MODELS[case.model.name].needs) - {"nested_wrapping"}


def adapt(case: Case, adapter: Adapter) -> Case:
    """Return the case as this implementation runs it: fitted, and without inner units if it has no units."""
    if "nested_wrapping" not in adapter.capabilities and case.wrapping.units:
        case = replace(case, wrapping=replace(case.wrapping, units=()))
    return fitted(case, adapter)


def micro_batch(seed: int, **batch: Any) -> ForwardBackward:
    """Return a micro-batch whose gradients are reduced."""
    return ForwardBackward(Batch(seed, **batch))


def no_sync_batch(seed: int, **batch: Any) -> ForwardBackward:
    """Return a micro-batch inside `no_sync`."""
    return ForwardBackward(Batch(seed, **batch), no_sync=True)


def micro_batches(*seeds: int) -> tuple[Operation, ...]:
    """Return micro-batches whose gradients are reduced one by one."""
    return tuple(micro_batch(seed) for seed in seeds)


def accumulated(*seeds: int) -> tuple[Operation, ...]:
    """Return micro-batches inside `no_sync`, and a last one that reduces the sum."""
    return (*(no_sync_batch(seed) for seed in seeds[:-1]), micro_batch(seeds[-1]))


def forward(seed: int, mode: str = "eval", **batch: Any) -> Forward:
    """Return a forward that no backward follows."""
    return Forward(Batch(seed, **batch), mode)


def iteration(seed: int, *before_step: Operation, **batch: Any) -> tuple[Operation, ...]:
    """Return one training iteration: micro-batch, operations before the step, step, gradients cleared."""
    return micro_batch(seed, **batch), *before_step, Step(), ZeroGrad()


def iterations(count: int, first: int = 0, **batch: Any) -> tuple[Operation, ...]:
    """Return several training iterations on different inputs."""
    return tuple(op for seed in range(first, first + count) for op in iteration(seed, **batch))
