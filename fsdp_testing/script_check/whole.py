"""What did a whole world compute and see, put together from its ranks? Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from fsdp_testing.checkers.tensors import same_bits
from fsdp_testing.script_check.launched import RankReport
from fsdp_testing.training_check.comparison import Quantities
from fsdp_testing.training_check.evidence import StepEvidence
from fsdp_testing.training_check.observation import Span, Spans, StepSeen

GRADIENT, PARAMETER = "gradient of ", "parameter "


@dataclass(frozen=True, slots=True)
class Disagreement:
    """Ranks that hold different numbers of what they share; `gradient` where parameters agree all the same."""

    step: int
    name: str
    rank: int
    gradient: bool

    def __str__(self) -> str:
        return f"{self.name} differs between ranks 0 and {self.rank} at step {self.step}"


@dataclass(frozen=True, slots=True)
class WholeRun:
    """One run of a world.

    Attributes:
        size: Number of ranks.
        quantities: By name, of every step: losses, learning rates, norms, gradients, parameters.
        rows: Of every step, for each rank, the digests of its rows.
        disagreements: The first of parameters, and the first of gradients.
        ranks: What each rank reported.
    """

    size: int
    quantities: Quantities
    rows: tuple[tuple[tuple[str, ...], ...], ...]
    disagreements: tuple[Disagreement, ...]
    ranks: tuple[RankReport, ...]

    @property
    def steps(self) -> int:
        return len(self.rows)

    @property
    def evidence(self) -> tuple[tuple[StepEvidence, ...], ...]:
        """What each rank saw; dropout was off, and only what a forward draws makes worlds differ."""
        return tuple(
            tuple(replace(one, dropout="", drew=seen.drew) for one, seen in zip(rank.evidence, rank.steps))
            for rank in self.ranks
        )

    def union(self, step: int) -> Counter[str]:
        """Return how often each row was seen by any rank until `step` ended."""
        return Counter(row for rank in self.rows[step] for row in rank)

    def forwards(self) -> int:
        """Return the number of forwards of a rank until its first step."""
        return len(self.ranks[0].steps[0].rows)


def whole(size: int, ranks: Sequence[RankReport]) -> WholeRun:
    """Put the reports of all ranks together; all made as many steps."""
    count = min(len(rank.steps) for rank in ranks)
    quantities: Quantities = {}
    found: dict[bool, Disagreement] = {}

    def add(name: str, value: torch.Tensor) -> None:
        quantities.setdefault(name, []).append(value)

    for step in range(count):
        seen = [rank.steps[step] for rank in ranks]
        add("loss", torch.tensor([sum(one.losses) for one in seen], dtype=torch.float64).mean())
        if seen[0].norms:
            add("norm that clip_grad_norm_ gave", torch.tensor(seen[0].norms, dtype=torch.float64))
        for what, spans in ((GRADIENT, [one.gradients for one in seen]), (PARAMETER, [one.parameters for one in seen])):
            for name in spans[0]:
                tensor, odd = assembled([rank.get(name, ()) for rank in spans])
                if odd is not None:
                    gradient = what == GRADIENT
                    found.setdefault(gradient, Disagreement(step, what + name, odd, gradient))
                add(what + name, tensor)
            if what == GRADIENT:
                add("learning rate", torch.tensor(seen[0].rates, dtype=torch.float64))
    rows = tuple(
        tuple(tuple(row for forward in rank.steps[step].rows for row in forward) for rank in ranks)
        for step in range(count)
    )
    return WholeRun(size, quantities, rows, tuple(found.values()), tuple(ranks))


def assembled(ranks: Sequence[tuple[Span, ...]]) -> tuple[torch.Tensor, int | None]:
    """Return the whole tensor, NaN where no rank has any of it, and the first rank that contradicts an earlier one."""
    spans = [(rank, span) for rank, held in enumerate(ranks) for span in held]
    if not spans:
        return torch.full((), torch.nan), None
    _, (shape, _, _, sample) = spans[0]
    full = torch.full((torch.Size(shape).numel(),), torch.nan, dtype=sample.dtype)
    known, odd = torch.zeros(full.numel(), dtype=torch.bool), None
    for rank, (_, start, stop, values) in spans:
        here = slice(start, stop)
        again = known[here]
        if odd is None and bool(again.any()) and not same_bits(full[here][again], values[again]):
            odd = rank
        full[here] = torch.where(again, full[here], values)
        known[here] = True
    return full.view(shape), odd


def initial(run: WholeRun) -> Quantities:
    """Return the parameters with which a run began."""
    before: list[Spans] = [rank.steps[0].before for rank in run.ranks]
    return {PARAMETER + name: [assembled([spans.get(name, ()) for spans in before])[0]] for name in before[0]}


def first_steps(run: WholeRun) -> list[StepSeen]:
    """Return what the ranks saw of the first step."""
    return [rank.steps[0] for rank in run.ranks]
