"""The protocol of an implementation: its methods, and the setup that it is given.

An implementation is any object with `name`, `capabilities` and `wrap`; nothing is inherited. Everything else is optional
(`fsdp_testing.adapters.adapter.TorchStyle` has every method with its meaning): a claimed capability names the methods that it
needs (`METHODS_OF_CAPABILITY`), and `Adapter.of` fills in missing methods where possible. Checks and the engine only see the
completed form.

FQNs are always those of the module before it was wrapped. Spans are half-open and count elements of the parameter flattened
in row-major (logical) order, whatever its strides.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.distributed import DeviceMesh, ProcessGroup

from fsdp_testing.errors import InvalidImplementation

#: Every value of `Setup.strategy`. The two hybrid ones need `Setup.shard_size`.
STRATEGIES = ("full_shard", "shard_grad_op", "no_shard", "hybrid_shard", "hybrid_shard_zero2")

#: Claiming the capability on the left promises the methods on the right (none of them may be left to raise).
METHODS_OF_CAPABILITY: Mapping[str, tuple[str, ...]] = {
    "no_sync": ("no_sync",),
    "clip_grad_norm": ("clip_grad_norm",),
    "summon_writeback": ("full_parameters",),
    "full_state_dict": ("full_state_dict", "load_full_state_dict"),
    "sharded_state_dict": ("sharded_state_dict", "load_sharded_state_dict"),
    "local_state_dict": ("local_state_dict", "load_local_state_dict"),
    "optim_state": ("full_optimizer_state", "load_full_optimizer_state"),
    "comm_hook": ("register_comm_hook",),
    "explicit_unshard": ("unshard", "reshard"),
    "unit_trace": ("units", "trace_units"),
}


@dataclass(frozen=True, slots=True)
class Precision:
    """Dtypes of compute, gradient reduction and buffers; `None` keeps the module's dtype.

    Attributes:
        param_dtype: Dtype in which forward and backward run.
        reduce_dtype: Dtype of the gradients on the wire; `None` with a `param_dtype` means `param_dtype`.
        buffer_dtype: Dtype of floating-point buffers in forward; only with the capability `buffer_dtype`.
        output_dtype: Dtype to which the root casts floating-point outputs; only with the setting `full_outputs`.
        cast_unit_inputs: Every unit casts floating-point inputs to `param_dtype`, not the root alone.
        cast_root_inputs: The root casts floating-point inputs to `param_dtype`; False only with the setting `uncast_inputs`.
        casts_back: Floating-point outputs get the dtype that inputs came in; only with the setting `precise_norms`.
        low_gradients: Gradients stay in the dtype in which they are reduced; only with the setting of this name.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    buffer_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    cast_unit_inputs: bool = False
    cast_root_inputs: bool = True
    casts_back: bool = False
    low_gradients: bool = False

    @property
    def on_the_wire(self) -> torch.dtype | None:
        """Dtype in which gradients are reduced (pytorch PR 90660 says how it is inferred); `None`: the parameter's."""
        return self.reduce_dtype if self.reduce_dtype is not None else self.param_dtype


