"""How does a case get a second axis, and what does the oracle know of it?

A case has the axis in two places: `WorldSpec.tensor_parallel` says how many ranks hold one model together, and
`WrappingPlan.layouts` what is made of which module. Those ranks have the same inputs, so that the oracle's mean is over
one of each such group; otherwise it computes as ever, with the plain module: in float64 and float32 another order of
sums is what its bounds allow for anyway. Operation by operation, and in low precision, it is asked what these roundings do:
its displaced replay computes the sums of cut modules part by part (`compute_in_parts`), and how far that is from the
plain one is how far an implementation may be. What ranks report is put together from spans of whole parameters, over
both axes alike: each piece says its place in the whole, whichever axis cut it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace

import torch
from torch import nn

from fsdp_testing.programs.models import build_model, zoo_model
from fsdp_testing.records import Case

Forward = Callable[[torch.Tensor], torch.Tensor]


def over_two_axes(case: Case, ranks: int) -> Case:
    """Return the case with `ranks` ranks for each model; layouts are chosen by the kinds of modules (`layouts_of`)."""
    if ranks == 1:
        return case
    layouts = layouts_of(build_model(case), ranks, zoo_model(case).elementwise_before)
    world = replace(case.world, tensor_parallel=ranks)
    return replace(case, world=world, wrapping=replace(case.wrapping, layouts=tuple(layouts.items())))


def layouts_of(module: nn.Module, ranks: int, elementwise_before: Collection[str] = ()) -> dict[str, str]:
    """Return the layout of each module of a kind that torch's tensor parallelism knows, in the order of the model.

    Linear layers take turns: columns, rows. Layers whose parameters others share are whole on all ranks.

    Args:
        module: Unwrapped.
        ranks: How many hold it together.
        elementwise_before: Linear layers that may take the columns of the one before as they are. torch takes local
            tensors for equal parts of the whole, so that they may where the ranks divide the columns.
    """
    owners: dict[int, int] = {}
    for _, parameter in module.named_parameters(remove_duplicate=False):
        owners[id(parameter)] = owners.get(id(parameter), 0) + 1
    kinds = {nn.Linear: "replicated", nn.Embedding: "rowwise", nn.LayerNorm: "sequence", nn.Conv2d: "replicated"}
    found: dict[str, str] = {}
    columns = ""
    for fqn, inner in module.named_modules():
        if type(inner) not in kinds:
            continue
        shared = any(owners[id(parameter)] > 1 for parameter in inner.parameters(recurse=False))
        found[fqn] = "replicated" if shared else kinds[type(inner)]
        if not isinstance(inner, nn.Linear) or shared:
            continue
        if not columns:
            columns, found[fqn] = fqn, "colwise"
        else:
            paired = fqn in elementwise_before and inner.in_features % ranks == 0
            found |= {columns: "colwise_cut", fqn: "rowwise_cut"} if paired else {fqn: "rowwise"}
            columns = ""
    return found


def compute_in_parts(replica: nn.Module, case: Case) -> nn.Module:
    """Let cut modules compute each sum that is cut over ranks part by part, in the dtype of computation."""
    ranks = case.world.tensor_parallel
    for fqn, layout in case.wrapping.layouts if ranks > 1 else ():
        inner = replica.get_submodule(fqn)
        made = _in_parts(inner, layout.removesuffix("_cut"), ranks)
        if made is not None:
            vars(inner)["forward"] = made  # found before the class's own
    return replica


def _in_parts(module: nn.Module, layout: str, ranks: int) -> Forward | None:
    def columns(x: torch.Tensor) -> torch.Tensor:
        bias = module.bias.chunk(ranks) if module.bias is not None else [None] * ranks
        parts = zip(module.weight.chunk(ranks), bias)
        return torch.cat([nn.functional.linear(x, weight, one) for weight, one in parts], -1)

    def rows(x: torch.Tensor) -> torch.Tensor:
        weights = module.weight.chunk(ranks, 1)
        parts = list(zip(x.chunk(ranks, -1), weights))
        whole = nn.functional.linear(*parts[0], module.bias)
        for part, weight in parts[1:]:
            whole = whole + nn.functional.linear(part, weight)
        return whole

    def sequence(x: torch.Tensor) -> torch.Tensor:
        return torch.cat([type(module).forward(module, part) for part in x.chunk(ranks)])

    if isinstance(module, nn.Linear):
        return {"colwise": columns, "rowwise": rows}.get(layout)
    return sequence if layout == "sequence" else None
