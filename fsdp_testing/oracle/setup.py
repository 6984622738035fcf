"""Translates a case into the implementations' own vocabulary, and makes the module that a rank wraps.

The module holds the case's values, unless wrapping must bring them. If wrapping broadcasts rank 0's values, the other ranks
begin with different ones; if wrapping initialises modules, their tensors are on the meta device until then. Wrapping does not
touch ignored modules: they hold the case's values from the beginning.

An engine that owns its step may clear gradients there, and may train in no dtype wider than float32. Then both the engine and
the oracle get the case with gradients cleared after each step and in that dtype. Fitting a fitted case changes nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import nn
from torch.distributed import DeviceMesh, ProcessGroup

from fsdp_testing.adapters.adapter import Adapter
from fsdp_testing.adapters.protocol import Division, Precision, Setup, WrapPolicy
from fsdp_testing.cases.drawing.normal_form import leaves_unused
from fsdp_testing.cases.models.model import forward_methods
from fsdp_testing.cases.records import (
    AXES,
    Case,
    MixedPrecisionSpec,
    Operation,
    PolicySpec,
    WorldSpec,
    WrappingPlan,
    ZeroGrad,
)
from fsdp_testing.errors import InvalidImplementation, InvalidRecord
from fsdp_testing.oracle.kept_groups import data_group, mesh_in
from fsdp_testing.oracle.models import build_model, dtype_of
from fsdp_testing.oracle.quantities import Comparison
from fsdp_testing.ranks.pool.world import current_world

_KEEPING = {"full_shard": "shard_grad_op", "hybrid_shard": "hybrid_shard_zero2"}
"""The strategy that keeps parameters after forward, for one that frees them."""


def setup_of(
    case: Case, module: nn.Module, rank: int, device: torch.device, group: ProcessGroup | None, mesh: DeviceMesh | None
) -> Setup:
    """Translate `case` for one rank.

    Args:
        case: The case.
        module: The module to wrap.
        rank: In `group`.
        device: Its device.
        group: The ranks with different inputs; None for an implementation that runs without one.
        mesh: Mesh of the case's world, as `kept_groups.mesh_in` returns it.

    Collectives: none.
    """
    parts, tensor_mesh, world_mesh = case.world.tensor_parallel, None, None
    if parts > 1 and mesh is not None:
        world_mesh = mesh
        mesh, tensor_mesh = mesh["data"] if mesh.ndim == 2 else mesh["replicate", "shard"], mesh["tensor"]
    return Setup(
        rank=rank // parts,
        world_size=case.world.replicas,
        device=device,
        group=group,
        mesh=mesh,
        tensor_mesh=tensor_mesh,
        world_mesh=world_mesh,
        policy=policy_of(case.wrapping.policy, module),
        precision=precision_of(case),
        unit_precisions=unit_precisions_of(case, module),
        unit_strategies=_unit_strategies_of(case),
        forward_methods=forward_methods(module),
        leaves_unused=leaves_unused(case),
        **{name: value for axis in AXES for name, value in axis.setup(case).items()},
    )


def setup_among(case: Case, module: nn.Module, ranks: Sequence[int], group: ProcessGroup) -> Setup:
    """Translate `case` for this rank in a group of some ranks of the current world. Collectives: none."""
    world = current_world()
    flat = replace(case, world=WorldSpec(len(ranks), case.world.backend))  # each holds whole modules
    mesh = DeviceMesh.from_group(group, world.device.type)
    return setup_of(flat, module, ranks.index(world.rank), world.device, group, mesh)


def setup_in_world(case: Case, module: nn.Module) -> Setup:
    """Translate `case` for this rank of the current world. Collectives: those of `kept_groups.mesh_in`; every rank calls."""
    world = current_world()
    group, mesh = data_group(world, case.world), mesh_in(world, case.world)
    return setup_of(case, module, world.rank, world.device, group, mesh)


def division_of(case: Case, adapter: Adapter) -> Division | None:
    """Return how an implementation divides in this case, asked without wrapping anything.

    It does not depend on the units.

    Raises:
        InvalidImplementation: Its factors do not give the mean: the oracle would accept a sum that the implementation declares.
    """
    unwrapped = replace(case, wrapping=WrappingPlan())
    division = adapter.division(setup_of(unwrapped, nn.Module(), 0, torch.device("cpu"), None, None))
    replicas = case.world.replicas
    if division is not None and not math.isclose(division.before * division.after, replicas):
        raise InvalidImplementation(
            f"{adapter.name}: division: expected factors before and after the sum whose product is the number of ranks that "
            f"have inputs of their own ({replicas}), got {division.before:g} and {division.after:g}. Gradients are means."
        )
    return division


def precision_of(case: Case) -> Precision:
    """Translate a case's mixed precision."""
    spec = case.mixed_precision or MixedPrecisionSpec()
    outputs = case.model.dtype if "full_outputs" in case.wrapping.settings else None
    names = (spec.param_dtype, spec.reduce_dtype, spec.buffer_dtype, outputs)
    param, reduce, buffer, output = (None if name is None else dtype_of(name) for name in names)
    settings = case.wrapping.settings
    return Precision(
        param,
        reduce,
        buffer,
        output,
        cast_root_inputs="uncast_inputs" not in settings,
        low_gradients="low_gradients" in settings,
    )


