"""What did a whole world compute and see, put together from its ranks? Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from fsdp_testing.train.function.comparison import CLEAR_ROUNDINGS, Quantities, floor
from fsdp_testing.train.function.evidence import StepEvidence
from fsdp_testing.train.function.held import Spans
from fsdp_testing.train.function.observation import StepSeen
from fsdp_testing.train.function.spans import assembled
from fsdp_testing.train.function.whole import MOMENT, PARAMETER, Disagreement, together, with_agreement
from fsdp_testing.train.script.launched import RankReport

COPY = "weights kept as "


@dataclass(frozen=True, slots=True)
class Place:
    """Where a parameter of a rank lies in one process.

    Attributes:
        name: Of the parameter of one process.
        shape: Of that.
        dim: Along which the rank has a part of it; None where it has all.
        index: Which slices, along that.
    """

    name: str
    shape: tuple[int, ...]
    dim: int | None = None
    index: tuple[int, ...] = ()

    def positions(self) -> torch.Tensor | None:
        """Return the place of each element in the whole parameter; None where that is all of it."""
        if self.dim is None:
            return None
        numbers = torch.arange(torch.Size(self.shape).numel()).view(self.shape)
        return numbers.index_select(self.dim, torch.tensor(self.index, dtype=torch.long)).reshape(-1)


@dataclass(frozen=True, slots=True)
class WholeRun:
    """One run of a world.

    Attributes:
        size: Number of ranks.
        quantities: By name, of every step: losses, norms, the optimizer's settings, gradients, parameters, its state, buffers;
            and of the end, other copies of the weights.
        rows: Of every step, for each rank, the digests of its rows.
        disagreements: The first of each kind.
        ranks: What each rank reported.
        parts: For each rank the place in one process of each parameter that it has of its own; empty where all have the same, or
            shards of it.
    """

    size: int
    quantities: Quantities
    rows: tuple[tuple[tuple[str, ...], ...], ...]
    disagreements: tuple[Disagreement, ...]
    ranks: tuple[RankReport, ...]
    parts: tuple[Mapping[str, Place], ...] = ()

    @property
    def shares_work(self) -> bool:
        """Whether ranks have parts of the model that nobody gathers, so that they work on the same rows together."""
        return bool(self.parts) or any(rank.steps[0].share for rank in self.ranks)

    def of(self, ranks: Sequence[int]) -> WholeRun:
        """Return the rows that some of the ranks took, and these ranks, as a run of their own."""
        rows = tuple(tuple(step[rank] for rank in ranks) for step in self.rows)
        return replace(self, size=len(ranks), rows=rows, ranks=tuple(self.ranks[rank] for rank in ranks))

    @property
    def steps(self) -> int:
        return len(self.rows)

    @property
    def evidence(self) -> tuple[tuple[StepEvidence, ...], ...]:
        """What each rank saw; dropout was off, and only what a forward draws makes worlds differ.

        Gradients are as they were before the first clip, which may hide by what factor they differ.
        """
        evidence = [
            [
                replace(one, dropout="", drew=seen.drew, gradient_norm=_unclipped_norm(seen) or one.gradient_norm)
                for one, seen in zip(rank.evidence, rank.steps)
            ]
            for rank in self.ranks
        ]
        return with_agreement(evidence, [rank.steps for rank in self.ranks], self.disagreements)

    def union(self, step: int) -> Counter[str]:
        """Return how often each row was seen by any rank until `step` ended."""
        return Counter(row for rank in self.rows[step] for row in rank)

    def forwards(self) -> int:
        """Return the number of forwards of a rank until its first step."""
        return len(self.ranks[0].steps[0].rows)


def whole(size: int, ranks: Sequence[RankReport]) -> WholeRun:
    """Put the reports of all ranks together; all made as many steps."""
    quantities, disagreements = together([rank.steps for rank in ranks])
    # Of copies rank 0's count, which it saves: others need not keep any.
    for copy, first in ranks[0].copies.items():
        for name in first:
            tensor = assembled([rank.copies.get(copy, {}).get(name, ()) for rank in ranks])[0]
            if not bool(tensor.isnan().any()):
                quantities[f"{COPY}{copy!r}, {name}"] = [tensor]
    rows = tuple(
        tuple(tuple(row for forward in rank.steps[step].rows for row in forward) for rank in ranks)
        for step in range(min(len(rank.steps) for rank in ranks))
    )
    return WholeRun(size, quantities, rows, disagreements, tuple(ranks))


def initial(run: WholeRun) -> Quantities:
    """Return the parameters with which a run began."""
    found: Quantities = {}
    for seen in zip(*(rank.steps for rank in run.ranks)):
        for name in {name: None for one in seen for name in one.before}:
            if PARAMETER + name not in found:
                found[PARAMETER + name] = [assembled([one.before.get(name, ()) for one in seen])[0]]
    return found


def is_mean_of_weights(run: WholeRun, name: str) -> bool:
    """Whether a copy of a parameter lies, number by number, between values that the parameter had: a mean of weights does."""
    copy, parameter = run.quantities[name][0], PARAMETER + name.split(", ", 1)[1]
    had = torch.stack([*initial(run).get(parameter, []), *run.quantities[parameter]])
    room = floor(copy.dtype, CLEAR_ROUNDINGS) * had.abs().max()
    return bool(((copy >= had.amin(0) - room) & (copy <= had.amax(0) + room)).all())


def initial_state(run: WholeRun) -> Quantities:
    """Return the optimizer's state with which a run began."""
    before: list[Spans] = [rank.steps[0].moments_before for rank in run.ranks]
    names = {name: None for spans in before for name in spans}
    return {MOMENT + name: [assembled([spans.get(name, ()) for spans in before])[0]] for name in names}


def _unclipped_norm(seen: StepSeen) -> float:
    spans = [span for held in seen.unclipped.values() for span in held]
    return float(sum(float(span.values.double().square().sum()) for span in spans) ** 0.5)


def first_steps(run: WholeRun) -> list[StepSeen]:
    """Return what the ranks saw of the first step."""
    return [rank.steps[0] for rank in run.ranks]
