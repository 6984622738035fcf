"""Compares the losses, outputs and norms of one operation, on every rank."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fsdp_testing.cases.records import FailureKind, Mismatch, OperationResult
from fsdp_testing.judging.checkers.divergence import Compared, Divergence
from fsdp_testing.oracle.quantities import Expected, ExpectedPoint, Quantity
from fsdp_testing.oracle.tensors import difference


def check_results(tally: Compared, point: ExpectedPoint, results: Sequence[OperationResult | None]) -> None:
    """Compare every result of one operation.

    Args:
        tally: Takes what is found.
        point: What the oracle says.
        results: What each rank reports, by rank.
    """
    for quantity, expected in point.quantities.items():
        result = results[quantity.rank]
        actual = None if result is None else result.values.get(quantity.name)
        if actual is None:
            ranks = (quantity.rank,)
            tally.add(Divergence(FailureKind.MISSING, quantity, point.index, ranks, "was not reported"))
        elif expected.value is not None:
            compare_tensor(tally, point, quantity, actual, expected)
    _check_agreement(tally, point, results)


def compare_tensor(
    tally: Compared, point: ExpectedPoint, quantity: Quantity, actual: torch.Tensor, expected: Expected
) -> None:
    """Compare one whole tensor that one rank reports."""
    wanted = expected.value
    if wanted is None:
        return
    tally.count()
    ranks, index = (quantity.rank,), point.index
    if actual.shape != wanted.shape:
        sentence = f"has shape {tuple(actual.shape)}, expected {tuple(wanted.shape)}"
        tally.add(Divergence(FailureKind.DIVERGED, quantity, index, ranks, sentence, Mismatch.SHAPE))
        return
    # The dtype of a norm is each implementation's own affair; its value is not.
    if actual.dtype != wanted.dtype and quantity.name != "total_norm":
        sentence = f"has dtype {_name(actual)}, expected {_name(wanted)}"
        tally.add(Divergence(FailureKind.DIVERGED, quantity, index, ranks, sentence, Mismatch.DTYPE))
        return
    tally.number(point, quantity, ranks, difference(actual, wanted, expected.bound), expected)


def _check_agreement(tally: Compared, point: ExpectedPoint, results: Sequence[OperationResult | None]) -> None:
    """The total norm is one number over all ranks: they must agree to the bit."""
    norms = [result.values["total_norm"] for result in results if result is not None and "total_norm" in result.values]
    differing = tuple(rank for rank, norm in enumerate(norms) if not torch.equal(norm, norms[0]) and not norm.isnan())
    if differing and not tally.divergences:
        quantity = Quantity("result", "total_norm")
        sentence = f"differs between ranks: {', '.join(repr(float(norm)) for norm in norms)}"
        tally.add(Divergence(FailureKind.DISAGREED, quantity, point.index, (0, *differing), sentence))


def _name(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
