"""Finds which terms a wrong gradient contains, and how often each.

A gradient is a sum of terms: one for each backward of each rank (and, where needed, for each use of the parameter). One
process knows them one by one. The wrong numbers are decomposed into them by least squares: where the terms are linearly
independent the weights are unique, and those of a sound gradient are all the same. Weights count as an explanation only if they
are simple fractions, and if the sum with exactly these weights equals the ranks' numbers within the bound.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

import torch

from fsdp_testing.cases.records import Case, RankObservation
from fsdp_testing.judging.checkers.explain import ranks_text
from fsdp_testing.oracle.gradient_terms import ELSEWHERE, GradientTerm, Use
from fsdp_testing.oracle.quantities import Expected

_LARGEST_DENOMINATOR = 64
_NEAR = 1e-6
"""The largest distance between a weight and its fraction, if it is 1. The bound of the comparison decides whether it is right."""
_DEPENDENT = 1e-9
"""Singular values below this share of the largest: terms that cannot be distinguished."""

Gradients = Mapping[str, torch.Tensor]
_Key = tuple[int, int, int, Use | None]
"""Operation, micro-batch, rank and use."""


@dataclass(frozen=True, slots=True)
class Weight:
    """How often one term counts, where 1 is the weight of a term in a sound gradient.

    Attributes:
        operation: Index of the operation with the backward.
        micro_batch: Index of the micro-batch in it.
        rank: The rank whose inputs were used.
        use: The use of the parameter; None for all of them.
        due: 1, or 0 for a term that does not belong to the gradient (one that was cleared).
        got: The weight in the ranks' gradient.
    """

    operation: int
    micro_batch: int
    rank: int
    use: Use | None
    due: Fraction
    got: Fraction


@dataclass(frozen=True, slots=True)
class Contributions:
    """The terms of a wrong gradient.

    Attributes:
        weights: Weights of every term.
        fqns: The parameters with these weights.
        uses: How often each backward used each of these parameters; 0 if not all of them equally often.
        ranks: The ranks whose gradient this is; empty for all.
    """

    weights: tuple[Weight, ...]
    fqns: tuple[str, ...]
    uses: int
    ranks: tuple[int, ...] = ()

    @property
    def wrong(self) -> tuple[Weight, ...]:
        """The terms with a wrong weight."""
        return tuple(weight for weight in self.weights if weight.got != weight.due)

    @property
    def shape(self) -> frozenset[tuple[Fraction, Fraction]]:
        """The kinds of wrong weights: equal for one defect on any model."""
        return frozenset((weight.due, weight.got) for weight in self.wrong)


def contributions(
    index: int,
    expected: Mapping[str, Expected],
    ranks: Sequence[RankObservation],
    terms: Sequence[GradientTerm],
    unit_roundoff: float = 0.0,
) -> Contributions | None:
    """Return the terms of the wrong gradients after operation `index`, or None if they are not certain.

    Args:
        index: Operation after which gradients are wrong.
        expected: What each wrong gradient should be (zeros where one process has none), with its bound.
        ranks: The ranks' reports.
        terms: What each backward added, in one process.
        unit_roundoff: Unit roundoff of the narrowest dtype in which they are added up, where bounds do not allow for another sum.
    """
    due = {fqn: expectation.value for fqn, expectation in expected.items() if expectation.value is not None}
    flats = [_flat(rank, index, due) for rank in ranks]
    everything = _merged(flats)
    by_rank = [(rank, flat) for rank, flat in enumerate(flats) if any(bool((~v.isnan()).any()) for v in flat.values())]
    for fqns in dict.fromkeys(((*due,), *((fqn,) for fqn in due))):
        wanted = {fqn: expected[fqn] for fqn in fqns}
        for by_use in (False, True):
            columns = _columns(terms, fqns, due, by_use=by_use)
            if everything is not None:
                weights = _decoded(columns, wanted, everything, len(ranks), unit_roundoff)
                if weights is not None and _any_wrong(weights):
                    return Contributions(weights, fqns, _uses(terms, fqns))
            parts = [(rank, _decoded(columns, wanted, flat, len(ranks), unit_roundoff)) for rank, flat in by_rank]
            if parts and all(weights is not None for _, weights in parts):
                return _first_wrong(parts, fqns, _uses(terms, fqns))
        if everything is not None:
            columns = _columns(terms, fqns, due, by_use=False)
            weights = _decoded_over_ranks(columns, wanted, everything, len(ranks), unit_roundoff)
            if weights is not None and _any_wrong(weights):
                return Contributions(weights, fqns, _uses(terms, fqns))
    return None


def _decoded_over_ranks(
    columns: Mapping[_Key, Gradients], wanted: Mapping[str, Expected], got: Gradients, size: int, unit_roundoff: float
) -> tuple[Weight, ...] | None:
    """The weights, if every rank's term of a backward counts alike: fewer unknowns than terms where a gradient is small."""
    sums: dict[_Key, dict[str, torch.Tensor]] = {}
    for (operation, micro_batch, _, _), column in columns.items():
        nothing = {fqn: torch.zeros_like(column[fqn]) for fqn in wanted}
        summed = sums.setdefault((operation, micro_batch, -1, None), nothing)
        for fqn in wanted:
            summed[fqn] += column[fqn]
    # With as many unknowns as equations some weights always fit.
    certain = sum(int(got[fqn].isfinite().sum()) for fqn in wanted) > len(sums)
    decoded = _decoded(sums, wanted, got, size, unit_roundoff) if certain else None
    if decoded is None:
        return None
    by_batch = {(weight.operation, weight.micro_batch): weight for weight in decoded}
    return tuple(Weight(*key, by_batch[key[:2]].due, by_batch[key[:2]].got) for key in columns)


