"""The reference by its two APIs, over one code path: `fsdp_ref-wrapper` and `fsdp_ref-composable` claim whatever it does."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn

import fsdp_ref
import fsdp_ref.wrap
from fsdp_ref import StateDictType, comm_hooks
from fsdp_ref.annotations import units_under
from fsdp_ref.build.targets import choose_by_function
from fsdp_ref.comm.tensor_parallel import TensorParallel
from fsdp_ref.handle.flat_handle import FlatHandle
from fsdp_ref.handle.originals import Shown
from fsdp_ref.runtime.events import UnitEvent, UnitEventKind, observe
from fsdp_ref.sharded_grad_scaler import ShardedGradScaler
from fsdp_testing.adapters.adapter import TorchStyle
from fsdp_testing.adapters.protocol import Division, Setup, WrapPolicy
from fsdp_testing.adapters.ref import by_methods
from fsdp_testing.adapters.ref.by_methods import SETTINGS_OF
from fsdp_testing.adapters.shared import flat_pieces, naming, pieces
from fsdp_testing.adapters.shared.flat_pieces import FlatOriginal, FlatUnit
from fsdp_testing.adapters.shared.fsdp_options import Apply, FsdpNames
from fsdp_testing.cases.records import CAPABILITIES
from fsdp_testing.cases.records.specs import SETTINGS
from fsdp_testing.errors import InvalidImplementation


def handles(model: nn.Module) -> Iterator[tuple[str, FlatHandle]]:
    """Yield (original FQN of the unit, handle) of every unit that owns parameters, depth first."""
    seen: set[int] = set()
    for name, _, unit in units_under(model):
        if not unit.handle.empty and id(unit.handle) not in seen:
            seen.add(id(unit.handle))
            yield naming.original(name), unit.handle


def originals(prefix: str, handle: FlatHandle) -> Iterator[FlatOriginal]:
    """Yield every original of a flat parameter with its offsets in the flat parameter and in this rank's shard."""
    mine = {piece.param_index: piece for piece in handle.shard_map.param_spans(handle.shard_rank)}
    for index, spec in enumerate(handle.layout.params):
        piece, cut = mine.get(index), handle.originals.extensions[index]
        yield FlatOriginal(
            fqn=f"{prefix}.{spec.fqn}" if prefix else spec.fqn,
            shape=tuple(spec.shape),
            stride=tuple(spec.stride),
            contiguous=spec.contiguous,
            parameter=handle.originals.params[index] if handle.originals.use_orig_params else None,
            unsharded_start=handle.layout.span(index).start,
            shard_start=None if piece is None else piece.offset_in_shard,
            first=0 if piece is None else piece.span_in_param.start,
            count=0 if piece is None else piece.span_in_param.numel,
            part=_part(cut) if isinstance(cut, TensorParallel) else None,
        )


def _part(cut: TensorParallel) -> tuple[tuple[int, ...], pieces.Box]:
    shape = tuple(cut.shape)
    return shape, pieces.local_box(shape, cut.axis.mesh, cut.placements)


def flat_units(model: nn.Module) -> Iterator[FlatUnit]:
    """Yield every flat parameter as it is on this rank now."""
    for prefix, handle in handles(model):
        found = tuple(originals(prefix, handle))
        # Whether the user has cleared every gradient since: the handle checks this at its next use, not at once.
        params = handle.originals.params if handle.originals.use_orig_params else [handle.flat_param]
        unsharded = handle.grads.local_F is not None and any(param.grad is not None for param in params)
        sharded = handle.originals.shown is Shown.SHARDED
        yield FlatUnit(
            parameter=handle.flat_param,
            originals=found,
            shard_S=handle.shard_S.detach(),
            unsharded_grad=unsharded,
            reduced_S=handle.grads.reduced_S if unsharded else None,
            # New storage of a parameter (a cast makes one) becomes the shard's only at its next use.
            values={
                one.fqn: flat_pieces.in_storage_order(one.parameter)
                for one in found
                if sharded and one.parameter is not None and one.parameter.numel() == one.count
            },
        )


_SETTINGS_OF_BOTH = frozenset(
    {"default_device", "default_groups", "mesh_for_group", "ignored_by_parameter", "own_state", "offloaded_state"}
    | {"saved_on_rank_0", "compressing_hook", "unit_precisions", "unit_strategies", "uncast_inputs"}
    | {"low_gradients", "full_gradients", "precise_norms", "precise_evaluation", "ignored_by_units"}
)

_SETTINGS_OF_METHODS = frozenset({"divide_factor", "full_outputs", "kept_after_backward", "single_units"})

#: Capabilities of `fully_shard` alone, and of the methods that it gives to modules.
_BY_METHODS = _SETTINGS_OF_METHODS | {"explicit_unshard", "policy_beside_units"}

