"""Gives a case a second axis, tensor parallelism, and bounds its effect on the numbers.

A case has the axis in two places: `WorldSpec.tensor_parallel` says how many ranks hold one model together, and
`WrappingPlan.layouts` what is made of which module. Those ranks have the same inputs, so that the oracle's mean is over
one of each such group; otherwise it computes as ever, with the plain module: in float64 and float32 another order of
sums is what its bounds allow for anyway. Operation by operation, and in low precision, it is asked what these roundings
do: its displaced replay computes the sums of cut modules part by part (`compute_in_parts`), which shows how far such
roundings carry, and as many roundings as there are parts are allowed for besides (`roundings_of_cut_sums`). What ranks
report is put together from spans of whole parameters, over both axes alike: each piece says its place in the whole,
whichever axis cut it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import nn

from fsdp_testing.cases.models.tree_layers import TreeLinear
from fsdp_testing.cases.records import UNIT_ROUNDOFF, Case, MixedPrecisionSpec
from fsdp_testing.oracle.models import build_model, zoo_model
from fsdp_testing.oracle.quantities import Quantity

Forward = Callable[[torch.Tensor], torch.Tensor]


def over_two_axes(case: Case, ranks: int) -> Case:
    """Return the case with `ranks` ranks for each model; layouts are chosen by the kinds of modules (`layouts_of`)."""
    if ranks == 1:
        return case
    ignored = tuple(f"{name}." for name in case.wrapping.ignored)
    layouts = layouts_of(build_model(case), ranks, zoo_model(case).elementwise_before, ignored)
    world = replace(case.world, tensor_parallel=ranks)
    return replace(case, world=world, wrapping=replace(case.wrapping, layouts=tuple(layouts.items())))


def layouts_of(
    module: nn.Module, ranks: int, elementwise_before: Collection[str] = (), ignored: tuple[str, ...] = ()
) -> dict[str, str]:
    """Return the layout of each module of a kind that torch's tensor parallelism knows, in the order of the model.

    Linear layers take turns: columns, rows. Layers whose parameters others share are whole on all ranks.

    Args:
        module: Unwrapped.
        ranks: How many hold it together.
        elementwise_before: Linear layers that may take the columns of the one before as they are. torch takes local
            tensors for equal parts of the whole, so that they may where the ranks divide the columns.
        ignored: Prefixes of modules that stay as they are: every rank trains parameters outside units by itself, whole.
    """
    owners: dict[int, int] = {}
    for _, parameter in module.named_parameters(remove_duplicate=False):
        owners[id(parameter)] = owners.get(id(parameter), 0) + 1
    kinds = {nn.Linear: "replicated", nn.Embedding: "rowwise", nn.LayerNorm: "sequence", nn.Conv2d: "replicated"}
    layouts: dict[str, str] = {}
    columns = ""
    for fqn, inner in module.named_modules():
        if type(inner) not in kinds or f"{fqn}.".startswith(ignored):
            continue
        shared = any(owners[id(parameter)] > 1 for parameter in inner.parameters(recurse=False))
        layouts[fqn] = "replicated" if shared else kinds[type(inner)]
        if not isinstance(inner, nn.Linear) or shared:
            continue
        if not columns:
            columns, layouts[fqn] = fqn, "colwise"
        else:
            paired = fqn in elementwise_before and inner.in_features % ranks == 0
            layouts |= {columns: "colwise_cut", fqn: "rowwise_cut"} if paired else {fqn: "rowwise"}
            columns = ""
    return layouts


def compute_in_parts(replica: nn.Module, case: Case) -> nn.Module:
    """Let cut modules compute each sum that is cut over ranks part by part, in the dtype of computation."""
    ranks = case.world.tensor_parallel
    for fqn, layout in case.wrapping.layouts if ranks > 1 else ():
        inner = replica.get_submodule(fqn)
        made = _in_parts(inner, layout.removesuffix("_cut"), ranks)
        if made is not None:
            vars(inner)["forward"] = made  # found before the class's own
    return replica


def summands_of_products(module: nn.Module, case: Case) -> dict[str, int]:
    """Return, by the FQN of its weight, how many summands the inner products of each linear layer with a layout have.

    torch multiplies parts by other kernels than whole matrices, so that even sums that are not cut are rounded otherwise.
    """
    ranks = case.world.tensor_parallel
    layers = {fqn: module.get_submodule(fqn) for fqn, _ in case.wrapping.layouts if ranks > 1}
    linear = {fqn: layer for fqn, layer in layers.items() if isinstance(layer, (nn.Linear, TreeLinear))}
    return {f"{fqn}.weight": layer.weight.shape[-1] + ranks for fqn, layer in linear.items()}


def compute_dtype(case: Case) -> str:
    """Return the dtype of computation."""
    if case.mixed_precision is not None and case.mixed_precision.param_dtype is not None:
        return case.mixed_precision.param_dtype
    return "bfloat16" if "autocast" in zoo_model(case).traits else case.model.dtype


def roundings_of_cut_sums(case: Case, index: int, quantity: Quantity, size: float) -> float:
    """Return how far a quantity of operation `index` may be off where sums that are cut are added up otherwise.

    Each cut module has one such sum: the output if rowwise, the gradient of the input if colwise, that of the parameters if
    sequence-parallel. Its T parts are rounded, and T-1 additions of them, in the dtype of computation, in each micro-batch that
    is reduced here. Where gradients are reduced in a narrower dtype, those that differ in a last bit may be cast to neighbouring
    numbers.

    Args:
        case: The case.
        index: Index of an operation; only one that computes with the model is off at all.
        quantity: The quantity.
        size: Its largest element, or the largest of any gradient.
    """
    ranks = case.world.tensor_parallel
    computed = quantity.kind in ("gradient", "buffer") or quantity.sort == "output"
    if ranks == 1 or not computed or not any(operation.batches() for operation in case.program[index : index + 1]):
        return 0.0
    precision, dtype = case.mixed_precision or MixedPrecisionSpec(), compute_dtype(case)
    cut = sum(layout != "replicated" for _, layout in case.wrapping.layouts)
    roundings = cut * (2 * ranks - 1) * UNIT_ROUNDOFF[dtype]
    if quantity.kind == "gradient":
        roundings *= _micro_batches_in_sum(case, index)
    wire = UNIT_ROUNDOFF[precision.reduce_dtype or dtype]
    if quantity.kind == "gradient" and wire > UNIT_ROUNDOFF[dtype]:
        roundings += 2 * wire
    return roundings * size


def _micro_batches_in_sum(case: Case, index: int) -> int:
    """Return how many micro-batches operation `index` reduces: its own, and pending ones."""
    count, pending = 0, False
    for operation in case.program[: index + 1]:
        count = (count if pending else 0) + len(operation.batches())
        pending = operation.pending_after(pending)
    return count


def _in_parts(module: nn.Module, layout: str, ranks: int) -> Forward | None:
    if isinstance(module, nn.Linear):
        by_layout = {"colwise": _by_columns, "rowwise": _by_rows}
        return partial(by_layout[layout], module, ranks) if layout in by_layout else None
    return partial(_by_sequence, module, ranks) if layout == "sequence" else None


def _by_columns(module: nn.Linear, ranks: int, x: torch.Tensor) -> torch.Tensor:
    """Parts of the output; in backward the gradients of the input are added up."""
    biases: Sequence[torch.Tensor | None] = module.bias.chunk(ranks) if module.bias is not None else [None] * ranks
    parts = zip(module.weight.chunk(ranks), biases)
    return torch.cat([nn.functional.linear(x, weight, bias) for weight, bias in parts], -1)


def _by_rows(module: nn.Linear, ranks: int, x: torch.Tensor) -> torch.Tensor:
    """Partial sums, the bias in the first of them."""
    first, *more = zip(x.chunk(ranks, -1), module.weight.chunk(ranks, 1))
    whole = nn.functional.linear(*first, module.bias)
    for part, weight in more:
        whole = whole + nn.functional.linear(part, weight)
    return whole


def _by_sequence(module: nn.Module, ranks: int, x: torch.Tensor) -> torch.Tensor:
    """Parts of the rows; in backward the gradients of the parameters are added up."""
    return torch.cat([type(module).forward(module, part) for part in x.chunk(ranks)])
