"""Says why ranks, or a world and one process, begin with different weights. Pure."""

from __future__ import annotations

import torch

from fsdp_testing.train.comparison import Difference
from fsdp_testing.train.quantities import Kind, Quantity, spans_of_kind
from fsdp_testing.train.spans import Span, assembled
from fsdp_testing.train.whole import WholeRun, first_steps, initial


def of_start(run: WholeRun) -> str:
    """Return why ranks begin with different weights; empty if they do not."""
    before = [spans_of_kind(seen.before, Kind.PARAMETER) for seen in first_steps(run)]
    for name in before[0] if before else ():
        odd = assembled([spans.get(name, ()) for spans in before])[1]
        if odd is not None and any(any(seen.terms.moved) for seen in first_steps(run)):
            return (
                f"ranks 0 and {odd} hold different weights when the optimizer first steps, first {name}. Cause: weights are "
                "changed between the backward passes of a step, with numbers that differ between ranks. Reduce them first."
            )
        if odd is not None:
            return (
                f"ranks 0 and {odd} start from different weights, first in {name}. Cause: the seed depends on the rank and "
                "nothing copies the weights of rank 0. Use one seed on all ranks, or broadcast the parameters."
            )
    return ""


def of_other_start(reference: WholeRun, run: WholeRun, difference: Difference) -> str:
    """Return why a world begins with different weights from one process, and how to make it comparable."""
    if difference.quantity not in initial(run, 1):
        return (
            "The model is made during the training, and all steps before agree. Either its weights are drawn with a seed that "
            "depends on the number of ranks, or the ranks compute them wrongly from what they trained."
        )
    alone, *others = [{seen.evidence.seed for seen in first_steps(world)} for world in (reference, run)]
    if len(others[0]) > 1:
        return "The seed depends on the rank: make the model from one that does not, or send all ranks the weights of rank 0."
    if len(alone | others[0]) > 1:
        return "The seed depends on the number of ranks: make the model from one that does not."
    shards = any(
        span.stop - span.start < torch.Size(span.shape).numel()
        for rank in first_steps(run)
        for spans in rank.before.values()
        for span in spans
    )
    drawn = (
        "They are drawn after the model was sharded, by each rank for its own shards"
        if shards
        else "Different random numbers are drawn for them, or before them"
    )
    return (
        f"The seed is the same. {drawn}, so that they depend on the number of ranks. Draw them for the whole model before it "
        "is sharded, or load the same checkpoint on every number of ranks."
    )


def not_loaded(reference: WholeRun, run: WholeRun, difference: Difference) -> str:
    """Return the cause if one process begins with weights that the script holds, as if loaded, and the ranks do not.

    Both hold the same ones to the end, so that no training has moved them.
    """
    due, got = initial(reference, 1), initial(run, 1)
    for variable in {key.part: None for key in reference.names(Kind.COPY)}:
        key = Quantity(Kind.COPY, difference.quantity.name, variable)
        held = [world.quantities.get(key, []) for world in (reference, run)]
        names = [one.name for one in reference.names(Kind.COPY) if one.part == variable]
        loaded = all(_same(reference, Quantity(Kind.COPY, name, variable), due, name) for name in names)
        if all(held) and loaded and torch.equal(held[0][0], held[1][0]) and difference.quantity in got:
            return (
                f"Cause: one process loads the weights of {variable!r}, and the ranks hold the same ones there and do not all "
                "begin with them. Load them on every rank, or broadcast them from one, before the model is sharded."
            )
    return ""


def _same(run: WholeRun, copy: Quantity, start: dict[Quantity, list[torch.Tensor]], name: str) -> bool:
    value = start.get(Quantity(Kind.PARAMETER, name), [])
    return (
        bool(value)
        and value[0].shape == run.quantities[copy][0].shape
        and torch.equal(value[0], run.quantities[copy][0])
    )


def equal_shards(reference: WholeRun, run: WholeRun) -> str:
    """Return a note if ranks begin with the same numbers in different shards of a parameter, and one process does not.

    That is no verdict: on CPUs DTensor draws so itself.
    """
    due = initial(reference, 1)
    held = [spans_of_kind(seen.before, Kind.PARAMETER) for seen in first_steps(run)]
    for name in held[0] if held else ():
        spans = [one[name][0] for one in held if len(one.get(name, ())) == 1]
        if len(spans) < run.size or not _are_copies(spans):
            continue
        whole = due.get(Quantity(Kind.PARAMETER, name), [torch.empty(0)])[0].reshape(-1)
        if whole.numel() and not _repeats(whole, spans):
            return (
                f". Ranks 0 and 1 begin with the same numbers in their shards of {name}: rows of the whole are copies of one "
                "another, as each rank draws its shard from one seed. DTensor's own draws do so on CPUs alone, draws into "
                "to_local() everywhere"
            )
    return ""


def _are_copies(spans: list[Span]) -> bool:
    """Whether the first two of all shards lie elsewhere and hold the same numbers, as far as both reach, and not one only."""
    one, two = (span.values for span in spans[:2])
    count = min(len(one), len(two))
    plain = all(span.block == 1 and span.places is None for span in spans[:2])
    return (
        plain
        and spans[0].start != spans[1].start
        and count > 1
        and _varies(one[:count])
        and torch.equal(one[:count], two[:count])
    )


def _varies(values: torch.Tensor) -> bool:
    return bool((values != values[0]).any())


def _repeats(whole: torch.Tensor, spans: list[Span]) -> bool:
    one, two = (whole[span.start : span.stop] for span in spans[:2])
    count = min(len(one), len(two))
    return torch.equal(one[:count], two[:count])


def nowhere(alone: WholeRun, run: WholeRun) -> str:
    """Return the cause if no rank has some numbers of a parameter of which ranks have parts."""
    if not run.parts:
        return ""
    due = initial(alone, 1)
    for key, values in initial(run, 1).items():
        if key not in due or due[key][0].isnan().any() or not values[0].isnan().any():
            continue
        lost = int(values[0].isnan().sum())
        return (
            f"no rank begins with {lost} of the {values[0].numel()} numbers that one process has in {key}: ranks have the same "
            "part of it. Cause: each rank's part is replaced by that of another, as DDP does when it is made: it broadcasts the "
            "parameters of rank 0, and averages their gradients. Leave such parameters out of it, or give each rank its own part."
        )
    return ""