def _first_wrong(
    parts: Sequence[tuple[int, tuple[Weight, ...] | None]], fqns: tuple[str, ...], uses: int
) -> Contributions | None:
    """The weights of the first rank with wrong ones, and the other ranks that have the same."""
    for _, weights in parts:
        if weights is not None and _any_wrong(weights):
            ranks = tuple(number for number, weights_of in parts if weights_of == weights)
            return Contributions(weights, fqns, uses, ranks if len(ranks) < max(len(parts), 2) else ())
    return None


def _any_wrong(weights: Iterable[Weight]) -> bool:
    return any(weight.got != weight.due for weight in weights)


def _uses(terms: Iterable[GradientTerm], fqns: Iterable[str]) -> int:
    counts = {len(term.uses[fqn]) for term in terms for fqn in fqns if fqn in term.uses}
    return counts.pop() if len(counts) == 1 else 0


def _flat(rank: RankObservation, index: int, due: Gradients) -> dict[str, torch.Tensor]:
    """The gradients of one rank, flat and in float64; elements that it does not have are NaN."""
    snapshot = next((reported for reported in rank.snapshots if reported.index == index), None)
    result: dict[str, torch.Tensor] = {}
    for fqn, expected in due.items():
        flat = torch.full((expected.numel(),), torch.nan, dtype=torch.float64)
        parameter = snapshot.parameters.get(fqn) if snapshot is not None else None
        if parameter is not None:
            for piece in parameter.pieces if parameter.grad_pieces is None else parameter.grad_pieces:
                # A missing gradient contains no term.
                flat[piece.start : piece.stop] = 0.0 if parameter.grad_pieces is None else piece.value.double()
        result[fqn] = flat
    return result


