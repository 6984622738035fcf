"""torch's composable fully_shard (FSDP2): every parameter a DTensor, sharded on its first dimension.

Claims follow the `fully_shard` documentation. Not claimed: `no_shard` (it has none), `buffer_dtype` (the policy has
none), summoning (it has `unshard`, which this adapter offers), scalar parameters (refused at construction),
parameters shared across units (refused), and parts that only some ranks use (the documentation expects every rank to
run the same units).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import nn
from torch.distributed import DeviceMesh
from torch.distributed.checkpoint.state_dict import StateDictOptions
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
    share_comm_ctx,
)
from torch.distributed.tensor import Shard

from fsdp_testing.adapters.adapter import TorchStyle
from fsdp_testing.adapters.protocol import Division, Piece, Precision, Setup, StateEntry
from fsdp_testing.adapters.shared import naming, pieces
from fsdp_testing.adapters.shared.checkpointing import checkpoint_modules, innermost_first, parameters_of
from fsdp_testing.adapters.shared.claims import SHARDED
from fsdp_testing.adapters.torch import named_axes, own_communication, saved_state, unit_trace
from fsdp_testing.errors import InvalidImplementation

CAPABILITIES = SHARDED | {
    "several_forwards",
    "frozen_mixed_unit",
    "gradient_edits",
    "in_place_edits",
    "thawed_parameters",
    "unused_gradient_is_none",
    "forward_edits",
    "cpu_offload",
    *("full_outputs", "unit_precisions", "uncast_inputs", "unit_strategies"),
    "explicit_unshard",
    "error_if_nonfinite",
    "accumulation_hooks",
    "backward_twice",
    "backward_after_no_sync",
    "inner_forward",
    "divide_factor",
    "sum_reduction",
    "late_all_reduce",
    "kept_after_backward",
    "partial_reshard",
    "single_units",
    "shared_streams",
    "own_all_reduce",
    "comm_hook",
    "last_dimension",
    "grouped_units",
    "integer_parameters",
    "forward_methods",
    "whole_parameter_steps",
    "rank_0_state",
    "saved_on_rank_0",
    "assigned_state",
    "tensor_parallel",
    *(
        claim
        for claim, method in {
            "exception_recovery": "reset_iter_state",
            "zeros_for_unused": "set_reduce_scatter_unused_params",
            "tuned_communication": "set_reduce_scatter_max_input_buffers",
        }.items()
        if hasattr(FSDPModule, method)
    ),
    *(named_axes.SETTINGS if named_axes.SUPPORTED else ()),
}

_NO_RESHARD = {"shard_grad_op", "hybrid_shard_zero2"}

#: The sharded parameters of each model, as they were when it was sharded. `named_parameters` of a unit that is
#: unsharded yields the gathered tensors, and reading it at any other time would not distinguish a stale shard from a fresh
#: one.
_SHARDED: WeakKeyDictionary[nn.Module, dict[str, nn.Parameter]] = WeakKeyDictionary()

_SETTINGS: WeakKeyDictionary[nn.Module, frozenset[str]] = WeakKeyDictionary()
"""What the case of each model asks for that `no_sync` has to know."""

_LOCAL: WeakSet[nn.Module] = WeakSet()
"""Models inside `no_sync`."""


def wrap(module: nn.Module, setup: Setup) -> nn.Module:
    """`fully_shard` on every unit, children first, then on the root.

    Collectives: none but those of mesh creation, which `setup.mesh` has behind it.
    """
    if setup.mesh is None or setup.strategy == "no_shard":
        raise InvalidImplementation(
            f"torch-fsdp2: expected a mesh and a sharding strategy, got {setup.mesh} and {setup.strategy!r}. "
            "Run only what it claims."
        )
    setup.refuse("torch-fsdp2", "policy", "init_module", "sync_module_states")
    setup.refuse_settings("torch-fsdp2", *CAPABILITIES)
    if setup.precision.buffer_dtype is not None:
        raise InvalidImplementation("torch-fsdp2: expected no buffer_dtype, for which it has no option. Ask for none.")
    ignored = parameters_of(module, setup.ignored)
    if named_axes.SETTINGS & setup.settings:
        setup = named_axes.distribute(module, setup, ignored)
    if "shared_streams" in setup.settings:
        parts = (name for name, part in module.named_children() if type(part).forward is not nn.Module.forward)
        setup = replace(setup, units=tuple(dict.fromkeys((*setup.units, *parts))))
    checkpoint_modules(module, setup.checkpointed, reentrant=setup.checkpoint_reentrant)
    for group in _groups(setup, innermost_first(module, setup.units)):
        modules = [unit for _, unit in group]
        fully_shard(modules if len(group) > 1 else modules[0], **_options(setup, group[0][0], ignored))
    if "shared_streams" not in setup.settings:
        fully_shard(module, **_options(setup, "", ignored))
    _SHARDED[module] = dict(naming.named_parameters(module))
    _SETTINGS[module] = setup.settings
    _set(module, setup)
    return module


def _groups(setup: Setup, units: Sequence[tuple[str, nn.Module]]) -> Iterator[list[tuple[str, nn.Module]]]:
    """Yield the modules that one call shards: each by itself, or siblings in pairs if the case asks for it."""
    group: list[tuple[str, nn.Module]] = []
    for name, unit in units:
        is_second = len(group) == 1 and name.rpartition(".")[0] == group[0][0].rpartition(".")[0]
        if group and not (is_second and "grouped_units" in setup.settings):
            yield group
            group = []
        group.append((name, unit))
    if group:
        yield group


def _set(model: nn.Module, setup: Setup) -> None:
    """Call the setters that the case asks for."""
    units = [unit for _, unit in _units(model)]
    for place, unit in enumerate(units):
        if setup.forward_prefetch:
            unit.set_modules_to_forward_prefetch(units[place + 1 : place + 3])
        if setup.backward_prefetch == "none":
            unit.set_modules_to_backward_prefetch([])
        if setup.backward_prefetch == "post":
            unit.set_modules_to_backward_prefetch(units[max(place - 2, 0) : place][::-1])
        if "divide_factor" in setup.settings:
            unit.set_gradient_divide_factor(2.0 * setup.world_size)
        if "sum_reduction" in setup.settings:
            unit.set_force_sum_reduction_for_comms(True)
        if "zeros_for_unused" in setup.settings:
            unit.set_reduce_scatter_unused_params(True, recurse=False)
        if "own_all_reduce" in setup.settings and isinstance(setup.mesh, DeviceMesh):
            unit.set_all_reduce_hook(partial(own_communication.over_replicas, setup.mesh))
        if "tuned_communication" in setup.settings:
            unit.set_allocate_memory_from_process_group_for_comm(True)
        if "single_units" in setup.settings and isinstance(unit, nn.Embedding):
            unit.set_unshard_in_backward(False)
    _set_roots(model, setup)
    for name, method in setup.forward_methods:
        register_fsdp_forward_method(model.get_submodule(name), method)


def _set_roots(model: nn.Module, setup: Setup) -> None:
    """Call the setters of roots, and those of units one by one."""
    if "single_units" in setup.settings:
        _reshard_every_second(model, True)
    if "tuned_communication" in setup.settings:
        for root in _roots(model):
            root.set_separate_reduce_scatter_group()
            root.set_reduce_scatter_max_input_buffers(2)
    if "shared_streams" in setup.settings:
        share_comm_ctx(_roots(model))


def _reshard_every_second(model: nn.Module, first: bool) -> None:
    for place, (_, unit) in enumerate(_units(model)):
        unit.set_reshard_after_forward(first == (place % 2 == 0), recurse=False)


def _options(setup: Setup, name: str, ignored: set[nn.Parameter]) -> dict[str, Any]:
    """Return the arguments that the case asks for; what it leaves open is left to the defaults."""
    # The default mesh is made anew by each call, on the machine's accelerator.
    options: dict[str, Any] = {"mesh": setup.mesh}
    if named_axes.SETTINGS & setup.settings and setup.mesh is not None:
        options |= named_axes.options(setup.mesh)
    if "own_all_reduce" in setup.settings and isinstance(setup.mesh, DeviceMesh):
        options["mesh"] = setup.mesh["shard"]
    precision = setup.unit_precisions.get(name, setup.precision)
    if precision != Precision():
        # Each module that it is applied to casts by default; to the harness the outermost one does.
        options["mp_policy"] = _precision_policy(precision, inner=bool(name) and "shared_streams" not in setup.settings)
    if setup.cpu_offload:
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=False)
    if setup.unit_strategies.get(name, setup.strategy) in _NO_RESHARD:
        options["reshard_after_forward"] = False
    elif "shared_streams" in setup.settings:
        options["reshard_after_forward"] = True  # a root keeps its parameters by default
    sharing = setup.shard_size or setup.world_size
    if "partial_reshard" in setup.settings:
        half = max(sharing // 2, 1)
        options["reshard_after_forward"] = (half, True, half, False)[([*setup.units, ""].index(name)) % 4]
    if "last_dimension" in setup.settings:
        options["shard_placement_fn"] = partial(_last_dimension, sharing)
    return options | ({"ignored_params": ignored} if ignored else {})


def _last_dimension(ranks: int, parameter: nn.Parameter) -> Shard | None:
    """Cut along the last dimension, which torch allows where the ranks divide it."""
    return Shard(-1) if parameter.ndim > 1 and parameter.shape[-1] % ranks == 0 else None


def _precision_policy(precision: Precision, *, inner: bool) -> MixedPrecisionPolicy:
    """Return the policy with the dtypes that the case names, so that the meaning of those it leaves open is judged."""
    asked = {"param_dtype": precision.param_dtype, "reduce_dtype": precision.reduce_dtype}
    chosen: dict[str, Any] = {option: dtype for option, dtype in asked.items() if dtype is not None}
    casts = precision.cast_unit_inputs if inner else precision.cast_root_inputs
    chosen |= {} if casts else {"cast_forward_inputs": False}
    chosen |= {} if inner or precision.output_dtype is None else {"output_dtype": precision.output_dtype}
    return MixedPrecisionPolicy(**chosen)


def _units(model: nn.Module) -> list[tuple[str, FSDPModule]]:
    """`(original FQN, unit)` of every unit, outermost first."""
    return [(naming.original(name), unit) for name, unit in model.named_modules() if isinstance(unit, FSDPModule)]


@contextmanager
def no_sync(model: nn.Module) -> Iterator[None]:
    """Gradient reduction off in every unit, and on again after the outermost; with settings, in the way that they name."""
    if model in _LOCAL:
        yield
        return
    settings = _SETTINGS.get(model, frozenset())
    alone = "single_units" in settings

    def switch(flag: bool) -> None:
        if alone:
            _reshard_every_second(model, flag)
        for root in _roots(model):
            if "late_all_reduce" in settings:
                root.set_requires_all_reduce(flag, recurse=not alone)
            else:
                root.set_requires_gradient_sync(flag, recurse=not alone)
            if "kept_after_backward" in settings:
                root.set_reshard_after_backward(flag, recurse=not alone)
                root.set_is_last_backward(flag)

    switch(False)
    _LOCAL.add(model)
    try:
        yield
    finally:
        _LOCAL.discard(model)
        switch(True)


def _roots(model: nn.Module) -> list[FSDPModule]:
    found: list[tuple[str, FSDPModule]] = []
    for name, unit in _units(model):
        if not any(outer == "" or name.startswith(outer + ".") for outer, _ in found):
            found.append((name, unit))
    return [unit for _, unit in found]


def local_pieces(model: nn.Module) -> Mapping[str, tuple[Piece, ...]]:
    """Return the shards themselves, whether a gathered copy is on the module or not."""
    return pieces.of_parameters(_sharded(model).items())


def optimizer_pieces(model: nn.Module, optimizer: torch.optim.Optimizer) -> Mapping[str, Mapping[str, StateEntry]]:
    """State of the shards."""
    return pieces.optimizer_state(_sharded(model), optimizer)


def _sharded(model: nn.Module) -> dict[str, nn.Parameter]:
    return _SHARDED.get(model) or dict(naming.named_parameters(model))


def full_state_dict(model: nn.Module) -> Mapping[str, torch.Tensor]:
    """Return the whole state, on rank 0 alone where the case asks for that. Collectives: gathers."""
    return saved_state.full_state_dict(model, _saving(model))


def full_optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> Mapping[str, Any]:
    """The same for the optimizer's state."""
    return saved_state.full_optimizer_state(model, optimizer, _saving(model))