@dataclass(frozen=True, slots=True)
class WrapPolicy:
    """Automatic wrapping as data: exactly one of the fields is set.

    Attributes:
        classes: Every instance of one of these becomes a unit.
        min_numel: A module becomes a unit when its elements outside inner units reach this number.
        names: Every module with one of these FQNs becomes a unit; the implementation gets a predicate over modules.
    """

    classes: tuple[type[nn.Module], ...] = ()
    min_numel: int | None = None
    names: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Setup:
    """The arguments of `wrap`; equal on every rank except `rank` and `device`.

    Attributes:
        rank: This rank in `group`.
        world_size: Number of ranks in `group`: all ranks, or with tensor parallelism those with different inputs.
        device: Where parameters live and computation runs.
        group: The world's process group (the default group, without tensor parallelism), or one of some of its ranks, which
            needs the capability `sub_groups`; `None` for an implementation that runs without one.
        mesh: The ranks of `group` as a 1-D mesh, or 2-D (replicate, shard) for the hybrid strategies; `None` without a group.
        tensor_mesh: The ranks that share one model, a 1-D mesh out of the same 2-D one; `None` without tensor parallelism.
            The harness has cut the module over it before it calls `wrap`.
        world_mesh: The mesh of which `mesh` and `tensor_mesh` are axes; `None` without tensor parallelism.
        layouts: `(FQN, layout)` of each module that is cut (`fsdp_testing.cases.records.specs.LAYOUTS`).
        units: FQNs of the submodules to wrap besides the root, any order; "" (the root) is implied.
        policy: Wrap by policy instead; then `units` is empty.
        strategy: One of `STRATEGIES`.
        shard_size: Ranks per shard group, for the hybrid strategies.
        unit_strategies: Strategy of single units where it differs, by FQN.
        precision: Mixed precision of every unit.
        unit_precisions: Precision of single units where it differs, by FQN.
        cpu_offload: Keep parameters, gradients and optimizer state on the CPU.
        ignored: FQNs of modules that the implementation must leave alone.
        checkpointed: FQNs of modules whose activations are recomputed in backward.
        checkpoint_reentrant: Recompute in torch's reentrant way; used only with the capability of that name.
        checkpoint_outside: Around the wrapped units instead of inside them. The harness does this after `wrap`, whose setup
            then names no checkpointed module.
        sync_module_states: Rank 0's parameters and buffers are broadcast at construction; other ranks begin with others.
        init_module: Initialises one module without its children, like `param_init_fn`: until then, parameters and buffers of
            modules that are not ignored are on the meta device. None if they have values.
        forward_prefetch: Prefetch in forward, if the implementation has the option.
        backward_prefetch: One of "pre", "post", "none".
        forward_methods: `(FQN, method)` of methods that the model calls besides `forward`: the adapter registers them, if the
            implementation needs that.
        leaves_unused: A micro-batch may leave a parameter without a gradient on some rank.
        settings: Options that change no number (`fsdp_testing.cases.records.specs.SETTINGS`), by name.
    """

    rank: int
    world_size: int
    device: torch.device
    group: ProcessGroup | None = None
    mesh: DeviceMesh | None = None
    tensor_mesh: DeviceMesh | None = None
    world_mesh: DeviceMesh | None = None
    layouts: tuple[tuple[str, str], ...] = ()
    units: tuple[str, ...] = ()
    policy: WrapPolicy | None = None
    strategy: str = "full_shard"
    shard_size: int | None = None
    unit_strategies: Mapping[str, str] = field(default_factory=dict)
    precision: Precision = Precision()
    unit_precisions: Mapping[str, Precision] = field(default_factory=dict)
    cpu_offload: bool = False
    ignored: tuple[str, ...] = ()
    checkpointed: tuple[str, ...] = ()
    checkpoint_reentrant: bool = False
    checkpoint_outside: bool = False
    sync_module_states: bool = False
    init_module: Callable[[nn.Module], None] | None = None
    forward_prefetch: bool = False
    backward_prefetch: str = "pre"
    forward_methods: tuple[tuple[str, str], ...] = ()
    leaves_unused: bool = False
    settings: frozenset[str] = frozenset()

    @property
    def compressed_to(self) -> torch.dtype | None:
        """The dtype to which the implementation's own hook compresses gradients; `None`: it registers no hook."""
        return self.precision.reduce_dtype if "compressing_hook" in self.settings else None

    def refuse(self, implementation: str, *options: str) -> None:
        """Refuse a setup that asks for one of these options, which the implementation does not have.

        Raises:
            InvalidImplementation: An option is not at its default; all of them are named.
        """
        plain = Setup(self.rank, self.world_size, self.device)
        asked = [name for name in options if getattr(self, name) != getattr(plain, name)]
        self._raise_for(implementation, asked)

    def refuse_settings(self, implementation: str, *known: str) -> None:
        """Refuse a setup that asks for settings other than the `known` ones; raises as `refuse` does."""
        self._raise_for(implementation, sorted(self.settings - set(known)))

    @staticmethod
    def _raise_for(implementation: str, asked: list[str]) -> None:
        if asked:
            raise InvalidImplementation(
                f"{implementation}: expected a setup without {', '.join(asked)}, for which it has no option. "
                "Run only what it claims."
            )


@dataclass(frozen=True, slots=True)
class Piece:
    """This rank's part of one span of one parameter: views, never copies.

    If this rank has both value and gradient of a span, they are one piece. Otherwise (an unsharded gradient under `no_sync`
    with a sharded value) they are separate pieces, with `None` for the other.

    Attributes:
        shape: Shape of the whole parameter.
        start: First element, in the parameter flattened in row-major order.
        stop: One past the last element; equal to `start` if this rank has the parameter object but no element.
        value: Detached tensor of `stop - start` elements, of any shape and strides, which flattened in row-major order is the
            span; `None` if this piece is about the gradient alone.
        grad: The same for the gradient; `None` if there is no gradient, or this piece is about the value alone.
        reduced: Whether `grad` has been reduced over the ranks; `False` for a sum that `no_sync` accumulates on this rank.
        requires_grad: The parameter's flag on this rank.
    """

    shape: tuple[int, ...]
    start: int
    stop: int
    value: torch.Tensor | None
    grad: torch.Tensor | None = None
    reduced: bool = True
    requires_grad: bool = True


#: What one optimizer state entry of one parameter is: its pieces (in `value`), or a scalar such as Adam's step.
StateEntry = tuple[Piece, ...] | float


@dataclass(frozen=True, slots=True)
class Division:
    """How the mean over ranks is formed, for an exact replay in low precision.

    Each rank's gradient is divided by `before` in the dtype on the wire, summed over ranks, divided by `after`.
    `mean_by_backend` means that one AVG reduction does it: the sum first, then one division by the world size.
    `by_reciprocal` means that instead of dividing it multiplies by the rounded reciprocal, which differs in the last
    bit.
    """

    before: float
    after: float
    mean_by_backend: bool = False
    by_reciprocal: bool = False

    @classmethod
    def split(cls, world_size: int) -> Division:
        """About the square root of the world size before the sum and the rest after it, as FSDP1 does.

        So 16-bit values neither overflow nor underflow. The first factor doubles while it divides the world size and is smaller
        than the rest.
        """
        before = 1
        while world_size % before == 0 and world_size / before > before:
            before *= 2
        return cls(before, world_size / before)
