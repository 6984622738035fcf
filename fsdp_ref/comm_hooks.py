"""Communication hooks, which replace the reduction of gradients.

A hook is called once per flat parameter and synchronizing backward. For sharded units it gets (state, grad, output): the
padded unsharded gradient and the shard to fill; for replicated ones (state, grad), to be reduced in place. Only the hook
divides. Names and behaviour follow ``torch.distributed.algorithms._comm_hooks``; the compressing hooks here work on every
device, because they copy instead of retargeting ``.data`` across streams.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from fsdp_ref.comm.collectives import collectives_for
from fsdp_ref.comm.division import DivideFactors, divide
from fsdp_ref.errors import FsdpValueError
from fsdp_ref.runtime.grad_sync import CASTING_HOOKS

__all__ = [
    "DefaultState",
    "LowPrecisionState",
    "allreduce_hook",
    "bf16_compress_hook",
    "fp16_compress_hook",
    "reduce_scatter_hook",
]


class DefaultState:
    """State of the uncompressed hooks.

    Attributes:
        process_group: ranks to average over.
        world_size: their number.
        gradient_predivide_factor: divisor before the sum.
        gradient_postdivide_factor: divisor after the sum.
    """

    __slots__ = ("gradient_postdivide_factor", "gradient_predivide_factor", "process_group", "world_size")

    def __init__(self, process_group: dist.ProcessGroup) -> None:
        given: dist.ProcessGroup | None = process_group
        if given is None:
            raise FsdpValueError(
                f"Expected to pass in an explicit ProcessGroup to {type(self).__name__}, got None. "
                "Pass the group that the module is sharded over."
            )
        self.process_group = process_group
        self.world_size = dist.get_world_size(process_group)
        factors = DivideFactors.for_world(self.world_size)
        self.gradient_predivide_factor = factors.before
        self.gradient_postdivide_factor = factors.after


class LowPrecisionState(DefaultState):
    """State of the compressing hooks: also ``parameter_type``, the dtype of the reduced gradients."""

    __slots__ = ("parameter_type",)

    def __init__(self, process_group: dist.ProcessGroup, parameter_type: torch.dtype = torch.float32) -> None:
        super().__init__(process_group)
        self.parameter_type = parameter_type


def allreduce_hook(state: DefaultState, grad: Tensor) -> None:
    """Replace ``grad`` by its mean over the ranks of the state's group.

    Collectives: one all-reduce on ``state.process_group``; all its ranks must join.
    """
    divide(grad, state.gradient_predivide_factor)
    collectives = collectives_for(state.process_group, grad.device)
    collectives.all_reduce(grad, state.process_group, "allreduce_hook").wait()
    divide(grad, state.gradient_postdivide_factor)


def reduce_scatter_hook(state: DefaultState, grad: Tensor, output: Tensor) -> None:
    """Fill ``output`` with this rank's chunk of the mean of ``grad`` over the ranks of the state's group.

    It runs the same operations in the same order as reduction without a hook, hence gives the same bits.

    Collectives: one reduce-scatter on ``state.process_group``; all its ranks must join.
    """
    divide(grad, state.gradient_predivide_factor)
    collectives = collectives_for(state.process_group, grad.device)
    collectives.reduce_scatter(output, grad, state.process_group, "reduce_scatter_hook").wait()
    divide(output, state.gradient_postdivide_factor)


def fp16_compress_hook(state: LowPrecisionState, grad: Tensor, output: Tensor | None = None) -> None:
    """Average in float16 and return the result in ``state.parameter_type``; see :func:`_compress`."""
    _compress(torch.float16, state, grad, output)


def bf16_compress_hook(state: LowPrecisionState, grad: Tensor, output: Tensor | None = None) -> None:
    """Average in bfloat16 and return the result in ``state.parameter_type``; see :func:`_compress`."""
    _compress(torch.bfloat16, state, grad, output)


CASTING_HOOKS.update({fp16_compress_hook, bf16_compress_hook})


def _compress(dtype: torch.dtype, state: LowPrecisionState, grad: Tensor, output: Tensor | None) -> None:
    """Cast to ``dtype``, divide, sum over ranks, divide, cast to the parameters' dtype.

    Equals reduction under ``MixedPrecision(reduce_dtype=dtype)``: the same casts around the same sum.
    """
    low = grad.to(dtype)
    if output is None:
        # A gradient that already has the dtype would be reduced in place, which is what the caller asked for.
        allreduce_hook(state, low)
        _put(low, grad, state.parameter_type)
    else:
        low_output = torch.empty_like(output, dtype=dtype)
        reduce_scatter_hook(state, low, low_output)
        _put(low_output, output, state.parameter_type)


def _put(result: Tensor, target: Tensor, dtype: torch.dtype) -> None:
    """Give ``target`` the values of ``result`` in ``dtype``, keeping its storage when it has that dtype already."""
    if target.dtype == dtype:
        target.copy_(result)
    else:
        target.data = result.to(dtype)
