"""Combines what all ranks of a world held and computed. Pure."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from fsdp_testing.train.between_steps import are_averaged, with_averages
from fsdp_testing.train.comparison import CLEAR_ROUNDINGS, floor
from fsdp_testing.train.evidence import StepEvidence
from fsdp_testing.train.holdings import Spans
from fsdp_testing.train.on_rank import RankReport
from fsdp_testing.train.quantities import LOSS, NORM, RATE, Kind, Quantities, Quantity, QuantitySpans, spans_of_kind
from fsdp_testing.train.spans import assembled
from fsdp_testing.train.steps import StepSeen

AFTER_THE_LAST = -1
"""Step number of observations at the end of the training."""
_BEFORE_SETTINGS, _AFTER_SETTINGS = (
    (Kind.UNCLIPPED, Kind.GRADIENT),
    (Kind.PARAMETER, Kind.COPIED, Kind.MOMENT, Kind.BUFFER),
)
"""Kinds in the order in which a step makes them, so that of one step the first difference is named."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a parameter of a rank lies in one process.

    Attributes:
        name: Name of the parameter in one process.
        shape: Its shape there.
        dim: The dimension that is cut; None where the rank has all of it.
        index: The slices along `dim` that the rank has.
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
class Disagreement:
    """Ranks that hold different values of a shared quantity; the first of each kind is noted."""

    step: int
    quantity: Quantity
    rank: int

    @property
    def kind(self) -> Kind:
        return self.quantity.kind

    @property
    def decides(self) -> bool:
        """Whether it is always a mistake; ranks may have different gradients and still make one step."""
        return self.kind not in (Kind.GRADIENT, Kind.UNCLIPPED)

    @property
    def moment(self) -> float:
        """Its step; infinite at the end."""
        return math.inf if self.step == AFTER_THE_LAST else self.step

    def __str__(self) -> str:
        when = "at the end" if self.step == AFTER_THE_LAST else f"at step {self.step}"
        return f"{self.quantity} differs between ranks 0 and {self.rank} {when}"


@dataclass(frozen=True, slots=True)
class WholeRun:
    """One run on a world.

    Attributes:
        size: Number of ranks.
        quantities: Rank 0's returned values; for every step all ranks' losses, settings, norms, gradients, parameters, optimizer
            state and buffers; and at the end the parameters and other copies of the weights.
        rows: Digests of the rows of every step, by rank.
        disagreements: The first of each kind.
        ranks: The ranks' reports.
        parts: For each rank the place in one process of each parameter that it has of its own; empty where all have the same, or
            shards of it.
        own: Parameters that each rank has of its own by one name, and that have no known place: these are left out.
        averaged: Whether ranks average their weights after each step: values after it are those of the next forward.
    """

    size: int
    quantities: Quantities
    rows: tuple[tuple[tuple[str, ...], ...], ...]
    disagreements: tuple[Disagreement, ...]
    ranks: tuple[RankReport, ...]
    parts: tuple[Mapping[str, Place], ...] = ()
    own: tuple[str, ...] = ()
    averaged: bool = False

    @property
    def shares_work(self) -> bool:
        """Whether ranks have parts of the model that are never gathered, so that they work on the same rows together."""
        return bool(self.parts) or any(seen.share for seen in first_steps(self))

    def of(self, ranks: Sequence[int]) -> WholeRun:
        """Return the rows that some of the ranks took, and these ranks, as a run of their own."""
        rows = tuple(tuple(step[rank] for rank in ranks) for step in self.rows)
        return replace(self, size=len(ranks), rows=rows, ranks=tuple(self.ranks[rank] for rank in ranks))

    def names(self, *kinds: Kind) -> list[Quantity]:
        return [key for key in self.quantities if key.kind in kinds]

    @property
    def steps(self) -> int:
        return len(self.rows)

    @property
    def seen(self) -> Iterable[StepSeen]:
        """What any rank saw of any step."""
        return (seen for rank in self.ranks for seen in rank.steps)

    @property
    def evidence(self) -> tuple[tuple[StepEvidence, ...], ...]:
        """What explains differences, of each rank, step by step.

        Gradients are as they are without clips, which may hide by what factor they differ.
        """
        apart = min((one.step for one in self.disagreements if one.kind is Kind.GRADIENT), default=self.steps)
        read = [all(seen.of(Kind.GRADIENT) for seen in ranks) for ranks in zip(*(rank.steps for rank in self.ranks))]
        return tuple(
            tuple(_evidence(rank, seen, step < apart and read[step]) for step, seen in enumerate(rank.steps))
            for rank in self.ranks
        )

    def union(self, step: int) -> Counter[str]:
        """Return how often each row was seen by any rank until `step` ended."""
        return Counter(row for rank in self.rows[step] for row in rank)

    def forwards(self) -> int:
        """Return the number of forwards of a rank until its first step."""
        return len(self.ranks[0].steps[0].rows)