def unit_precisions_of(case: Case, module: nn.Module) -> dict[str, Precision]:
    """Return the precision of each unit of `module`, by FQN, where it is not that of the model."""
    precision, names = precision_of(case), case.wrapping.units
    if precision.param_dtype is None:
        return {}
    if "precise_norms" in case.wrapping.settings:
        norms = [name for name, part in module.named_modules() if isinstance(part, nn.BatchNorm1d)]
        return dict.fromkeys(norms, Precision(dtype_of(case.model.dtype), cast_unit_inputs=True, casts_back=True))
    if "unit_precisions" not in case.wrapping.settings:
        return {}
    low = replace(precision, reduce_dtype=precision.on_the_wire, output_dtype=None, cast_unit_inputs=True)
    full = replace(low, param_dtype=dtype_of(case.model.dtype))
    return {name: full if number % 2 else low for number, name in enumerate(names)}


def _unit_strategies_of(case: Case) -> dict[str, str]:
    other = _KEEPING | {kept: freed for freed, kept in _KEEPING.items()}
    if "unit_strategies" not in case.wrapping.settings or case.strategy not in other:
        return {}
    return dict.fromkeys(case.wrapping.units[1::2], other[case.strategy])


def policy_of(spec: PolicySpec | None, module: nn.Module) -> WrapPolicy | None:
    """Translate a case's wrapping policy; class names are those of the model's own modules.

    Raises:
        InvalidRecord: No module of the model has such a class.
    """
    if spec is None:
        return None
    if spec.kind == "size":
        return WrapPolicy(min_numel=spec.min_numel)
    if spec.kind == "always":
        return WrapPolicy(min_numel=1)
    by_name = {type(inner).__name__: type(inner) for inner in module.modules()}
    unknown = sorted(set(spec.classes) - set(by_name))
    if unknown:
        raise InvalidRecord(
            f"case.wrapping.policy.classes: expected classes of the model ({', '.join(sorted(by_name))}), "
            f"got {unknown}. Fix the case."
        )
    return WrapPolicy(classes=tuple(by_name[name] for name in spec.classes))


InitModule = Callable[[nn.Module], None]


