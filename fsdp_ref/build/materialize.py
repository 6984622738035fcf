"""Where do the values of parameters come from before they are flattened?

From the meta device they get storage and initial values; then they move to the device of computation; then, when asked
for, every rank takes rank 0's values. Nothing that is ignored, or that a nested unit already holds, is touched.
"""

from __future__ import annotations

import warnings
from collections import deque
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdp_ref.comm.buckets import cut_into_buckets
from fsdp_ref.comm.collectives import collectives_for
from fsdp_ref.errors import FsdpRuntimeError, FsdpValueError, listing

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from fsdp_ref.build.ignored import Ignored
    from fsdp_ref.build.plan import PlannedUnit
    from fsdp_ref.comm.groups import DataParallelGroups

_BROADCAST_BYTES = 32 * 2**20


def materialize(unit: PlannedUnit, init: object, device: torch.device, ignored: Ignored) -> None:
    """Give storage and values to what ``unit`` manages on the meta device.

    With ``init`` it is called on every module of the unit, breadth first; without, each module that has parameters or
    buffers of its own on the meta device gets memory and ``reset_parameters()``. Tied parameters stay tied.

    Raises:
        FsdpValueError: ``init`` is no callable.
        AttributeError: a module has no ``reset_parameters``; a warning names it first.
    """
    pending = [module for module in breadth_first(unit) if _on_meta(module, ignored)]
    if not pending:
        return
    if init is not None and not callable(init):
        raise FsdpValueError(
            f"Expected {init!r} of type {type(init).__name__} to be callable: param_init_fn takes a module and "
            "initializes it. Pass a function."
        )
    # Initializing a module writes all of its parameters, those that somebody asked us to leave alone included.
    kept = [
        (module, name, param, param.data, None if param.is_meta else param.detach().clone())
        for module in breadth_first(unit)
        for name, param in _ignored_params(module, ignored)
    ]
    if callable(init):
        for module in breadth_first(unit):
            init(module)
    else:
        for module in pending:
            _reset(module, device)
    for module, name, param, data, value in kept:
        module._parameters[name] = param
        if value is not None:
            param.data = data
            data.copy_(value)
    for planned in unit.params:
        first = planned.sites[0]
        value = first.module._parameters[first.name]
        for site in planned.sites[1:]:
            site.module._parameters[site.name] = value


def breadth_first(unit: PlannedUnit) -> list[nn.Module]:
    """Return the modules that a unit is responsible for, breadth first from its own."""
    wanted = set(unit.modules)
    found: list[nn.Module] = []
    queue = deque([unit.module])
    seen = {unit.module}
    while queue:
        module = queue.popleft()
        if module in wanted:
            found.append(module)
        for child in module.children():
            if child not in seen:
                seen.add(child)
                queue.append(child)
    return found


def _ignored_params(module: nn.Module, ignored: Ignored) -> list[tuple[str, nn.Parameter]]:
    return [(name, param) for name, param in module.named_parameters(recurse=False) if param in ignored.params]


def _on_meta(module: nn.Module, ignored: Ignored) -> bool:
    params = [param for param in module.parameters(recurse=False) if param not in ignored.params]
    return any(tensor.is_meta for tensor in (*params, *module.buffers(recurse=False)))


def _reset(module: nn.Module, device: torch.device) -> None:
    reset = getattr(module, "reset_parameters", None)
    try:
        with torch.no_grad():
            module.to_empty(device=device, recurse=False)
            if reset is None:
                raise AttributeError(f"{type(module).__name__!r} object has no attribute 'reset_parameters'")
            reset()
    except BaseException as error:
        warnings.warn(
            f"Unable to call `reset_parameters()` for module on meta device with error {error}. Please ensure that "
            f"your module of type {type(module)} implements a `reset_parameters()` method.",
            UserWarning,
            stacklevel=2,
        )
        raise