def _evidence(rank: RankReport, seen: StepSeen, agreed: bool) -> StepEvidence:
    evidence = replace(seen.evidence, agreed=agreed)
    spans = [span for held in seen.of(Kind.UNCLIPPED).values() for span in held]
    norm = float(sum(float(span.values.double().square().sum()) for span in spans) ** 0.5)
    if norm:
        evidence = replace(evidence, gradient_norm=norm)
    if rank.dropout_off:  # only random draws of a forward make worlds differ
        evidence = replace(evidence, dropout="", drew=seen.drew)
    # A sharded model that has nothing to step by keeps what it does not reduce: its backward passes were local.
    kept = evidence.gathered and seen.losses and not seen.given
    return replace(evidence, local=evidence.backwards) if kept else evidence


def whole(
    size: int, ranks: Sequence[RankReport], own: Collection[str] = (), *, disturbs_averages: bool = False
) -> WholeRun:
    """Combine the reports of all ranks; all made as many steps.

    Args:
        size: Number of ranks.
        ranks: The ranks' reports.
        own: Parameters that each rank has of its own: these are left out.
        disturbs_averages: Whether they average their weights, each rank with roundings of its own.
    """
    quantities: Quantities = {Quantity(Kind.RETURNED, name): values for name, values in ranks[0].returned.items()}
    steps, disagreements = together([rank.steps for rank in ranks], own)
    apart = any(odd.kind is Kind.PARAMETER for odd in disagreements)
    averaged = apart and (disturbs_averages or are_averaged(ranks))
    if averaged:
        ranks = with_averages(ranks)
        steps, disagreements = together([rank.steps for rank in ranks], own)
    quantities |= steps
    for name in {name: None for rank in ranks for name in rank.weights}:
        tensor, odd = assembled([rank.weights.get(name, ()) for rank in ranks])
        key = Quantity(Kind.END, name)
        if name not in own:
            quantities[key] = [tensor]
            if odd is not None and not any(one.kind is Kind.END for one in disagreements):
                disagreements.append(Disagreement(AFTER_THE_LAST, key, odd))
    # Of copies rank 0's count, which it saves: others need not keep any.
    for copy, first in ranks[0].copies.items():
        for name in first:
            tensor = assembled([rank.copies.get(copy, {}).get(name, ()) for rank in ranks])[0]
            if not bool(tensor.isnan().any()):
                quantities[Quantity(Kind.COPY, name, copy)] = [tensor]
    rows = tuple(map(trained_rows, zip(*(rank.steps for rank in ranks))))
    return WholeRun(size, quantities, rows, tuple(disagreements), tuple(ranks), own=tuple(own), averaged=averaged)


def trained_rows(ranks: Sequence[StepSeen]) -> tuple[tuple[str, ...], ...]:
    """Return each rank's rows of a step, without those of idle forwards; all if a rank had none left."""
    trained = [[() if n in seen.idle else rows for n, rows in enumerate(seen.rows)] for seen in ranks]
    forwards = trained if all(map(any, trained)) else [seen.rows for seen in ranks]
    return tuple(tuple(row for rows in each for row in rows) for each in forwards)