_NOT_CLAIMED = frozenset(
    {
        # One gather and one reduction per unit, as behind every FSDP of this kind.
        "unused_parameters_differ",
        # A rank steps the elements that it holds, and such optimizers are refused.
        "whole_parameter_steps",
        # FSDP's API has no option for this.
        "error_if_nonfinite",
        "mixed_dtype_units",
        # Flat parameters may train, and whole numbers cannot; users make buffers of them.
        "integer_parameters",
        # A unit that has run alone is a root, and cannot become part of a larger tree.
        "inner_forward",
        "unit_alone",
        # A unit keeps the parameters that it flattened.
        "modules_replaced",
        # A unit notices the beginning of backward by the gradients of its outputs.
        "hidden_recomputation",
        *set(SETTINGS) - _SETTINGS_OF_BOTH - _SETTINGS_OF_METHODS,
    }
)

_NOT_BESIDE_TENSOR_PARALLEL = frozenset(
    {
        "meta_init",  # refused
        "early_hooks",  # lost in `parallelize_module`, before the reference sees a parameter
        "summon_writeback",  # shows DTensors, which this adapter's `full_parameters` does not put together
    }
)

_FSDP = FsdpNames(fsdp_ref, fsdp_ref.wrap)
_HOOKS = {torch.bfloat16: comm_hooks.bf16_compress_hook, torch.float16: comm_hooks.fp16_compress_hook}


@dataclass(frozen=True, slots=True)
class _ByFunction:
    """A callable policy as the object that the composable API expects."""

    function: Callable[..., bool]

    def _run_policy(
        self, root_module: nn.Module, ignored_modules: set[nn.Module], root_kwargs: dict[str, Any]
    ) -> dict[nn.Module, dict[str, Any]]:
        ignored = frozenset(p for module in ignored_modules for p in module.parameters())
        return {
            module: dict(root_kwargs)
            for module in choose_by_function(root_module, self.function, frozenset(ignored_modules), ignored)
        }


def _shared_across_units(module: nn.Module, setup: Setup) -> bool:
    """Whether several units reach a parameter, or a unit and a module outside it: one call must own such a parameter."""
    owners: dict[int, set[str]] = {}
    for fqn, parameter in module.named_parameters(remove_duplicate=False):
        inside = [name for name in setup.units if fqn.startswith(name + ".")]
        owners.setdefault(id(parameter), set()).add(max(inside, key=len, default=""))
    return any(len(names) > 1 for names in owners.values())


def _wrap(apply: Apply, module: nn.Module, setup: Setup) -> nn.Module:
    own = _SETTINGS_OF_METHODS if apply is _as_composable else ()
    setup.refuse_settings("fsdp_ref", *_SETTINGS_OF_BOTH, *own)
    shared = "ignored_by_units" not in setup.settings and _shared_across_units(module, setup)
    if setup.units and setup.policy is None and shared:
        setup = replace(setup, units=(), policy=WrapPolicy(names=setup.units))
    stored = next((parameter.dtype for parameter in module.parameters()), torch.float32)
    model = _FSDP.wrap(module, setup, apply)
    for name, method in setup.forward_methods:
        fsdp_ref.register_fsdp_forward_method(module.get_submodule(name), method)
    SETTINGS_OF[model] = setup.settings
    if apply is _as_composable:
        by_methods.set_prefetch(model, setup)
    if setup.compressed_to is not None and setup.group is not None:
        state = comm_hooks.LowPrecisionState(setup.group, stored)
        fsdp_ref.register_comm_hook(model, state, _HOOKS[setup.compressed_to])
    return model


def _left_out(setup: Setup, options: dict[str, Any]) -> dict[str, Any]:
    """Return the options without those that the case leaves to their defaults."""
    defaults = {"default_device": "device_id", "default_groups": "device_mesh"}
    left_out = {option for setting, option in defaults.items() if setting in setup.settings}
    return {name: value for name, value in options.items() if name not in left_out}


def _as_wrapper(
    use_orig_params: bool, module: nn.Module, setup: Setup, name: str, options: dict[str, Any]
) -> nn.Module:
    options = _left_out(setup, options) | _FSDP.strategy(setup, name, "sharding_strategy")
    return fsdp_ref.FullyShardedDataParallel(module, use_orig_params=use_orig_params, **options)


