"""The parts of a case besides its program: the model, its wrapping, the world, dtypes and the optimizer, each a value."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from fsdp_testing.base.document import ADDED_LATER

UNIT_ROUNDOFF = {"float64": 2.0**-53, "float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}
"""Half the distance from 1 to the next number, by dtype name. To first order the error of k roundings of terms of magnitude m is
at most k * u * m (Higham, "Accuracy and Stability of Numerical Algorithms", chapter 3): every bound is derived from this."""

UNDERFLOW = {"float64": 2.0**-1074, "float32": 2.0**-150, "float16": 2.0**-25, "bfloat16": 2.0**-134}
"""Half the smallest positive number (for float64 that number itself): the largest error of rounding a number near 0."""

DTYPES = ("float64", "float32", "float16", "bfloat16")
LOW_DTYPES = ("bfloat16", "float16")
OPTIMIZERS = ("sgd", "adamw", "adam", "lars", "nadam", "adamw_tensor_lr")
POLICIES = ("module_class", "size", "always")
PREFETCH = ("pre", "post", "none")
LAYOUTS = ("colwise", "colwise_cut", "rowwise", "rowwise_cut", "sequence", "replicated")
"""How tensor parallelism cuts one module (`WrappingPlan.layouts`). All but two take and give whole activations:
`colwise_cut` gives each rank its own columns, and `rowwise_cut` takes them. `sequence` cuts the rows of activations
and leaves the parameters whole."""
STRATEGIES: dict[str, str] = {
    "full_shard": "full_shard",
    "shard_grad_op": "shard_grad_op",
    "no_shard": "no_shard",
    "hybrid_shard": "hybrid",
    "hybrid_shard_zero2": "hybrid",
}
"""Strategy of a case -> the capability that an implementation must claim to run it."""
TOLD_TO_ORACLE = frozenset({"full_outputs", "uncast_inputs", "unit_precisions", "precise_norms", "saved_on_rank_0"})
"""Settings that change what the oracle expects: such a case shares no replay with one without."""

SETTINGS: dict[str, str] = {
    "static_graph": "the user promises that every iteration runs the same graph",
    "gradient_views": "gradients are views of communication buckets",
    "small_buckets": "gradients are sent in very small buckets",
    "batched_copies": "gradients are copied into a message together and divided there",
    "unused_left_out": "the user promises that all ranks use the same parameters, and others are not reduced",
    "divide_factor": "gradients are divided by a given number: twice the number of ranks",
    "sum_reduction": "gradients are summed first and divided afterwards, even if the backend can average",
    "late_all_reduce": "in `no_sync` hybrid sharding reduces within shard groups but not over replicas",
    "kept_after_backward": "in `no_sync` parameters are not freed after backward",
    "partial_reshard": "after forward units are, in turn, resharded over fewer ranks, resharded, and not resharded",
    "single_units": "units are switched one by one: resharded or not, local or not in `no_sync`, not gathered in backward",
    "tuned_communication": "reductions have groups and buffers of their own, and gathers wait for an event after the step",
    "shared_streams": "the units of the model are roots that share their streams",
    "own_all_reduce": "in hybrid sharding a user's function reduces over replicas",
    "zeros_for_unused": "parameters that this rank did not use take part in reductions",
    "compressing_hook": "in place of `reduce_dtype`, the implementation's own hook reduces gradients in 16 bits",
    "full_outputs": "the model's outputs are cast to the dtype in which parameters are stored",
    "uncast_inputs": "in mixed precision the root leaves its inputs as they are, and the model casts",
    "low_gradients": "gradients stay in the dtype in which they are reduced",
    "unit_precisions": "in mixed precision every unit casts its inputs, and every second one computes in the stored dtype",
    "precise_norms": "in mixed precision a policy keeps batch norms as they are stored, and casts what comes in and goes out",
    "precise_evaluation": "in mixed precision a model computes in full precision while it is in evaluation mode",
    "unit_strategies": "every second unit frees its parameters after forward if the others do not, and keeps them if they do",
    "last_dimension": "parameters are cut along their last dimension, if the ranks divide it",
    "named_axes": "parameters are DTensors on a mesh of which the axes of data parallelism are named",
    "flattened_axes": "as with `named_axes`, and two axes together shard the parameters",
    "grouped_units": "modules side by side are sharded two by two, each pair as one unit",
    "default_device": "the implementation chooses the device",
    "default_groups": "the implementation chooses the groups of hybrid sharding",
    "mesh_for_group": "ranks are given as a mesh in place of a group, or in hybrid sharding as two groups in place of a mesh",
    "ignored_by_parameter": "parameters of ignored modules are named one by one",
    "ignored_by_units": "units are told what to ignore, and what is around them is not told again",
    "own_state": "state is saved and loaded by the implementation's own methods, with their defaults",
    "offloaded_state": "gathered parameters and saved state are moved to the CPU",
    "full_gradients": "gathered parameters show their gathered gradients, which are written back too",
    "saved_on_rank_0": "rank 0 alone saves whole state, and all ranks load the optimizer's from there",
    "rank_0_state": "whole state is loaded from rank 0, the only one that has it",
    "assigned_state": "tensors of a state in shards take the place of parameters, instead of being copied into them",
}
"""Options of some implementations, off by default, that change no number (except `divide_factor`); each is a capability."""

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
        checkpoint_reentrant: The recomputation runs a backward inside the backward, as torch's older way does.
        checkpoint_outside: Around the wrapped module, instead of inside it.
        forward_prefetch: Asks for units to be gathered ahead in forward.
        backward_prefetch: `pre`, `post` or `none`: when the next unit of a backward is gathered.
        sync_module_states: Ranks begin with different values, and wrapping gives all of them those of rank 0.
        meta_init: Modules are on the meta device, and wrapping has them initialised.
        settings: Names of options that change no number (`SETTINGS`).
        layouts: `(FQN of a module, one of LAYOUTS)`: how tensor parallelism cuts modules before they are wrapped.
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


@dataclass(frozen=True, slots=True)
class WorldSpec:
    """Which ranks run it.

    Attributes:
        size: Number of ranks.
        backend: Backend of their groups.
        mesh: Shape of the device mesh: (size,) or (replicas, shards); of the ranks with different inputs.
        tensor_parallel: How many of them share one model, which the plan's `layouts` cut; the model is wrapped over the
            other axis, and ranks r and s have the same inputs if r // tensor_parallel == s // tensor_parallel.
    """

    size: int
    backend: str = "gloo"
    mesh: tuple[int, ...] = ()
    tensor_parallel: int = field(default=1, metadata=ADDED_LATER)

    @property
    def replicas(self) -> int:
        """Number of different rank inputs."""
        return self.size // self.tensor_parallel

    @property
    def mesh_shape(self) -> tuple[int, ...]:
        """The mesh shape, one-dimensional unless one is given."""
        return self.mesh or (self.size,)

    def of_one_model(self, rank: int) -> tuple[int, ...]:
        """The ranks that share one model with `rank`; none without tensor parallelism."""
        first = rank // self.tensor_parallel * self.tensor_parallel
        return tuple(range(first, first + self.tensor_parallel)) if self.tensor_parallel > 1 else ()


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