def together(ranks: Sequence[Sequence[StepSeen]], own: Collection[str] = ()) -> tuple[Quantities, list[Disagreement]]:
    """Return losses, the optimizer's settings, norms, gradients, parameters, its state and buffers of every step.

    Args:
        ranks: What each rank was seen to do; steps that not every rank made are left out.
        own: Parameters that each rank has of its own: these are left out.

    Returns:
        The quantities, and for each kind the first disagreement of ranks, parameters first. A quantity that is missing at a
        step, such as the state of an optimizer that does not step there, is an empty tensor.
    """
    quantities: Quantities = {}
    first: dict[Kind, Disagreement] = {}
    absent = [torch.empty(0)] * min(map(len, ranks), default=0)

    def put(step: int, key: Quantity, value: torch.Tensor) -> None:
        quantities.setdefault(key, list(absent))[step] = value

    def put_tensors(step: int, seen: Sequence[StepSeen], kinds: Collection[Kind]) -> None:
        for key, tensor, odd in _tensors([rank.after for rank in seen], kinds):
            if key.name in own:
                continue
            if odd is not None:
                first.setdefault(key.kind, Disagreement(step, key, odd))
            # The optimizer has no state of a part that no rank has stepped yet.
            if key.kind is not Kind.MOMENT or not bool(tensor.isnan().any()):
                put(step, key, tensor)

    for step, seen in enumerate(zip(*ranks)):
        ending = [rank for rank in seen if rank.losses]  # of a pipeline the last stage alone has a loss
        if ending:
            loss = torch.tensor([sum(rank.losses) for rank in ending], dtype=torch.float64).mean()
            put(step, LOSS, loss.to(ending[0].loss_dtype))
        if seen[0].norms:
            put(step, NORM, torch.tensor(seen[0].norms, dtype=seen[0].norm_dtype))
        put_tensors(step, seen, _BEFORE_SETTINGS)
        for name, values in seen[0].settings.items():
            put(step, RATE if name == "lr" else Quantity(Kind.SETTING, name), torch.tensor(values, dtype=torch.float64))
        put_tensors(step, seen, _AFTER_SETTINGS)
    order = (*_AFTER_SETTINGS, *_BEFORE_SETTINGS)
    return quantities, [first[kind] for kind in order if kind in first]


def _tensors(
    ranks: Sequence[QuantitySpans], kinds: Collection[Kind]
) -> Iterable[tuple[Quantity, torch.Tensor, int | None]]:
    keys = {key: None for spans in ranks for key in spans}
    for kind in kinds:
        for key in keys:
            if key.kind is kind:
                yield key, *assembled([spans.get(key, ()) for spans in ranks])


def initial(run: WholeRun, steps: int | None = None) -> Quantities:
    """Return the parameters before the first step that has them, of the first so many steps."""
    start: Quantities = {}
    for seen in zip(*(rank.steps[:steps] for rank in run.ranks)):
        for key, tensor, _ in _tensors([rank.before for rank in seen], (Kind.PARAMETER,)):
            start.setdefault(key, [tensor])
    return start


def with_ends(start: Quantities) -> Quantities:
    """Return the parameters before the first step, also under the names of final ones and of models' copies."""
    return start | {Quantity(Kind.END, key.name): values for key, values in start.items()}


def initial_state(run: WholeRun) -> Quantities:
    """Return the optimizer's state with which a run began."""
    before = [seen.before for seen in first_steps(run)]
    return {key: [tensor] for key, tensor, _ in _tensors(before, (Kind.MOMENT,))}


def first_steps(run: WholeRun) -> list[StepSeen]:
    """Return what the ranks saw of the first step; nothing where there was none."""
    return [rank.steps[0] for rank in run.ranks if rank.steps]


def means_of_weights(run: WholeRun) -> set[Quantity]:
    """Return the copies of parameters that lie, number by number, between values that the parameter had: means of weights do.

    Of a variable whose numbers are mostly none, such as one that keeps gradients, none counts: a single number may be by chance.
    """
    copies, means = run.names(Kind.COPY), {key for key in run.names(Kind.COPY) if _is_mean_of_weights(run, key)}
    share = dict.fromkeys((key.part for key in copies), 0)
    for key in copies:
        share[key.part] += run.quantities[key][0].numel() * (1 if key in means else -1)
    return {key for key in means if share[key.part] >= 0}