def module_to_wrap(case: Case, rank: int, flags: Mapping[str, bool]) -> tuple[nn.Module, InitModule | None]:
    """Return the module that `rank` wraps, and a function that initialises its modules; None if all tensors exist.

    Args:
        case: Its wrapping says which values wrapping brings.
        rank: This rank.
        flags: `requires_grad` by name, if different from a new model's.
    """
    module = build_model(case)
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(flags.get(name, parameter.requires_grad))
    outside = {inner for name in case.wrapping.ignored for inner in module.get_submodule(name).modules()}
    managed = [inner for inner in module.modules() if inner not in outside]
    # Only values that wrapping brings: ignored modules must be right from the beginning.
    # Ranks that share one model begin alike.
    if case.wrapping.sync_module_states and (replica := rank // case.world.tensor_parallel):
        _change_all(managed, replica)
    return module, _emptied(managed) if case.wrapping.meta_init else None


def move_what_is_ignored(module: nn.Module, setup: Setup) -> None:
    """Put ignored modules on the device of this rank, as their user does: wrapping moves what it manages."""
    for name in setup.ignored:
        module.get_submodule(name).to(setup.device)


def _change_all(modules: list[nn.Module], rank: int) -> None:
    """Give every parameter and buffer of these modules other values, different on each rank."""
    tensors = [t for inner in modules for t in (*inner.parameters(recurse=False), *inner.buffers(recurse=False))]
    with torch.no_grad():
        for tensor in dict.fromkeys(tensors):
            tensor.copy_(~tensor if tensor.dtype == torch.bool else tensor + rank)


def _emptied(modules: list[nn.Module]) -> InitModule:
    """Put the modules' tensors on the meta device, and return a function that restores a module's tensors and their sharing."""
    empty: dict[torch.Tensor, torch.Tensor] = {}
    full: dict[nn.Module, dict[str, torch.Tensor]] = {}
    for inner in modules:
        parameters = dict(inner.named_parameters(recurse=False, remove_duplicate=False))
        buffers = dict(inner.named_buffers(recurse=False, remove_duplicate=False))
        full[inner] = parameters | buffers
        for name, tensor in parameters.items():
            if tensor not in empty:
                empty[tensor] = nn.Parameter(torch.empty_like(tensor, device="meta"), tensor.requires_grad)
            setattr(inner, name, empty[tensor])
        for name, buffer in buffers.items():
            setattr(inner, name, torch.empty_like(buffer, device="meta"))

    def init_module(module: nn.Module) -> None:
        for name, tensor in full.get(module, {}).items():
            setattr(module, name, tensor)

    return init_module


_WIDEST = "float64"
_CLEARED = ZeroGrad()


def fitted(case: Case, adapter: Adapter) -> Case:
    """Return the case as the implementation gets it."""
    if case.model.dtype == _WIDEST and adapter.widest_dtype != _WIDEST:
        case = replace(case, model=replace(case.model, dtype=adapter.widest_dtype))
    return replace(case, program=tuple(_cleared(case.program))) if adapter.step_clears_gradients else case


def _cleared(program: Sequence[Operation]) -> Iterator[Operation]:
    for index, operation in enumerate(program):
        yield operation
        if operation.steps and program[index + 1 : index + 2] != (_CLEARED,):
            yield _CLEARED


def as_observed(comparison: Comparison, adapter: Adapter) -> Comparison:
    """Return the comparison without what the adapter cannot show: gradients, where it gathers whole parameters."""
    return comparison if adapter.observes_gradients else replace(comparison, gradients=False)


def oracle_view(case: Case) -> Case:
    """Return the parts of a case on which the oracle's free replay depends; strategy, wrapping and offload do not count."""
    for axis in AXES:
        case = axis.for_oracle(case)
    return case


def lockstep_view(case: Case) -> Case:
    """Return what the oracle's lockstep depends on where it knows no units: also whether gradients are replicated.

    What was accumulated may be reduced with replicated gradients, which decides bounds (`Replay`).
    """
    replicated = case.strategy == "no_shard" or case.world.mesh_shape[-1] == 1
    return replace(oracle_view(case), strategy="no_shard" if replicated else "full_shard")
