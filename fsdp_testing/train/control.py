"""Checks within one run that the stepped gradient is the gradient of the losses on which backward was called. Pure.

Autograd's gradient of each backward pass of each rank is a term. The optimizer's gradient must be their sum times one factor: a
mean over ranks, over passes, or a sum. This needs no second run, so it finds mistakes that are the same on every number of ranks:
a micro-batch that is lost or counted twice, gradients that are not unscaled, or not cleared. Wrong sums are split into terms
(`explain.contributions`). A gradient that is no sum of terms with small fractions (hand-made gradients, noise, projections) is
reported, and decides nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from fsdp_testing.cases.records import ObservedPiece, ParameterObservation, RankObservation, Snapshot
from fsdp_testing.explain.contributions import Contributions, contributions, sentence
from fsdp_testing.oracle.gradient_terms import ELSEWHERE, GradientTerm
from fsdp_testing.oracle.models import roundoff
from fsdp_testing.oracle.quantities import Expected
from fsdp_testing.train.conventions import MEASURED, flag
from fsdp_testing.train.quantities import Kind, Quantity
from fsdp_testing.train.terms import Terms
from fsdp_testing.train.whole import WholeRun

_ROUNDINGS = 8
"""Of each term, beside one for each that is added up."""
_SAME = 1e-5
"""Relative; factors that are nearer are one."""

Gradients = Mapping[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Control:
    """The control's result on a run; `wrong` is empty if nothing is wrong, `line` says what was compared or why not."""

    wrong: str = ""
    line: str = ""


@dataclass(frozen=True, slots=True)
class _Step:
    """The gradients that one step gets of parameters with terms of the same backward passes, and these terms.

    Attributes:
        number: Number of the step.
        passes: How many passes.
        got: By parameter.
        terms: Terms of each rank, pass by pass; without those that were rightly cleared.
        bounds: How far each may be off.
        sample: The terms of rank 0 as they were seen.
        cleared: For each pass the parameters whose gradient was gone before the next pass or the step.
    """

    number: int
    passes: int
    got: Gradients
    terms: list[list[Gradients]]
    bounds: Mapping[str, float]
    sample: Terms
    cleared: Sequence[frozenset[str]]

    def without_measured(self) -> _Step:
        """Return the step without earlier passes that were cleared as a whole."""
        terms = [
            [
                {} if n < len(rank) - 1 and {*passed} <= gone else passed
                for n, (passed, gone) in enumerate(zip(rank, self.cleared))
            ]
            for rank in self.terms
        ]
        return replace(self, terms=terms, passes=max(sum(map(bool, terms[0])), 1))

    def total(self, name: str) -> torch.Tensor:
        parts = [terms[name].double() for rank in self.terms for terms in rank if name in terms]
        return torch.stack(parts).sum(0) if parts else torch.zeros_like(self.got[name])


def control(run: WholeRun, *, measures: bool = False) -> Control:
    """Compare each of the first steps of a run with the gradients of its backward passes.

    Args:
        run: A run in any world.
        measures: Whether a pass does not count if all its gradients are cleared before the step.
    """
    if run.shares_work or run.own:
        return Control(line="not compared with what backward gave: ranks share the work on each row")
    sentences: dict[int, str] = {}
    times: dict[str, dict[int, None]] = {}
    previous: dict[frozenset[str], Gradients] = {}
    warm_up = False
    for step in _steps(run):
        names = frozenset(step.got)
        wrong, factor = _wrong(step, run.size, previous.get(names))
        if wrong and measures:
            step = step.without_measured()
            factor = _factor(step.got, step)
            factor = factor and factor * run.size * step.sample.scale
            wrong = wrong if factor is None else _wrong_factor(step, factor, run.size)
        stepped = {name: run.quantities.get(Quantity(Kind.GRADIENT, name), []) for name in names}
        previous[names] = {n: v[step.number].double().reshape(-1) for n, v in stepped.items() if step.number < len(v)}
        # A pass cleared only before the first step may have been a warm-up.
        warm_up |= bool(wrong) and step.number == 0 and any(step.cleared)
        sentences[step.number] = sentences.get(step.number) or wrong
        if factor is not None:
            times.setdefault(_words(factor, run.size, step.passes), {})[step.number] = None
    wrong_steps = [number for number, words in sentences.items() if words]
    if wrong_steps and not (warm_up and wrong_steps == [0] and len(sentences) > 1):
        return Control(sentences[wrong_steps[0]])
    if not times:
        return Control(line=_NO_SUM if sentences else _NOT_SEEN)
    told = "; ".join(f"{words} (at step {', '.join(map(str, steps))})" for words, steps in times.items())
    return Control(line=f"compared with what autograd gave in backward: the stepped gradient is {told}")


def is_mean_of_passes(run: WholeRun) -> bool:
    """Whether the stepped gradient is the mean of a step's backward passes, as of a script that divides gradients itself."""
    factors = [(_wrong(step, run.size, None)[1], step.passes) for step in _steps(run)]
    return bool(factors) and all(factor is not None and abs(factor * passes - 1) < _SAME for factor, passes in factors)