def _is_mean_of_weights(run: WholeRun, key: Quantity) -> bool:
    copy, parameter = run.quantities[key][0], Quantity(Kind.PARAMETER, key.name)
    values = torch.stack([*initial(run).get(parameter, []), *run.quantities[parameter]])
    room = floor(copy.dtype, CLEAR_ROUNDINGS) * values.abs().max()
    return bool(((copy >= values.amin(0) - room) & (copy <= values.amax(0) + room)).all())


def outdated_copies(run: WholeRun) -> dict[str, int]:
    """Return the copies of weights of which a rank has other numbers than an earlier rank, and that rank.

    Where ranks have other weights, so do their copies: that is told of the weights.
    """
    odd: dict[str, int] = {}
    for name, spans in run.ranks[0].copies.items() if not run.disagreements else ():
        for part in spans if name not in odd else ():
            rank = assembled([rank.copies.get(name, {}).get(part, ()) for rank in run.ranks])[1]
            if rank is not None and part not in run.own:
                odd[name] = rank
    return odd


def outdated_in_use(run: WholeRun) -> str:
    """Say which rank computes with a copy of the weights that differs from an earlier rank's; empty if none does."""
    for name, rank in outdated_copies(run).items():
        if name in run.ranks[rank].called:
            return (
                f"rank {rank} computes with {name!r}, a copy of the weights that has other numbers there than elsewhere. "
                "Update it on every rank, or broadcast it: a teacher, an average or a reference is one model of all ranks."
            )
    return ""


def copies_left_out(reference: WholeRun, run: WholeRun) -> list[str]:
    """Return sentences on the copies of weights, or parts of them, and other modules' buffers that are not compared."""
    sentences, means = [], means_of_weights(reference)
    for name in run.ranks[0].beside:
        rank = assembled([rank.beside.get(name, ()) for rank in run.ranks])[1]
        if rank is not None:
            sentences.append(
                f"the buffer {name!r} outside of the trained model: rank {rank} has other numbers than an earlier rank"
            )
    for name, rank in outdated_copies(run).items():
        sentences.append(f"{name!r} of rank {rank}, which has other numbers than that of another rank")
    for name, spans in run.ranks[0].copies.items():
        keys = [Quantity(Kind.COPY, part, name) for part in spans]
        odd = [key for key in keys if key in reference.quantities and key not in means]
        lacking = [key for key in keys if key not in run.quantities]
        if odd:
            what = "which have the shapes of weights and are no means of them"
            sentences.append(f"{len(odd)} of {len(keys)} tensors of {name!r}, {what}")
        if lacking:
            sentences.append(
                f"{len(lacking)} of {len(keys)} tensors of {name!r}, of which not all ranks keep their parts"
            )
        if not keys:
            sentences.append(f"{name!r}, in which no copy of the weights was found")
    return sentences


def own_parts(ranks: Sequence[RankReport], alone: WholeRun) -> tuple[str, ...]:
    """Return the parameters that each rank has of its own though others have some by the same name, as experts and stages.

    Those with other numbers on some ranks before the first step, or with another shape than in the reference world; and the
    others of their modules, which may begin alike.
    """
    shapes = {key.name: tuple(values[0].shape) for key, values in initial(alone).items()}
    first: dict[str, list[Spans]] = {}
    for seen in zip(*(rank.steps for rank in ranks)):
        before = [spans_of_kind(rank.before, Kind.PARAMETER) for rank in seen]
        for name in {name: None for spans in before for name in spans}:
            first.setdefault(name, before)
    apart = {
        name for name, before in first.items() if assembled([spans.get(name, ()) for spans in before])[1] is not None
    }
    for name, before in first.items():
        shape = next((tuple(span.shape) for spans in before for span in spans.get(name, ())), ())
        if len(ranks) > 1 and shape != shapes.get(name, shape):
            apart.add(name)
    modules = {name.rpartition(".")[0] for name in apart if "." in name}
    return tuple(name for name in first if name in apart or name.rpartition(".")[0] in modules)