def _merged(ranks: Sequence[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor] | None:
    """The ranks' gradients put together; None if they contradict one another."""
    merged = {fqn: flat.clone() for fqn, flat in ranks[0].items()}
    for gradients in ranks[1:]:
        for fqn, flat in gradients.items():
            both = ~flat.isnan() & ~merged[fqn].isnan()
            if not torch.equal(flat[both], merged[fqn][both]):
                return None
            merged[fqn] = torch.where(merged[fqn].isnan(), flat, merged[fqn])
    return merged


def _columns(
    terms: Iterable[GradientTerm], fqns: Sequence[str], due: Gradients, *, by_use: bool
) -> dict[_Key, dict[str, torch.Tensor]]:
    """The terms, flat; terms that contribute nothing to these parameters are left out."""
    columns: dict[_Key, dict[str, torch.Tensor]] = {}
    for term in terms:
        for fqn in fqns:
            for use, value in term.uses.get(fqn, {}).items():
                key = (term.operation, term.micro_batch, term.rank, use if by_use else None)
                column = columns.setdefault(key, {f: torch.zeros(due[f].numel(), dtype=torch.float64) for f in fqns})
                column[fqn] += value.reshape(-1)
    return {key: column for key, column in columns.items() if any(bool(part.any()) for part in column.values())}


def _decoded(
    columns: Mapping[_Key, Gradients], wanted: Mapping[str, Expected], got: Gradients, size: int, unit_roundoff: float
) -> tuple[Weight, ...] | None:
    """The weights of the terms in `got`; None if they are not unique, no fractions, or do not give these numbers."""
    due = torch.cat([one.value.double().reshape(-1) for one in wanted.values() if one.value is not None])
    bound = torch.cat([_bound(one) for one in wanted.values()])
    have = torch.cat([got[fqn] for fqn in wanted])
    known = have.isfinite() & due.isfinite()
    if not columns or int(known.sum()) < len(columns):
        return None
    matrix = torch.stack([torch.cat([column[fqn] for fqn in wanted]) for column in columns.values()], dim=1)[known]
    largest = matrix.abs().amax(dim=0)
    if not bool((largest > 0).all()) or not _independent(matrix / largest) or bool(have[~known].isinf().any()):
        return None
    solver = torch.linalg.pinv(matrix / largest) / largest[:, None]
    solved = solver @ torch.stack([due, have], dim=1)[known]
    # A sound term counts once in the mean over ranks; if no term is expected, this is the only reference.
    unit = float(solved[:, 0].abs().max()) if bool(due[known].any()) else 1.0 / size
    # Rounded each time that a term is added, divided or cast.
    rounded = (len(columns) + size + 2) * unit_roundoff * unit * matrix.abs().sum(dim=1)
    often = max(1.0, float(solved[:, 1].abs().max()) / unit)
    apart = often * max(_NEAR, float((solver.abs() @ rounded).max()) / unit)
    denominator = min(_LARGEST_DENOMINATOR, math.isqrt(int(1 / (2 * apart))))
    if denominator < 2 * size:
        return None
    pairs = [[_fraction(float(value) / unit, denominator, apart) for value in solved[:, side]] for side in (0, 1)]
    expected, weights = pairs
    if None in weights or set(expected) - {Fraction(0), Fraction(1)}:
        return None
    exact = torch.tensor([float(weight or 0) for weight in weights], dtype=torch.float64)
    room = (bound[known] + rounded) * max(1.0, float(exact.abs().max()))
    if not bool(((matrix @ (exact * unit) - have[known]).abs() <= room).all()):
        return None
    return tuple(
        Weight(*key, one or Fraction(0), two or Fraction(0)) for key, one, two in zip(columns, expected, weights)
    )


def _bound(expected: Expected) -> torch.Tensor:
    like = torch.zeros_like(expected.value, dtype=torch.float64) if expected.value is not None else torch.zeros(0)
    return (like + expected.bound).reshape(-1)


def _independent(matrix: torch.Tensor) -> bool:
    spread = torch.linalg.svdvals(matrix)
    return float(spread[-1]) > _DEPENDENT * float(spread[0])


def _fraction(value: float, denominator: int, apart: float) -> Fraction | None:
    """The one fraction that `value` can be, of those with small denominators; two of them are further apart."""
    near = Fraction(value).limit_denominator(denominator)
    return near if abs(float(near) - value) <= apart else None


# ---------------------------------------------------------------------------------------------------------- sentences


BatchName = Callable[[int, int | None], str]
"""What a sentence calls a micro-batch of an operation; its number is None where the operation has only one."""


def of_program(case: Case) -> BatchName:
    """Return the names of the micro-batches of a program."""

    def name(operation: int, micro_batch: int | None) -> str:
        which = "" if micro_batch is None else f"micro-batch {micro_batch} of "
        return f"{which}operation {operation}, {case.program[operation].words()},"

    return name


def sentence(sums: Contributions, size: int, name_of: BatchName) -> str:
    """Return what is wrong with the sum, such as "the gradient of a on rank 1 lacks operation 0 of rank 2"."""
    name = sums.fqns[0] if len(sums.fqns) == 1 else f"{sums.fqns[0]} (and of {len(sums.fqns) - 1} more)"
    where = f" on {ranks_text(sums.ranks)}" if sums.ranks else ""
    return f"the gradient of {name}{where} {', and '.join(_clauses(sums, size, name_of))}"


def _clauses(sums: Contributions, size: int, name_of: BatchName) -> list[str]:
    due = [weight for weight in sums.weights if weight.due]
    factors = {weight.got for weight in due}
    if (
        len(factors) == 1
        and factors != {Fraction(1)}
        and not any(weight.got for weight in sums.weights if not weight.due)
    ):
        return [_of_all(sums, next(iter(factors)), size)]
    clauses = []
    counted = [weight for weight in due if weight.got]
    if size > 1 and sums.ranks and {weight.rank for weight in counted} == set(sums.ranks) and len(sums.ranks) == 1:
        scale = "" if factors == {Fraction(0), Fraction(size)} else ", divided by the number of ranks"
        return [f"comes from this rank's inputs alone, not reduced over the ranks{scale}"]
    for factor in sorted(factors - {Fraction(1)}):
        terms = _terms(name_of, sums, [weight for weight in due if weight.got == factor])
        clauses.append(f"lacks {terms.rstrip(',')}" if not factor else f"counts {terms} {_times(factor)}")
    extra = [weight for weight in sums.weights if not weight.due and weight.got]
    if extra:
        often = {weight.got for weight in extra}
        terms = f"{_terms(name_of, sums, extra).rstrip(',')}, which was cleared"
        clauses.append(
            f"still contains {terms}" if often == {Fraction(1)} else f"still counts {terms}, {_times(max(often))}"
        )
    return clauses


def _of_all(sums: Contributions, factor: Fraction, size: int) -> str:
    """Every term counts so many times; "as if" says what would do that, and no more."""
    if not factor:
        return "lacks every term"
    often = f"{factor} times the right values" if factor > 1 else f"{factor} of the right values"
    if factor.numerator > _LARGEST_DENOMINATOR:
        return f"is {often}"  # no number of ranks or uses
    busy = len({weight.rank for weight in sums.weights if weight.due})
    if sums.uses > 1 and factor in (sums.uses, Fraction(1, sums.uses)):
        return f"is {often}, as if its {sums.uses} uses were {'multiplied' if factor > 1 else 'averaged'}"
    if busy < size and factor == Fraction(size, busy):
        ranks = "the 1 rank that contributes" if busy == 1 else f"the {busy} ranks that contribute"
        return f"is {often}, as if divided by {ranks} instead of all {size}"
    divisor = size / factor
    return f"is {often}" + (
        f", as if the sum over ranks were divided by {divisor} instead of {size}" * (divisor.denominator == 1)
    )


def _times(factor: Fraction) -> str:
    return {Fraction(2): "twice"}.get(factor, f"{factor} times")


def _terms(name_of: BatchName, sums: Contributions, wanted: Sequence[Weight]) -> str:
    """Terms in words: whole ranks and whole micro-batches by their name, else one by one."""
    chosen, peers = {_key(w) for w in wanted}, [w for w in sums.weights if w.due == wanted[0].due]
    for name, part in (
        ("rank", lambda w: w.rank),
        ("batch", lambda w: (w.operation, w.micro_batch)),
        ("use", lambda w: w.use),
    ):
        values = dict.fromkeys(part(w) for w in wanted)
        whole = {_key(w) for w in peers if part(w) in values}
        if whole == chosen and (name == "batch" or len(values) < len({part(w) for w in peers})):
            return _listed([_named(name_of, sums, name, value) for value in values])
    return _listed([_one(name_of, sums, weight) for weight in wanted])


def _named(name_of: BatchName, sums: Contributions, name: str, value: object) -> str:
    if name == "rank":
        return f"the inputs of rank {value}"
    if name == "use":
        return _use(value)
    assert isinstance(value, tuple)
    return _batch(name_of, sums, *value)


def _one(name_of: BatchName, sums: Contributions, weight: Weight) -> str:
    parts = [_batch(name_of, sums, weight.operation, weight.micro_batch), f"of rank {weight.rank}"]
    return " ".join(parts if weight.use is None else [*parts, f"({_use(weight.use)})"])


def _batch(name_of: BatchName, sums: Contributions, operation: int, micro_batch: int) -> str:
    several = any(weight.operation == operation and weight.micro_batch for weight in sums.weights)
    return name_of(operation, micro_batch if several else None)


def _use(use: object) -> str:
    assert isinstance(use, tuple)
    return (
        "its use outside modules" if use == ELSEWHERE else f"its use in call {use[1]} of {use[0] or 'the root module'}"
    )


def _listed(words: Sequence[str], most: int = 4) -> str:
    shown = [*words[:most], *([f"{len(words) - most} more"] if len(words) > most else [])]
    return shown[0] if len(shown) == 1 else f"{' '.join(shown[:-1])} and {shown[-1]}"


def _key(weight: Weight) -> _Key:
    return weight.operation, weight.micro_batch, weight.rank, weight.use