def compute_device(device_id: object, params: Iterable[Tensor], groups: DataParallelGroups) -> torch.device:
    """Return the device that a unit computes on.

    ``device_id`` decides; without it the device where the parameters are, when it is an accelerator; else the CPU,
    unless the group cannot communicate tensors there.

    Raises:
        FsdpRuntimeError: parameters on several accelerators, or ``device_id`` names an accelerator this host lacks.
    """
    found = sorted({param.device for param in params if not param.is_meta}, key=str)
    accelerators = [device for device in found if device.type != "cpu"]
    if len(accelerators) > 1:
        raise FsdpRuntimeError(
            f"FSDP only supports single device modules: expected one device, got {listing(found)}. Move the module first."
        )
    if device_id is not None:
        device = _explicit(device_id)
        if accelerators and accelerators[0] != device:
            raise FsdpValueError(
                f"Inconsistent compute device and `device_id`: expected parameters on {device} or the CPU, got "
                f"{accelerators[0]} and device_id={device_id!r}. Move the module or change device_id."
            )
        return device
    if accelerators:
        if len(found) > 1:
            raise FsdpRuntimeError(
                f"The module has CPU and accelerator parameters ({listing(found)}): expected one device. "
                "To move it, please pass in device_id."
            )
        return accelerators[0]
    if torch.cuda.is_available() and str(dist.get_backend(groups.shard)) == "nccl":
        warnings.warn(
            "The passed-in `module` is on CPU and the process group communicates on CUDA only: its parameters stay on "
            "the CPU until you move it. Pass device_id to shard on the device.",
            UserWarning,
            stacklevel=4,
        )
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def _explicit(device_id: object) -> torch.device:
    if isinstance(device_id, int):
        if not torch.cuda.is_available():
            raise FsdpRuntimeError(
                f"device_id={device_id}: expected an accelerator, which an integer names, got none on this host. "
                "Pass torch.device('cpu')."
            )
        return torch.device("cuda", device_id)
    device = torch.device(device_id) if isinstance(device_id, str) else device_id
    if not isinstance(device, torch.device):
        raise FsdpValueError(
            f"device_id: expected an int, a string or a torch.device, got {type(device_id).__name__}. Pass one of these."
        )
    if device.type == "cuda" and device.index is None:
        warnings.warn(
            f"FSDP got the argument `device_id` {device_id}, which does not have an explicit index. FSDP will use the "
            "current device. Pass the index to be sure.",
            UserWarning,
            stacklevel=5,
        )
        return torch.device("cuda", torch.cuda.current_device())
    return device


def move_states(unit: PlannedUnit, device: torch.device, ignored: Ignored) -> None:
    """Move what ``unit`` manages to ``device``; parameters keep their objects."""
    with torch.no_grad():
        for module in unit.modules:
            for param in module.parameters(recurse=False):
                if param not in ignored.params and param.device.type != device.type:
                    param.data = param.data.to(device)
            for name, buffer in module._buffers.items():
                if buffer is not None and buffer.device.type != device.type:
                    module._buffers[name] = buffer.to(device)


def broadcast_states(
    params: Sequence[Tensor], modules: Sequence[nn.Module], groups: DataParallelGroups, device: torch.device
) -> None:
    """Give all ranks rank 0's parameters and buffers: first along the replicas, then in the shard group.

    Raises:
        FsdpValueError: tensors on the CPU that the group cannot communicate.

    Collectives:
        One broadcast per 32 MiB and dtype, over the replicate group and over the shard group. All ranks must call.
    """
    buffers = [buffer for module in modules for buffer in module.buffers(recurse=False)]
    tensors = list({id(tensor): tensor.detach() for tensor in (*params, *buffers) if tensor.numel()}.values())
    if device.type != "cpu" and any(tensor.device.type == "cpu" for tensor in tensors):
        raise FsdpValueError(
            "The module has CPU parameters or buffers when `sync_module_states=True`, which requires them to be on "
            f"{device}: pass device_id, or move the module first."
        )
    for group in (groups.replicate, groups.shard):
        if group is not None and group.size() > 1:
            for bucket in cut_into_buckets(tensors, _BROADCAST_BYTES):
                _broadcast_bucket(bucket, group, device)


def _broadcast_bucket(bucket: list[Tensor], group: dist.ProcessGroup, device: torch.device) -> None:
    collectives = collectives_for(group, device)
    with torch.no_grad():
        flat = torch.cat([tensor.reshape(-1) for tensor in bucket])
        collectives.broadcast(flat, 0, group, "initial states").wait()
        for tensor, values in zip(bucket, flat.split([tensor.numel() for tensor in bucket])):
            tensor.copy_(values.view_as(tensor))