def _saving(model: nn.Module) -> StateDictOptions:
    return saved_state.ON_RANK_0 if "saved_on_rank_0" in _SETTINGS.get(model, ()) else saved_state.FULL


def load_full_state_dict(model: nn.Module, state: Mapping[str, torch.Tensor]) -> None:
    """Load a whole state: what all ranks have, or rank 0 alone, which broadcasts it where the case asks for that."""
    from_rank_0 = "rank_0_state" in _SETTINGS.get(model, ())
    saved_state.load_full_state_dict(model, state, saved_state.FROM_RANK_0 if from_rank_0 else saved_state.FULL)


def load_full_optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
    """The same for the optimizer's state."""
    from_rank_0 = {"rank_0_state", "saved_on_rank_0"} & set(_SETTINGS.get(model, ()))
    options = saved_state.FROM_RANK_0 if from_rank_0 else saved_state.FULL
    saved_state.load_full_optimizer_state(model, optimizer, state, options)


def load_sharded_state_dict(model: nn.Module, state: Mapping[str, Any]) -> None:
    """Load what `sharded_state_dict` gave; where the case asks for that, its tensors become the parameters."""
    if "assigned_state" in _SETTINGS.get(model, ()):
        model.load_state_dict(dict(state), assign=True)
        _SHARDED[model] = dict(naming.named_parameters(model))
    else:
        saved_state.load_sharded_state_dict(model, state)