_NO_SUM = "not compared with what backward gave: gradients are changed by hand, and are not a simple sum of it"
_NOT_SEEN = "not compared with what backward gave: no module was seen to use its own parameters as attributes"


def _words(factor: float, size: int, passes: int) -> str:
    of_ranks = "" if size == 1 else "the mean over ranks of "
    of_passes = f"the sum of {passes} backward passes" if passes > 1 else "the backward pass"
    known = {1 / passes: f"{of_ranks}the mean of {passes} backward passes"} | {1.0: f"{of_ranks}{of_passes}"}
    known |= {float(size): f"the sum over ranks of {of_passes}"} if size > 1 else {}
    near = [words for value, words in known.items() if abs(factor / value - 1) < _SAME]
    return near[0] if near else f"{factor:.6g} times {of_ranks}{of_passes}"


def _steps(run: WholeRun) -> Iterator[_Step]:
    """Yield the steps in which every rank saw terms, and all ranks have the same gradient."""
    kind = Kind.UNCLIPPED if run.names(Kind.UNCLIPPED) else Kind.GRADIENT
    apart = min((odd.step for odd in run.disagreements if odd.kind in (kind, Kind.PARAMETER)), default=run.steps)
    for number in range(apart):
        ranks = [rank.steps[number].terms for rank in run.ranks]
        # Other tensors that an optimizer steps have gradients of their own.
        strange = any(rank.steps[number].strange for rank in run.ranks)
        if strange or any(not terms.passes or not terms.scale for terms in ranks):
            continue
        names = dict.fromkeys(name for terms in ranks for one in terms.passes for name in one)
        values = {name: run.quantities.get(Quantity(kind, name), []) for name in names}
        got = {n: v[number].reshape(-1) for n, v in values.items() if number < len(v) and v[number].numel()}
        sizes = {(n, one[n].numel()) for terms in ranks for one in terms.passes for n in one if n in got}
        finite = all(bool(one[n].isfinite().all()) for terms in ranks for one in terms.passes for n in one)
        if not got or not finite or any(got[n].numel() != count or not got[n].isfinite().all() for n, count in sizes):
            continue
        # A script that clears the gradient of some parameters trains the others with it.
        filled = {name: value for name, value in got.items() if bool(value.any())}
        got = {n: v.double() for n, v in (filled or got).items()}
        cleared = _cleared(ranks)
        due = [_due(terms, cleared, got) for terms in ranks]
        bounds = _bounds(run, kind, number, ranks, got)
        # A change of only some parts of the model does not concern the passes.
        groups: dict[tuple[int, ...], dict[str, torch.Tensor]] = {}
        for name, value in got.items():
            groups.setdefault(tuple(at for at, one in enumerate(due[0]) if name in one), {})[name] = value
        for own, group in groups.items():
            yield _Step(number, max(len(own), 1), group, due, bounds, ranks[0], cleared)


def _cleared(ranks: Sequence[Terms]) -> list[frozenset[str]]:
    """Return, for each pass, the parameters whose gradient is gone on all ranks: each rank has a shard, which may be empty."""
    cleared = []
    for number in range(max(len(terms.passes) for terms in ranks)):
        there = [terms for terms in ranks if number < len(terms.passes)]
        filled = {name for terms in there for name, value in terms.passes[number].items() if bool(value.any())}
        gone = [terms.cleared[number] | (filled - {*terms.passes[number]}) for terms in there]
        cleared.append(frozenset(filled).intersection(*gone))
    return cleared


def _due(terms: Terms, cleared: Sequence[frozenset[str]], got: Gradients) -> list[Gradients]:
    """Return the due terms, without cleared ones of a pass that was used otherwise or after which weights moved."""
    due: list[Gradients] = []
    for passed, gone, moved in zip(terms.passes, cleared, terms.moved):
        lost = {name for name in passed if name in got} <= gone
        used = moved or not {*passed} <= gone
        due.append({n: v for n, v in passed.items() if n in got and not (n in gone and (used if lost else True))})
    return due


def _bounds(run: WholeRun, kind: Kind, number: int, ranks: Sequence[Terms], got: Gradients) -> dict[str, float]:
    count = _ROUNDINGS + sum(len(terms.passes) for terms in ranks)
    bounds = {}
    for name in got:
        unit = max(roundoff(run.quantities[Quantity(kind, name)][number].dtype), *(terms.roundoff for terms in ranks))
        largest = sum(float(one[name].abs().max()) for terms in ranks for one in terms.passes if name in one)
        bounds[name] = count * unit * largest * ranks[0].block ** 0.5
    return bounds


