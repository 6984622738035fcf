"""How is each implementation of torch wrapped, synchronised, clipped and gathered, in source that uses torch alone?"""

from __future__ import annotations

from collections.abc import Callable

from fsdp_testing.records import Case

_FSDP1_STRATEGIES = {
    "full_shard": "FULL_SHARD",
    "shard_grad_op": "SHARD_GRAD_OP",
    "no_shard": "NO_SHARD",
    "hybrid_shard": "HYBRID_SHARD",
    "hybrid_shard_zero2": "_HYBRID_SHARD_ZERO2",
}

_DDP = (
    "from torch.nn.parallel import DistributedDataParallel",
    "    return DistributedDataParallel(model, broadcast_buffers=False, find_unused_parameters=True)",
    """def no_sync(model):
    return model.no_sync()


def clip(model, max_norm, norm_type):
    return nn.utils.clip_grad_norm_(model.parameters(), max_norm, norm_type)


@contextlib.contextmanager
def full_parameters(model, writeback):
    yield


def gathered(model):
    return {clean(name): (p.detach(), p.grad, p.requires_grad) for name, p in model.named_parameters()}""",
)

_FSDP2_ACCESS = """@contextlib.contextmanager
def no_sync(model):
    model.set_requires_gradient_sync(False)
    yield
    model.set_requires_gradient_sync(True)


def clip(model, max_norm, norm_type):
    norm = nn.utils.clip_grad_norm_(model.parameters(), max_norm, norm_type)
    return norm.full_tensor() if hasattr(norm, "full_tensor") else norm


def gathered(model):
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    whole = lambda t: None if t is None else t.full_tensor().detach()
    return {name: (whole(p), whole(p.grad), p.requires_grad) for name, p in model.named_parameters()}"""

_FSDP1_ACCESS = """def no_sync(model):
    return model.no_sync()


def clip(model, max_norm, norm_type):
    return model.clip_grad_norm_(max_norm, norm_type)


def full_parameters(model, writeback):
    return FSDP.summon_full_params(model, writeback=writeback)


def gathered(model):
    flags = {clean(name): p.requires_grad for name, p in model.named_parameters()}
    held = {}
    for with_grads in (True, False):
        try:
            with FSDP.summon_full_params(model, writeback=False, with_grads=with_grads):
                for name, p in model.named_parameters():
                    grad = p.grad.detach().clone() if with_grads and p.grad is not None else None
                    held[clean(name)] = (p.detach().clone(), grad, flags[clean(name)])
            return held
        except (NotImplementedError, AssertionError):
            continue
    return held"""


def _innermost_first(case: Case) -> list[str]:
    return sorted(case.wrapping.units, key=lambda name: -name.count("."))


def _ddp(_case: Case) -> tuple[str, str, str]:
    return _DDP


def _fsdp2(case: Case) -> tuple[str, str, str]:
    options = ["mesh=mesh"]
    imports = ["FSDPModule", "fully_shard"]
    shape = case.world.mesh_shape
    names = ', mesh_dim_names=("replicate", "shard")' if len(shape) == 2 else ""
    if case.strategy in ("shard_grad_op", "hybrid_shard_zero2"):
        options.append("reshard_after_forward=False")
    if case.mixed_precision is not None:
        spec = case.mixed_precision
        # Until torch 2.14 an unset `reduce_dtype` means `param_dtype`, from 2.15 on the parameter's own dtype.
        given = {"param_dtype": spec.param_dtype, "reduce_dtype": spec.reduce_dtype or spec.param_dtype}
        dtypes = [f"{key}=torch.{value}" for key, value in given.items() if value]
        options.append(f"mp_policy=MixedPrecisionPolicy({', '.join(dtypes)})")
        imports.append("MixedPrecisionPolicy")
    if case.cpu_offload:
        options.append("offload_policy=CPUOffloadPolicy(pin_memory=False)")
        imports.append("CPUOffloadPolicy")
    lines = [f"mesh = init_device_mesh('cpu', {shape!r}{names})"]
    lines += [f"fully_shard(model.{name}, {', '.join(options)})" for name in _innermost_first(case)]
    lines += [f"fully_shard(model, {', '.join(options)})", "return model"]
    head = "from torch.distributed.device_mesh import init_device_mesh\n"
    head += f"from torch.distributed.fsdp import {', '.join(sorted(imports))}"
    return head, "\n".join(f"    {line}" for line in lines), _FSDP2_ACCESS


def _fsdp1(case: Case) -> tuple[str, str, str]:
    options = [
        f"sharding_strategy=ShardingStrategy.{_FSDP1_STRATEGIES[case.strategy]}",
        'device_id=torch.device("cpu")',
    ]
    imports = ["FullyShardedDataParallel as FSDP", "ShardingStrategy"]
    lines: list[str] = []
    head = ""
    if case.strategy.startswith("hybrid"):
        head = "from torch.distributed.device_mesh import init_device_mesh\n"
        lines.append(
            f"mesh = init_device_mesh('cpu', {case.world.mesh_shape!r}, mesh_dim_names=('replicate', 'shard'))"
        )
        options.append("device_mesh=mesh")
    if case.mixed_precision is not None:
        spec = case.mixed_precision
        dtypes = [
            f"{key}=torch.{getattr(spec, key)}"
            for key in ("param_dtype", "reduce_dtype", "buffer_dtype")
            if getattr(spec, key)
        ]
        options.append(f"mixed_precision=MixedPrecision({', '.join(dtypes)})")
        imports.append("MixedPrecision")
    original = case_uses_original_parameters(case)
    options.append(f"use_orig_params={original}")
    for name in _innermost_first(case):
        lines.append(f"model.{name} = FSDP(model.{name}, {', '.join(options)})")
    lines.append(f"return FSDP(model, {', '.join(options)})")
    head += f"from torch.distributed.fsdp import {', '.join(imports)}"
    return head, "\n".join(f"    {line}" for line in lines), _FSDP1_ACCESS


def case_uses_original_parameters(_case: Case) -> bool:
    """FSDP1 is told with its original parameters, which names everything as the module does."""
    return True


FAMILIES: dict[str, Callable[[Case], tuple[str, str, str]]] = {
    "torch-ddp": _ddp,
    "torch-fsdp1": _fsdp1,
    "torch-fsdp2": _fsdp2,
}
