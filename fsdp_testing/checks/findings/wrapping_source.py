"""How is a case wrapped with each implementation of torch, in source that uses torch alone?"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType

from fsdp_testing.adapters.shared.fsdp_options import STRATEGIES
from fsdp_testing.cases.records import Case
from fsdp_testing.checks.findings.model_source import shared_again
from fsdp_testing.checks.findings.script_parts import ddp, fsdp1, fsdp2

_DDP = "return DistributedDataParallel(model, broadcast_buffers=False, find_unused_parameters=True)"
_MESH = "from torch.distributed.device_mesh import init_device_mesh"


@dataclass(frozen=True, slots=True)
class Family:
    """How scripts use one implementation.

    Attributes:
        part: Module that clips, gathers, ...; its text goes into the script.
        wrap: Gives import lines, and the lines of a function that wraps `model`.
        edits: Full parameters can be edited.
        measures: The part knows how many bytes stay unsharded.
    """

    part: ModuleType
    wrap: Callable[[Case], tuple[list[str], list[str]]]
    edits: bool
    measures: bool


def _innermost_first(case: Case) -> list[str]:
    return sorted(case.wrapping.units, key=lambda name: -name.count("."))


def _fsdp2(case: Case) -> tuple[list[str], list[str]]:
    options, names = ["mesh=mesh"], ["fully_shard"]
    shape = case.world.mesh_shape
    axes = ', mesh_dim_names=("replicate", "shard")' if len(shape) == 2 else ""
    cut: list[str] = []
    if case.world.tensor_parallel > 1:
        shape, axes = (case.world.replicas, case.world.tensor_parallel), ', mesh_dim_names=("data", "tensor")'
        cut = [f'cut_module(model.{fqn}, mesh["tensor"], {layout!r})' for fqn, layout in case.wrapping.layouts]
        cut += shared_again(case.model.tree)
        options = ['mesh=mesh["data"]']
    if case.strategy in ("shard_grad_op", "hybrid_shard_zero2"):
        options.append("reshard_after_forward=False")
    if case.mixed_precision is not None:
        spec = case.mixed_precision
        # Until torch 2.14 an unset `reduce_dtype` means `param_dtype`, from 2.15 on the parameter's own dtype.
        given = {"param_dtype": spec.param_dtype, "reduce_dtype": spec.reduce_dtype or spec.param_dtype}
        dtypes = [f"{key}=torch.{value}" for key, value in given.items() if value]
        options.append(f"mp_policy=MixedPrecisionPolicy({', '.join(dtypes)})")
        names.append("MixedPrecisionPolicy")
    if case.cpu_offload:
        options.append("offload_policy=CPUOffloadPolicy(pin_memory=False)")
        names.append("CPUOffloadPolicy")
    lines = [f"mesh = init_device_mesh('cpu', {shape!r}{axes})", *cut]
    lines += [f"fully_shard(model.{name}, {', '.join(options)})" for name in _innermost_first(case)]
    lines += [f"fully_shard(model, {', '.join(options)})", "return model"]
    return [_MESH, f"from torch.distributed.fsdp import {', '.join(sorted(names))}"], lines


def _fsdp1(case: Case) -> tuple[list[str], list[str]]:
    options = [
        f"sharding_strategy=ShardingStrategy.{STRATEGIES[case.strategy]}",
        'device_id=torch.device("cpu")',
        "use_orig_params=True",
    ]
    names = ["ShardingStrategy"]
    imports: list[str] = []
    lines: list[str] = []
    if case.strategy.startswith("hybrid"):
        imports.append(_MESH)
        lines.append(
            f"mesh = init_device_mesh('cpu', {case.world.mesh_shape!r}, mesh_dim_names=('replicate', 'shard'))"
        )
        options.append("device_mesh=mesh")
    if case.mixed_precision is not None:
        keys = ("param_dtype", "reduce_dtype", "buffer_dtype")
        given = {key: getattr(case.mixed_precision, key) for key in keys}
        dtypes = [f"{key}=torch.{value}" for key, value in given.items() if value]
        options.append(f"mixed_precision=MixedPrecision({', '.join(dtypes)})")
        names.append("MixedPrecision")
    lines += [f"model.{name} = FSDP(model.{name}, {', '.join(options)})" for name in _innermost_first(case)]
    lines.append(f"return FSDP(model, {', '.join(options)})")
    return [*imports, f"from torch.distributed.fsdp import {', '.join(sorted(names))}"], lines


FAMILIES = {
    "torch-ddp": Family(ddp, lambda _: ([], [_DDP]), edits=True, measures=False),
    "torch-fsdp1": Family(fsdp1, _fsdp1, edits=True, measures=True),
    "torch-fsdp2": Family(fsdp2, _fsdp2, edits=False, measures=True),
}
