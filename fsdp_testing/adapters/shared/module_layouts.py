"""Cuts a user's own module over the tensor-parallel axis: its parameters become DTensors, and hooks convert inputs and outputs.

torch's styles support a few classes of layers; these layouts fit any module whose weight is (outputs, inputs), or that is whole
on all ranks. This module needs only torch: its text is copied into the scripts of findings.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

DIMENSIONS: dict[str, tuple[int | None, int | None, int | None]] = {
    "colwise": (0, None, None),
    "colwise_cut": (0, None, -1),
    "rowwise": (1, -1, None),
    "rowwise_cut": (1, -1, None),
    "sequence": (None, 0, None),
    "replicated": (None, None, None),
}
"""The dimensions of the weight, the first input and the output that ranks divide, by layout; None: not divided."""


def cut_module(module: nn.Module, mesh: DeviceMesh, layout: str) -> None:
    """Cut the parameters of one module, in place; it takes and gives local tensors.

    Args:
        module: Without modules inside that have parameters.
        mesh: The axis.
        layout: One of `DIMENSIONS`. An embedding has its rows where others have outputs: `rowwise` cuts these.

    Collectives: parameters are scattered from the first rank of the axis; every rank of it calls.
    """
    weight, entering, leaving = DIMENSIONS[layout]
    if "Embed" in type(module).__name__ and weight is not None:
        weight, entering = 1 - weight, None

    def placed(dimension: int | None) -> Placement:
        return Replicate() if dimension is None else Shard(dimension)

    for name, parameter in list(module.named_parameters(recurse=False)):
        dimension = weight if name == "weight" or weight == 0 else None  # a bias has a number for each output
        made = distribute_tensor(parameter.detach(), mesh, [placed(dimension)])
        module.register_parameter(name, nn.Parameter(made, parameter.requires_grad))

    def enter(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        given = placed(entering) if layout.endswith("_cut") else Replicate()
        first = tuple(_distributed(one, mesh, given).redistribute(mesh, [placed(entering)]) for one in args[:1])
        others = tuple(_distributed(one, mesh, Replicate()) for one in args[1:])
        return first + others, {name: _distributed(one, mesh, Replicate()) for name, one in kwargs.items()}

    def leave(_module: nn.Module, _args: tuple[Any, ...], output: Any) -> torch.Tensor:
        local: torch.Tensor = output.redistribute(mesh, [placed(leaving)]).to_local()
        return local

    module.register_forward_pre_hook(enter, with_kwargs=True)
    module.register_forward_hook(leave)


def _distributed(value: Any, mesh: DeviceMesh, placement: Placement) -> Any:
    return DTensor.from_local(value, mesh, [placement], run_check=False) if isinstance(value, torch.Tensor) else value
