"""Which rank's and which backward pass's term does a wrong gradient of a training loop lack, or count otherwise?

Each backward pass of each rank adds a term to the gradient of a step; where parameters are whole on every rank, a tensor
hook sees it before anything is reduced. If the gradient of the reference world is the mean of these terms, that of the
other world is taken apart into them (`explanation.contributions`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from fsdp_testing.cases.records import ObservedPiece, ParameterObservation, RankObservation, Snapshot
from fsdp_testing.explain.contributions import contributions, sentence
from fsdp_testing.oracle.gradient_terms import ELSEWHERE, GradientTerm
from fsdp_testing.oracle.quantities import Expected
from fsdp_testing.train.comparison import floor
from fsdp_testing.train.quantities import Kind, Quantities

Terms = Sequence[Mapping[str, torch.Tensor]]
"""What each backward pass of one step added to the gradients of one rank, by name."""


def wrong_term(reference: Quantities, other: Quantities, ranks: Sequence[Sequence[Terms]], roundings: float) -> str:
    """Return what the first wrong gradient is the sum of, in words; empty where that is not certain.

    Args:
        reference: What was observed of the reference world.
        other: What was observed of the other world.
        ranks: Terms that each of its ranks saw, step by step.
        roundings: Admissible difference, in units of roundoff times the largest number of a gradient.
    """
    for step, terms in enumerate(zip(*ranks)):
        wrong = {}
        for key, values in reference.items():
            there = other.get(key, [])
            if key.kind is not Kind.GRADIENT or step >= min(len(values), len(there)):
                continue
            due, got = values[step], there[step]
            bound = floor(due.dtype, roundings) * float(due.abs().max() if due.numel() else 0.0)
            if due.shape != got.shape or not bool((got.double() - due.double()).abs().le(bound).all()):
                wrong[key.name] = due, got, bound
        if wrong:
            return _taken_apart(step, wrong, terms)
    return ""


_Wrong = Mapping[str, tuple[torch.Tensor, torch.Tensor, float]]
"""What is due, what is there, and how far they may be apart."""


def _taken_apart(step: int, wrong: _Wrong, ranks: Sequence[Terms]) -> str:
    size = len(ranks)
    terms = [
        GradientTerm(0, number, rank, {name: {ELSEWHERE: one[name].double()} for name in wrong if name in one})
        for rank, passes in enumerate(ranks)
        for number, one in enumerate(passes)
    ]
    if not terms or not all(_is_mean(name, due, terms, bound) for name, (due, _, bound) in wrong.items()):
        return ""
    seen = {name: _whole(name, got) for name, (_, got, _) in wrong.items()}
    observed = [RankObservation(rank, snapshots=(Snapshot(0, "", seen, {}),)) for rank in range(size)]
    expected = {name: Expected(due.double(), bound) for name, (due, _, bound) in wrong.items()}
    shares = contributions(0, expected, observed, terms)
    if shares is None:
        return ""

    def name_of(_step: int, number: int | None) -> str:
        return "the backward pass" if number is None else f"backward pass {number + 1}"

    return f"Cause: {sentence(shares, size, name_of)}, at step {step}."


def _is_mean(name: str, due: torch.Tensor, terms: Sequence[GradientTerm], bound: float) -> bool:
    """Whether every term has the same share in what is due: else nothing follows from the shares in what is there."""
    parts = [term.uses[name][ELSEWHERE] for term in terms if name in term.uses]
    if len(parts) != len(terms) or any(part.shape != due.shape for part in parts):
        return False
    whole = torch.stack(parts).sum(dim=0)
    square = float(whole.square().sum())
    share = float((whole * due.double()).sum()) / square if square else 0.0
    return share > 0 and bool((share * whole - due.double()).abs().le(bound).all())


def _whole(name: str, gradient: torch.Tensor) -> ParameterObservation:
    piece = ObservedPiece(0, gradient.numel(), gradient.double().reshape(-1))
    return ParameterObservation(name, tuple(gradient.shape), "float64", True, (piece,), (piece,), "float64")