def recover(model: nn.Module) -> None:
    """What `fully_shard` asks for after an exception."""
    for root in _roots(model):
        root.reset_iter_state()


def division(setup: Setup) -> Division:
    """One AVG reduction in float32 and bfloat16; in other dtypes the factor is split in two around the sum."""
    wire = setup.precision.on_the_wire
    if wire in (torch.float32, torch.bfloat16):
        return Division(before=1, after=setup.world_size, mean_by_backend=True)
    return Division.split(setup.world_size)


def unshard(model: nn.Module, unit: str) -> None:
    """Gather one unit now. Collectives: an all-gather on its mesh; every rank calls."""
    dict(_units(model))[unit].unshard()


def unshard_async(model: nn.Module, unit: str) -> Callable[[], None] | None:
    """Begin to gather one unit. Collectives: as `unshard`."""
    handle = dict(_units(model))[unit].unshard(async_op=True)
    return None if handle is None else handle.wait


def reshard(model: nn.Module, unit: str) -> None:
    """Free one unit's gathered parameters."""
    dict(_units(model))[unit].reshard()


def register_comm_hook(model: nn.Module, state: object, hook: Callable[..., Any]) -> None:
    """Let the hook reduce gradients that were not divided."""
    for _, unit in _units(model):
        gather: Any = own_communication.Gather()
        reduce: Any = own_communication.Reduce(gather, partial(hook, state))
        unit.set_custom_all_gather(gather)
        unit.set_custom_reduce_scatter(reduce)
        unit.set_gradient_divide_factor(1.0)


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Step; where the case asks for it, the next gathers wait for an event of the user's."""
    optimizer.step()
    if "tuned_communication" in _SETTINGS.get(model, ()):
        device = next(iter(_sharded(model).values())).device
        for root in _roots(model):
            root.set_post_optim_event(torch.get_device_module(device).current_stream().record_event())


IMPLEMENTATION = TorchStyle(
    name="torch-fsdp2",
    wrap=wrap,
    capabilities=CAPABILITIES,
    not_beside_tensor_parallel=frozenset({"comm_hook"}),  # a hook is given the group of all ranks
    source="https://pytorch.org/docs/stable/distributed.fsdp.fully_shard.html",
    no_sync=no_sync,
    local_pieces=local_pieces,
    optimizer_pieces=optimizer_pieces,
    division=division,
    units=unit_trace.fsdp2_units,
    trace_units=unit_trace.fsdp2_trace,
    gathered_bytes=unit_trace.fsdp2_gathered_bytes,
    unshard=unshard,
    unshard_async=unshard_async,
    reshard=reshard,
    recover=recover,
    register_comm_hook=register_comm_hook,
    step=step,
    **{
        **saved_state.METHODS,
        "load_full_state_dict": load_full_state_dict,
        "full_state_dict": full_state_dict,
        "full_optimizer_state": full_optimizer_state,
        "load_full_optimizer_state": load_full_optimizer_state,
        "load_sharded_state_dict": load_sharded_state_dict,
    },
)
