"""What exactly is run? One case is one value, and one value is one JSON document.

The same case gives the same collectives and the same numbers on every run. Nothing in a case names an implementation:
any of them may be asked to run it.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from fsdp_testing.base.document import ADDED_LATER, Format, decode, register_union
from fsdp_testing.cases.operations import OPERATIONS, Operation
from fsdp_testing.cases.records.capabilities import SETTINGS, STRATEGIES
from fsdp_testing.errors import InvalidRecord

FORMAT = Format("fsdp_testing/case", 1)

DTYPES = ("float64", "float32", "float16", "bfloat16")
OPTIMIZERS = ("sgd", "adamw", "adam")
POLICIES = ("module_class", "size", "always")
PREFETCH = ("pre", "post", "none")
STARTS = ("sync_module_states", "meta_init")
"""What wrapping may be asked to bring: fields of `WrappingPlan`, each of which needs the capability of its name."""
LAYOUTS = ("colwise", "colwise_cut", "rowwise", "rowwise_cut", "sequence", "replicated")
"""How tensor parallelism cuts one module (`WrappingPlan.layouts`). All but two take and give whole activations:
`colwise_cut` gives each rank its own columns, and `rowwise_cut` takes them. `sequence` cuts the rows of activations
and leaves the parameters whole."""

register_union(Operation, OPERATIONS.get)

Scalar = str | int | float | bool | None


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Which module is trained.

    Attributes:
        name: A model of the zoo, or `tree` for a module tree drawn by the fuzzer.
        arguments: Keyword arguments of the zoo's builder (scalars and tuples of scalars).
        dtype: Dtype of parameters and floating buffers before wrapping.
        tree: The module tree of a drawn model, as plain data; None for a zoo model.
        freeze: Parameters (fnmatch patterns) with `requires_grad=False` before wrapping.
    """

    name: str
    arguments: Mapping[str, Scalar | tuple[Scalar, ...]] = field(default_factory=dict)
    dtype: str = "float64"
    tree: Any = None
    freeze: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class PolicySpec:
    """A wrapping policy.

    Attributes:
        kind: `module_class` (every module of one of the classes), `size` (by number of elements), `always`.
        classes: Names of the module classes (class `__name__`), for `module_class`.
        min_numel: Smallest number of elements that makes a unit, for `size`.
    """

    kind: str
    classes: tuple[str, ...] = ()
    min_numel: int = 0


@dataclass(frozen=True, slots=True)
class WrappingPlan:
    """Which modules become units. The root always is one.

    Attributes:
        units: FQNs of the inner modules wrapped by hand, in any order; the implementation wraps children before
            parents.
        policy: Wraps automatically instead of (or, where claimed, beside) the list.
        ignored: FQNs of modules whose parameters stay outside.
        checkpointed: FQNs of modules whose forward is computed again in backward.
        checkpoint_reentrant: By running a backward inside the backward, as torch's older way does.
        checkpoint_outside: Around what wrapping made of the module, instead of inside it.
        forward_prefetch: Asks for units to be gathered ahead in forward.
        backward_prefetch: `pre`, `post` or `none`: when the next unit of a backward is gathered.
        sync_module_states: Ranks begin with different values, and wrapping gives all of them those of rank 0.
        meta_init: Modules are on the meta device, and wrapping has them initialised.
        settings: Names of options that change no number (`SETTINGS`).
        layouts: `(FQN of a module, one of LAYOUTS)`: what tensor parallelism makes of modules before they are wrapped.
    """

    units: tuple[str, ...] = ()
    policy: PolicySpec | None = None
    ignored: tuple[str, ...] = ()
    checkpointed: tuple[str, ...] = ()
    checkpoint_reentrant: bool = False
    checkpoint_outside: bool = False
    forward_prefetch: bool = False
    backward_prefetch: str = "pre"
    sync_module_states: bool = False
    meta_init: bool = False
    settings: tuple[str, ...] = ()
    layouts: tuple[tuple[str, str], ...] = field(default=(), metadata=ADDED_LATER)

    def required(self) -> frozenset[str]:
        """Return the capabilities that wrapping so needs."""
        asked = {
            "nested_wrapping": self.units,
            "policy_wrapping": self.policy,
            "ignored_parameters": self.ignored,
            "activation_checkpointing": self.checkpointed,
            "reentrant_checkpointing": self.checkpointed and self.checkpoint_reentrant,
            "prefetch": self.forward_prefetch or self.backward_prefetch != "pre",
        }
        asked |= {name: getattr(self, name) for name in STARTS}
        return frozenset(tag for tag, value in asked.items() if value).union(self.settings)


@dataclass(frozen=True, slots=True)
class WorldSpec:
    """Which ranks run it.

    Attributes:
        size: How many in all.
        backend: Of their groups.
        mesh: Shape of the device mesh: (size,) or (replicas, shards).
        tensor_parallel: How many of them hold one model together, which the plan's `layouts` cut; the model is wrapped
            over the others, and ranks r and s have the same inputs where r // tensor_parallel == s // tensor_parallel.
    """

    size: int
    backend: str = "gloo"
    mesh: tuple[int, ...] = ()
    tensor_parallel: int = field(default=1, metadata=ADDED_LATER)

    @property
    def replicas(self) -> int:
        """How many ranks have inputs of their own."""
        return self.size // self.tensor_parallel

    @property
    def mesh_shape(self) -> tuple[int, ...]:
        """The mesh shape, one-dimensional unless one is given."""
        return self.mesh or (self.size,)