def _wrong(step: _Step, size: int, previous: Gradients | None) -> tuple[str, float | None]:
    """Return what is wrong with the gradient of a step, and which multiple of the ranks' mean it is, if it is one."""
    passes, unit = step.passes, size * step.sample.scale
    at = f"at step {step.number}"
    if not any(bool(value.any()) for value in step.got.values()):
        if not any(bool(step.total(name).any()) for name in step.got):
            return "", None
        return (
            f"the stepped gradient {at} lacks every backward pass, though {passes} ran on each rank: it is zero. "
            "Cause: gradients are cleared before the step, or the code that accumulates them loses them. Clear after "
            "the step."
        ), None
    # A factor that is fitted to gradients of low precision is never exact.
    factor = 1 / unit if _is_multiple(step.got, 1 / unit, step) else _factor(step.got, step)
    if factor is not None:
        times = factor * unit
        return _wrong_factor(step, times, size), times
    if previous is not None and {*previous} == {*step.got}:
        rest = {name: value - previous[name] for name, value in step.got.items()}
        if _factor(rest, step) is not None:
            return (
                f"the stepped gradient {at} still contains the gradient of the step before. Cause: gradients are not "
                "cleared between steps. Call optimizer.zero_grad() once for each step."
            ), None
    shares = taken_apart(step.got, {n: step.total(n) / unit for n in step.got}, step.terms, step.bounds)
    if shares is None or not _is_wrong(shares):
        return "", None
    words = sentence(shares, size, backward_pass)
    why = (
        "Cause: optimizer.zero_grad() is called between the micro-batches. Clear once for each step, after it. If it "
        f"is not a micro-batch, its gradients are read and cleared. {flag(MEASURED)}"
        if any(step.cleared)
        else "Cause: the code that accumulates gradients over backward passes loses some, or counts them wrongly."
    )
    return f"{words}, {at}: it is not the sum of autograd's gradients. {why}", None


def _wrong_factor(step: _Step, times: float, size: int) -> str:
    sample, passes = step.sample, step.passes
    sound = {1.0, float(size), 1 / passes, size / passes}
    unscaled = any(abs(times / value - 1) < _SAME for value in sound)
    scaled = any(abs(times / sample.scale / value - 1) < _SAME for value in sound)
    if sample.scale != 1 and scaled and not unscaled and not sample.unscales:
        return (
            f"the gradient at step {step.number} is {sample.scale:.6g} times that of the loss: GradScaler multiplied the loss, "
            "and the gradient is not unscaled when it is clipped or stepped. Cause: the optimizer is stepped, or gradients are "
            "clipped, before unscale. Call scaler.unscale_(optimizer) before clipping, and scaler.step(optimizer)."
        )
    if sample.engine and abs(times - 1) > _SAME:
        return (
            f"the gradient that DeepSpeed steps at step {step.number} is {times:.6g} times the mean over ranks of what autograd "
            f"gave in {passes} backward passes. Cause: the engine does not divide or reduce exactly once."
        )
    return ""


def _is_wrong(shares: Contributions) -> bool:
    """Whether passes count differently from one another; ranks may be weighted by their tokens."""
    by_rank: dict[int, set[object]] = {}
    for weight in shares.weights:
        by_rank.setdefault(weight.rank, set()).add(weight.got)
    return any(len(weights) > 1 or 0 in weights for weights in by_rank.values())


def _factor(got: Gradients, step: _Step) -> float | None:
    """Return the factor by which the gradients are the sum of all terms; None if there is none."""
    total = {name: step.total(name) for name in got}
    square = sum(float(value.square().sum()) for value in total.values())
    factor = sum(float((got[name] * value).sum()) for name, value in total.items()) / square if square else 0.0
    return factor if factor > 0 and _is_multiple(got, factor, step) else None


def _is_multiple(got: Gradients, factor: float, step: _Step) -> bool:
    """Return whether the gradients are the sum of all terms times the factor, within their bounds."""
    return all(
        bool(((value - factor * step.total(name)).abs() <= step.bounds[name] * max(1.0, abs(factor))).all())
        for name, value in got.items()
    )


def taken_apart(
    got: Gradients, due: Gradients, ranks: Sequence[Sequence[Gradients]], bounds: Mapping[str, float], unit: float = 0.0
) -> Contributions | None:
    """Return the terms that gradients are the sum of, where the right ones are the mean of all; None if that is not certain.

    Args:
        got: By parameter.
        due: Likewise.
        ranks: Terms that each rank saw, pass by pass.
        bounds: How far each may be off.
        unit: Roundoff of the narrowest dtype that terms are added up in.
    """
    terms = [
        GradientTerm(0, number, rank, {name: {ELSEWHERE: one[name].double()} for name in got if name in one})
        for rank, passes in enumerate(ranks)
        for number, one in enumerate(passes)
    ]
    seen = {name: _observation(name, value.reshape(-1)) for name, value in got.items()}
    observed = [RankObservation(rank, snapshots=(Snapshot(0, "", seen, {}),)) for rank in range(len(ranks))]
    expected = {name: Expected(due[name].double().reshape(-1), bounds[name]) for name in got}
    return contributions(0, expected, observed, terms, unit)


def backward_pass(_step: int, number: int | None) -> str:
    """Return the name of a term."""
    return "the backward pass" if number is None else f"backward pass {number + 1}"


def _observation(name: str, gradient: torch.Tensor) -> ParameterObservation:
    piece = ObservedPiece(0, gradient.numel(), gradient.double())
    return ParameterObservation(name, (gradient.numel(),), "float64", True, (piece,), (piece,), "float64")