def _as_composable(module: nn.Module, setup: Setup, name: str, options: dict[str, Any]) -> Any:
    for by_method in ("forward_prefetch", "backward_prefetch"):
        options.pop(by_method, None)
    policy = options.pop("auto_wrap_policy", None)
    if policy is not None and not hasattr(policy, "_run_policy"):
        policy = _ByFunction(policy)
    if "ignored_states" in options:
        options["ignored_params"] = options.pop("ignored_states")
    precision = options.get("mixed_precision")
    if precision is not None and name:
        # The API treats each module that it is applied to as a root; the harness only the outermost one.
        options["mixed_precision"] = replace(precision, cast_root_forward_inputs=False)
    elif setup.precision.output_dtype is not None:
        if setup.precision.buffer_dtype is not None:
            raise InvalidImplementation(
                "fsdp_ref: expected one of buffer_dtype and full_outputs, got both. No policy has both."
            )
        del options["mixed_precision"]  # which casts no outputs
        dtypes = (setup.precision.param_dtype, setup.precision.reduce_dtype, setup.precision.output_dtype)
        options["mp_policy"] = fsdp_ref.MixedPrecisionPolicy(*dtypes)
    options = _left_out(setup, options) | _FSDP.strategy(setup, name, "strategy")
    unit: Any = fsdp_ref.fully_shard(module, **options, **({} if policy is None else {"policy": policy}))
    if "divide_factor" in setup.settings:
        unit.set_gradient_divide_factor(2.0 * setup.world_size)
    return unit


@contextmanager
def full_parameters(model: nn.Module, *, writeback: bool) -> Iterator[Mapping[str, torch.Tensor]]:
    """`summon_full_params` (the same for both paths). Collectives: an all-gather per unit; every rank enters."""
    settings = SETTINGS_OF.get(model, frozenset())
    options = {"offload_to_cpu": "offloaded_state" in settings, "with_grads": "full_gradients" in settings}
    with fsdp_ref.unshard_params(model, writeback=writeback, **options):
        yield {naming.original(fqn): p if options["with_grads"] else p.data for fqn, p in model.named_parameters()}


def _configured(model: nn.Module) -> AbstractContextManager[None]:
    """Set which ranks get the full state, and on which device, if the case asks for it."""
    settings = SETTINGS_OF.get(model, frozenset())
    if not settings & {"offloaded_state", "saved_on_rank_0"}:
        return nullcontext()
    alone = "saved_on_rank_0" in settings
    config = fsdp_ref.FullStateDictConfig(rank0_only=alone, offload_to_cpu="offloaded_state" in settings)
    optimizers = fsdp_ref.FullOptimStateDictConfig(rank0_only=alone)
    return fsdp_ref.state_dict_type(model, StateDictType.FULL_STATE_DICT, config, optimizers)


def full_state_dict(model: nn.Module) -> Mapping[str, torch.Tensor]:
    """Return the model's own `state_dict`. Collectives: an all-gather per unit; every rank calls."""
    with _configured(model):
        return model.state_dict()


def load_full_state_dict(model: nn.Module, state: Mapping[str, torch.Tensor]) -> None:
    """Call the model's own `load_state_dict`. Collectives: an all-gather per unit; every rank calls."""
    model.load_state_dict(state)


def state_in(form: StateDictType, model: nn.Module) -> Mapping[str, Any]:
    """Return the model's state in another form. Collectives: none for local state, else an all-gather per unit."""
    with fsdp_ref.state_dict_type(model, form):
        return dict(model.state_dict())


def load_in(form: StateDictType, model: nn.Module, state: Mapping[str, Any]) -> None:
    """Load what `state_in` gave. Collectives: none for local state, else gathers per unit and parameter."""
    before = fsdp_ref.set_state_dict_type(model, form)
    model.load_state_dict(dict(state))
    fsdp_ref.set_state_dict_type(
        model, before.state_dict_type, before.state_dict_config, before.optim_state_dict_config
    )


def full_optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> Mapping[str, Any]:
    """Return `optim_state_dict` (the same for both paths). Collectives: gathers; every rank calls."""
    with _configured(model):
        return fsdp_ref.optim_state_dict(model, optimizer)


def sharded_optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> Mapping[str, Any]:
    """Return `optim_state_dict` as DTensors. Collectives: gathers; every rank calls."""
    with fsdp_ref.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
        return fsdp_ref.optim_state_dict(model, optimizer)


def load_full_optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
    """Every rank takes its part of the complete state."""
    with _configured(model):
        fsdp_ref.optim_state_dict_to_load(model, optimizer, dict(state), load_directly=True)


def load_sharded_optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
    """Load what `sharded_optimizer_state` gave. Collectives: gathers."""
    with fsdp_ref.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
        optimizer.load_state_dict(fsdp_ref.optim_state_dict_to_load(model, optimizer, dict(state)))


def division(setup: Setup) -> Division:
    """Return two factors near the square root of the number of ranks: one divides before the sum, one after it."""
    return Division.split(setup.world_size)


def units(model: nn.Module) -> list[tuple[str, tuple[str, ...]]]:
    """Units with parameters in the order of the reference's own list, depth first."""
    return [(name, tuple(original.fqn for original in originals(name, handle))) for name, handle in handles(model)]