@dataclass(frozen=True, slots=True)
class MixedPrecisionSpec:
    """Dtypes by name; None leaves the original (`reduce_dtype` None: the dtype of the computed gradient)."""

    param_dtype: str | None = None
    reduce_dtype: str | None = None
    buffer_dtype: str | None = None


@dataclass(frozen=True, slots=True)
class OptimizerSpec:
    """Which optimizer; `arguments` are its keyword arguments. In a document its name is one of `OPTIMIZERS`."""

    name: str = "sgd"
    arguments: Mapping[str, Scalar | tuple[Scalar, ...]] = field(default_factory=lambda: {"lr": 0.1})


@dataclass(frozen=True, slots=True)
class Case:
    """Everything that determines a run, except the implementation."""

    model: ModelSpec
    world: WorldSpec
    program: tuple[Operation, ...]
    seed: int = 0
    wrapping: WrappingPlan = WrappingPlan()
    strategy: str = "full_shard"
    mixed_precision: MixedPrecisionSpec | None = None
    cpu_offload: bool = False
    optimizer: OptimizerSpec = OptimizerSpec()

    def without_operation(self, index: int) -> Case:
        """Return this case with operation `index` left out; always a legal case again."""
        return replace(self, program=self.program[:index] + self.program[index + 1 :])

    def required(self) -> frozenset[str]:
        """Return the capabilities an implementation must claim to be asked this case."""
        precision = self.mixed_precision or MixedPrecisionSpec()
        asked = {
            STRATEGIES[self.strategy]: True,
            "cpu_offload": self.cpu_offload,
            "frozen_parameters": self.model.freeze,
            "mixed_precision": precision.param_dtype,
            "reduce_dtype": precision.reduce_dtype,
            "buffer_dtype": precision.buffer_dtype,
            "tensor_parallel": self.world.tensor_parallel > 1,
        }
        own = frozenset(tag for tag, value in asked.items() if value)
        return own.union(self.wrapping.required(), *(operation.required() for operation in self.program))

    @property
    def identity(self) -> str:
        """Twelve hex digits that name this case in reports and file names."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()[:12]

    def to_json(self, *, indent: int | None = None) -> str:
        """Return the case as a JSON document; `Case.from_json` gives back an equal case."""
        return FORMAT.write(self, indent=indent)

    @classmethod
    def from_json(cls, document: str | Mapping[str, Any], where: str = "case") -> Case:
        """Read a case from text, or from what it was parsed to.

        Raises:
            InvalidRecord: The document is damaged, newer than this version, or describes no legal case.
        """
        case = decode(cls, FORMAT.read(document, where), where)
        check_case(case, where)
        return case


def check_case(case: Case, where: str = "case") -> None:
    """Check what must hold of a case as a whole, whatever its program.

    Raises:
        InvalidRecord: Every offender is listed.
    """
    problems: list[str] = []

    def demand(name: str, value: Any, known: tuple[str, ...]) -> None:
        if value not in known:
            problems.append(f"{name}: expected one of {', '.join(known)}, got {value!r}")

    demand("strategy", case.strategy, tuple(STRATEGIES))
    demand("model.dtype", case.model.dtype, DTYPES)
    demand("optimizer.name", case.optimizer.name, OPTIMIZERS)
    demand("wrapping.backward_prefetch", case.wrapping.backward_prefetch, PREFETCH)
    if case.wrapping.policy is not None:
        demand("wrapping.policy.kind", case.wrapping.policy.kind, POLICIES)
    for name in case.wrapping.settings:
        demand("wrapping.settings", name, tuple(SETTINGS))
    for name in ("param_dtype", "reduce_dtype", "buffer_dtype") if case.mixed_precision else ():
        if getattr(case.mixed_precision, name) is not None:
            demand(f"mixed_precision.{name}", getattr(case.mixed_precision, name), DTYPES)
    for fqn, layout in case.wrapping.layouts:
        demand(f"wrapping.layouts of {fqn!r}", layout, LAYOUTS)
    problems += _world_problems(case.world)
    if problems:
        raise InvalidRecord(f"{where}.{'; '.join(problems)}. Mend the document.")


def _world_problems(world: WorldSpec) -> Iterator[str]:
    if world.size < 1:
        yield f"world.size: expected at least 1, got {world.size}"
    if math.prod(world.mesh_shape) != world.size:
        yield f"world.mesh: expected {world.size} ranks in all, got shape {world.mesh_shape}"
    if world.tensor_parallel < 1 or world.size % world.tensor_parallel:
        yield f"world.tensor_parallel: expected a divisor of {world.size} ranks, got {world.tensor_parallel}"
    elif world.tensor_parallel > 1 and world.mesh:
        yield f"world.mesh: expected none beside tensor_parallel, got {world.mesh}"
