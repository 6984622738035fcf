"""Cuts a module over the tensor-parallel axis before it is wrapped, with torch's own `parallelize_module`, as users do.

Layers that torch does not support are cut by `module_layouts`. The parameters become DTensors over that axis; an implementation
that claims `tensor_parallel` shards them over the other axis.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from torch import nn

from fsdp_testing.adapters.protocol import Setup
from fsdp_testing.errors import InvalidRecord

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.parallel import ParallelStyle

_KNOWN_TO_TORCH = (nn.Linear, nn.Embedding, nn.LayerNorm)
ROWS = 0
"""The dimension of activations that `sequence` cuts: the one that every model has."""


def parallelised(wrap: Callable[[nn.Module, Setup], nn.Module]) -> Callable[[nn.Module, Setup], nn.Module]:
    """`wrap`, after the module was cut over the tensor-parallel axis, if the setup has one."""

    def cut_then_wrap(module: nn.Module, setup: Setup) -> nn.Module:
        if setup.tensor_mesh is not None:
            parallelise(module, setup.tensor_mesh, setup.layouts)
        return wrap(module, setup)

    return cut_then_wrap


def parallelise(module: nn.Module, mesh: DeviceMesh, layouts: Sequence[tuple[str, str]]) -> None:
    """Cut the named modules, in place; shared parameters stay shared, and frozen ones frozen.

    Args:
        module: Unwrapped, equal on all ranks of the axis.
        mesh: The axis.
        layouts: `(FQN, layout)`, with layouts out of `fsdp_testing.cases.records.specs.LAYOUTS`.

    Collectives: parameters are broadcast over the axis from its first rank; every rank of it calls.

    Raises:
        InvalidRecord: The plan gives parts of one shared parameter different layouts.
    """
    from torch.distributed.tensor.parallel import parallelize_module

    from fsdp_testing.adapters.shared.module_layouts import cut_module

    before = dict(module.named_parameters(remove_duplicate=False))
    for fqn, layout in layouts:
        inner = module.get_submodule(fqn)
        if layout == "replicated" or not isinstance(inner, _KNOWN_TO_TORCH):
            cut_module(inner, mesh, layout)
            continue
        for style in _styles(layout):
            parallelize_module(inner, mesh, style)
    _share_again(module, before)
    for fqn, parameter in module.named_parameters():
        # torch's SequenceParallel makes frozen parameters trainable.
        parameter.requires_grad_(before[fqn].requires_grad)


def _styles(layout: str) -> list[ParallelStyle]:
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor import parallel as tp

    whole, rows = Replicate(), Shard(ROWS)
    known: dict[str, Callable[[], list[ParallelStyle]]] = {
        "colwise": lambda: [tp.ColwiseParallel(output_layouts=whole)],
        "colwise_cut": lambda: [tp.ColwiseParallel()],
        "rowwise": lambda: [tp.RowwiseParallel(input_layouts=whole)],
        "rowwise_cut": lambda: [tp.RowwiseParallel()],
        "sequence": lambda: [
            tp.PrepareModuleInput(input_layouts=whole, desired_input_layouts=rows, use_local_output=False),
            tp.SequenceParallel(sequence_dim=ROWS),
            tp.PrepareModuleOutput(output_layouts=rows, desired_output_layouts=whole),
        ],
    }
    return known[layout]()


def _share_again(module: nn.Module, before: dict[str, nn.Parameter]) -> None:
    """Restore shared parameters: each cut module has made its own."""
    first: dict[int, nn.Parameter] = {}
    for fqn, parameter in before.items():
        owner, _, name = fqn.rpartition(".")
        now: Any = module.get_submodule(owner).get_parameter(name)
        one: Any = first.setdefault(id(parameter), now)
        if getattr(one, "placements", None) != getattr(now, "placements", None):
            raise InvalidRecord(
                f"case.wrapping.layouts of {fqn!r}: expected the layout of the other modules that share it "
                f"({getattr(one, 'placements', 'plain')}), got {getattr(now, 'placements', 'plain')}. Fix the plan."
            )
        if now is not one:
            module.get_submodule(owner).register_parameter(name, one)