def trace_units(model: nn.Module, emit: Callable[[str, str, tuple[str, ...]], None]) -> AbstractContextManager[None]:
    """Subscribe to the reference's own unit events."""
    # A root names its units at its first use; a gather by hand before that would be reported without a name.
    for name, _, unit in units_under(model):
        if unit.root is None:
            unit.name = unit.handle.name = naming.original(name)
    gathering = {name: handle.needs_buffer for name, handle in handles(model)}

    def report(event: UnitEvent) -> None:
        if not event.fqns:
            return
        transition = _TRANSITIONS.get(event.kind)
        # A unit whose shard is the whole parameter also reports unshard, but fills no memory.
        if transition is not None and (transition != "gather" or gathering.get(naming.original(event.unit), True)):
            emit(naming.original(event.unit), transition, ())
        if event.kind is UnitEventKind.RESHARD and event.freed:
            emit(naming.original(event.unit), "free", ())

    return observe(report)


def gathered_bytes(model: nn.Module) -> dict[str, int]:
    """Return the bytes of each unit's full buffers, in every dtype that it computed in."""
    known = _HANDLES.get(model)
    if known is None:
        known = _HANDLES[model] = [(name, weakref.ref(handle)) for name, handle in handles(model)]
    found: dict[str, int] = {}
    for name, reference in known:
        handle = reference()
        for buffer in handle._buffers.values() if handle is not None else ():
            size = buffer.tensor.untyped_storage().size()
            if size:
                found[name] = found.get(name, 0) + size
    return found


_HANDLES: weakref.WeakKeyDictionary[nn.Module, list[tuple[str, weakref.ref[FlatHandle]]]] = weakref.WeakKeyDictionary()
"""Cached for each model, because the search is slow. Weakly, because handles keep the model alive."""

_TRANSITIONS = {UnitEventKind.UNSHARD: "unshard", UnitEventKind.GATHER: "gather", UnitEventKind.RESHARD: "reshard"}


def grad_scaler(model: nn.Module, **options: Any) -> ShardedGradScaler:
    """Return the reference's own scaler."""
    return ShardedGradScaler(next(model.parameters()).device.type, **options)


def _implementation(name: str, apply: Apply, without: frozenset[str] = frozenset(), **methods: Any) -> TorchStyle:
    return TorchStyle(
        name=name,
        wrap=partial(_wrap, apply),
        capabilities=frozenset(CAPABILITIES) - _NOT_CLAIMED - without,
        not_beside_tensor_parallel=_NOT_BESIDE_TENSOR_PARALLEL,
        source="https://arxiv.org/abs/2304.11277",
        no_sync=methods.pop("no_sync", fsdp_ref.no_sync),
        **methods,
        clip_grad_norm=fsdp_ref.clip_grad_norm_,
        full_parameters=full_parameters,
        **flat_pieces.methods(flat_units),
        division=division,
        register_comm_hook=fsdp_ref.register_comm_hook,
        grad_scaler=grad_scaler,
        full_state_dict=full_state_dict,
        load_full_state_dict=load_full_state_dict,
        sharded_state_dict=partial(state_in, StateDictType.SHARDED_STATE_DICT),
        load_sharded_state_dict=partial(load_in, StateDictType.SHARDED_STATE_DICT),
        local_state_dict=partial(state_in, StateDictType.LOCAL_STATE_DICT),
        load_local_state_dict=partial(load_in, StateDictType.LOCAL_STATE_DICT),
        full_optimizer_state=full_optimizer_state,
        load_full_optimizer_state=load_full_optimizer_state,
        sharded_optimizer_state=sharded_optimizer_state,
        load_sharded_optimizer_state=load_sharded_optimizer_state,
        units=units,
        trace_units=trace_units,
        gathered_bytes=gathered_bytes,
    )


WRAPPER = _implementation("fsdp_ref-wrapper", partial(_as_wrapper, True), _BY_METHODS)
FLAT = _implementation(
    "fsdp_ref-flat",
    partial(_as_wrapper, False),
    # One flat parameter has one gradient and one flag, and the originals do not exist between iterations.
    without=frozenset(
        {"frozen_mixed_unit", "thawed_parameters", "unused_gradient_is_none", "data_assignment"}
        | {"gradient_edits", "in_place_edits", "full_gradients", "gradient_replacement", "parameters_replaced"}
    )
    | {"tensor_hooks", "accumulation_hooks", "early_hooks"}
    | _BY_METHODS,
)
COMPOSABLE = _implementation(
    "fsdp_ref-composable",
    _as_composable,
    no_sync=by_methods.no_sync,
    unshard=by_methods.unshard,
    unshard_async=by_methods.unshard_async,
    reshard=by_methods.reshard,
)
