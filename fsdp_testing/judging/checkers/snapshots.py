"""Compares one point of the program: losses, outputs and norms on every rank, or the ranks' pieces of their state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

import torch

from fsdp_testing.cases.records import FailureKind, Mismatch, ObservedPiece, ParameterObservation, Snapshot
from fsdp_testing.judging.checkers.divergence import Compared, Divergence
from fsdp_testing.oracle.assemble import Assembled, assemble
from fsdp_testing.oracle.quantities import Expected, ExpectedPoint, Quantity
from fsdp_testing.oracle.tensors import difference

if TYPE_CHECKING:
    from fsdp_testing.oracle.quantities import Comparison


from fsdp_testing.cases.records import OperationResult


def check_results(tally: Compared, point: ExpectedPoint, results: Sequence[OperationResult | None]) -> None:
    """Compare every result of one operation."""
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
    if quantity.name.startswith("structure") and quantity.kind == "result":
        if not torch.equal(actual, wanted):
            got, plain = (bytes(text.tolist()).decode() for text in (actual, wanted))
            sentence = f"is {got}, expected {plain}"
            tally.add(Divergence(FailureKind.DIVERGED, quantity, index, ranks, sentence, Mismatch.STRUCTURE))
        return
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


RankPieces = list[tuple[int, Sequence[ObservedPiece]]]


@dataclass(frozen=True, slots=True)
class StateCheck:
    """One point of the program on all ranks, being compared.

    Attributes:
        tally: Collects the results.
        point: The oracle's values.
        shapes: Shape of every parameter.
        snapshots: The ranks' reports, by rank.
        comparison: The kinds to compare.
    """

    tally: Compared
    point: ExpectedPoint
    shapes: Mapping[str, tuple[int, ...]]
    snapshots: Sequence[Snapshot]
    comparison: Comparison

    def run(self) -> None:
        """Compare every quantity that is asked for, in the oracle's order."""
        checks = {"value": self._value}
        # Pending gradients are each rank's own, not yet the reduced gradient.
        checks |= {"gradient": self._gradient} if self.comparison.gradients and not self.point.pending else {}
        checks |= {"optimizer": self._optimizer} if self.comparison.optimizer else {}
        checks |= {"buffer": self._buffer} if self.comparison.buffers else {}
        for quantity, expected in self.point.quantities.items():
            ignored = any(fnmatchcase(quantity.name, pattern) for pattern in self.comparison.ignore)
            if quantity.kind in checks and not ignored:
                checks[quantity.kind](quantity, expected)
        if self.comparison.optimizer:
            self._states_of_nothing()

    def _observed(self, fqn: str) -> list[tuple[int, ParameterObservation]]:
        parameters = [(rank, snapshot.parameters.get(fqn)) for rank, snapshot in enumerate(self.snapshots)]
        return [(rank, parameter) for rank, parameter in parameters if parameter is not None]

    def _value(self, quantity: Quantity, expected: Expected) -> None:
        by_rank: RankPieces = []
        for rank, parameter in self._observed(quantity.name):
            by_rank.append((rank, parameter.pieces))
            wanted = self.point.dtypes.get(quantity.name, parameter.dtype)
            if parameter.dtype and parameter.dtype != wanted:
                self._differs(Mismatch.DTYPE, quantity, (rank,), f"has dtype {parameter.dtype}, expected {wanted}")
            flag = self.point.requires_grad.get(quantity.name, parameter.requires_grad)
            if parameter.requires_grad != flag:
                sentence = f"has requires_grad={parameter.requires_grad}, expected {flag}"
                self._differs(Mismatch.REQUIRES_GRAD, quantity, (rank,), sentence)
        self._pieces(quantity, by_rank, expected)

    def _gradient(self, quantity: Quantity, expected: Expected) -> None:
        by_rank: RankPieces = []
        without: list[int] = []
        for rank, parameter in self._observed(quantity.name):
            if parameter.grad_pieces is not None:
                by_rank.append((rank, parameter.grad_pieces))
                wanted = self.comparison.gradient_dtype or parameter.dtype
                if parameter.dtype and parameter.grad_dtype != wanted:
                    sentence = f"has dtype {parameter.grad_dtype}, expected {wanted}"
                    self._differs(Mismatch.DTYPE, quantity, (rank,), sentence)
            elif any(piece.stop > piece.start for piece in parameter.pieces):
                without.append(rank)
        if expected.value is None:
            self._none(quantity, by_rank)
            return
        size = float(expected.value.abs().max()) if expected.value.numel() else 0.0
        if without and (size != 0.0 or not self.comparison.none_is_zero):
            self.tally.count()
            self._differs(Mismatch.NONE, quantity, tuple(without), f"is None, expected numbers (up to {size:.3g})")
        elif without and not by_rank:
            self.tally.count()
        else:
            # If one rank has none, the others' numbers stand beside its zeros.
            zeros = [(rank, parameter.pieces) for rank, parameter in self._observed(quantity.name) if rank in without]
            by_rank += [(rank, [replace(p, value=torch.zeros_like(p.value)) for p in pieces]) for rank, pieces in zeros]
            self._pieces(quantity, sorted(by_rank, key=lambda entry: entry[0]), expected)

    def _none(self, quantity: Quantity, by_rank: RankPieces) -> None:
        """One process has no gradient."""
        self.tally.count()
        for rank, pieces in by_rank:
            filled = [piece for piece in pieces if piece.stop > piece.start]
            # NaN is no zero, and `max` of Python numbers would lose it.
            is_zero = all(bool((piece.value == 0).all()) for piece in filled)
            if filled and not (self.comparison.none_is_zero and is_zero):
                size = float(torch.stack([piece.value.abs().max().double() for piece in filled]).max())
                self._differs(Mismatch.NOT_NONE, quantity, (rank,), f"holds numbers (up to {size:.3g}), expected None")

    def _optimizer(self, quantity: Quantity, expected: Expected) -> None:
        without = [rank for rank, snapshot in enumerate(self.snapshots) if snapshot.optimizer is None]
        if len(without) == len(self.snapshots) or expected.value is None:
            return
        filled = {
            rank for rank, parameter in self._observed(quantity.name) if any(p.stop > p.start for p in parameter.pieces)
        }
        # Ranks without elements of a parameter need no state of it.
        if filled & set(without):
            ranks = tuple(sorted(filled & set(without)))
            self._report(FailureKind.MISSING, quantity, ranks, "is missing, although other ranks have one")
            return
        by_rank: RankPieces = []
        scalars: list[tuple[int, float]] = []
        for rank, snapshot in enumerate(self.snapshots):
            state = (snapshot.optimizer or {}).get(quantity.name)
            if state is not None and quantity.part in state.tensors:
                by_rank.append((rank, state.tensors[quantity.part]))
            elif state is not None and quantity.part in state.scalars:
                scalars.append((rank, state.scalars[quantity.part]))
        if not scalars or expected.value.numel() != 1:
            self._pieces(quantity, by_rank, expected)
            return
        for rank, number in scalars:
            actual = torch.tensor(number, dtype=expected.value.dtype).reshape(expected.value.shape)
            compare_tensor(self.tally, self.point, quantity._replace(rank=rank), actual, expected)

    def _states_of_nothing(self) -> None:
        """Report optimizer state that one process lacks: a parameter that is trained later would begin with it.

        State of zeros is every optimizer's initial state.
        """
        expected = {
            (quantity.name, quantity.part) for quantity in self.point.quantities if quantity.kind == "optimizer"
        }
        for fqn in self.shapes:
            if any(fnmatchcase(fqn, pattern) for pattern in self.comparison.ignore):
                continue
            held: dict[str, RankPieces] = {}
            for rank, snapshot in enumerate(self.snapshots):
                state = (snapshot.optimizer or {}).get(fqn)
                for part, pieces in ({} if state is None else state.tensors).items():
                    held.setdefault(part, []).append((rank, pieces))
                # Where zeros stand for no gradient, a parameter without one is stepped.
                for part, number in ({} if state is None or self.comparison.none_is_zero else state.scalars).items():
                    held.setdefault(part, []).append((rank, [ObservedPiece(0, 1, torch.tensor([number]))]))
            for part, by_rank in held.items():
                filled = any(bool((piece.value != 0).any()) for _, pieces in by_rank for piece in pieces)
                if filled and (fqn, part) not in expected:
                    self._none(Quantity("optimizer", fqn, part), by_rank)

    def _buffer(self, quantity: Quantity, expected: Expected) -> None:
        buffer = self.snapshots[quantity.rank].buffers.get(quantity.name)
        if buffer is None:
            self._report(FailureKind.MISSING, quantity, (quantity.rank,), "is gone")
        else:
            compare_tensor(self.tally, self.point, quantity, buffer.value, expected)

    def _pieces(self, quantity: Quantity, by_rank: RankPieces, expected: Expected) -> None:
        """Compare a tensor that the ranks hold together: nothing missing, replicas equal, numbers within the bound."""
        if expected.value is None or not expected.value.numel():
            return
        self.tally.count()
        whole = assemble(by_rank, self.shapes[quantity.name])
        if whole is None or not whole.complete:
            where = "" if whole is None else f" from element {whole.first_hole()} on"
            self._report(FailureKind.MISSING, quantity, (), f"is held by no rank{where}")
            return
        shape = self.shapes[quantity.name]
        # Before the bound: ranks that hold different bits disagree, however near both are to the oracle.
        for first, second, position in self._contradictions(by_rank, whole, shape)[:1]:
            sentence = f"differs between ranks {first} and {second}, first in element {position}"
            self._report(FailureKind.DISAGREED, quantity, (first, second), sentence)
        gap = difference(whole.flat, expected.value, expected.bound)
        ranks = tuple(rank for rank, _ in by_rank)
        if gap.exceeded or whole.contradictions:
            diverging = tuple(rank for rank, pieces in by_rank if _diverges(pieces, expected))
            ranks = diverging or ranks
            # The whole is made of what the first ranks hold, which may be right.
            others = assemble(sorted(by_rank, key=lambda entry: entry[0] not in diverging), shape)
            if others is not None and not gap.exceeded:
                gap = difference(others.flat, expected.value, expected.bound)
        self.tally.number(self.point, quantity, ranks, gap, expected)

    def _contradictions(
        self, by_rank: RankPieces, whole: Assembled, shape: tuple[int, ...]
    ) -> Sequence[tuple[int, int, int]]:
        """Return which ranks should hold the same bits and do not: those that have one place in their models."""
        parts = self.comparison.tensor_parallel
        if parts == 1 or not whole.contradictions:
            return whole.contradictions
        places = [[entry for entry in by_rank if entry[0] % parts == place] for place in range(parts)]
        alone = [assemble(ranks, shape) for ranks in places]
        return [pair for part in alone if part is not None for pair in part.contradictions]

    def _report(self, kind: FailureKind, quantity: Quantity, ranks: tuple[int, ...], sentence: str) -> None:
        self.tally.add(Divergence(kind, quantity, self.point.index, ranks, sentence))

    def _differs(self, mismatch: Mismatch, quantity: Quantity, ranks: tuple[int, ...], sentence: str) -> None:
        self.tally.add(Divergence(FailureKind.DIVERGED, quantity, self.point.index, ranks, sentence, mismatch))


def _diverges(pieces: Sequence[ObservedPiece], expected: Expected) -> bool:
    """Whether this rank's own pieces are beyond the bound."""
    if expected.value is None:
        return False
    flat, bound = expected.value.reshape(-1), expected.bound
    for piece in pieces:
        span = slice(piece.start, piece.stop)
        limit = bound.reshape(-1)[span] if isinstance(bound, torch.Tensor) and bound.numel() > 1 else bound
        if piece.stop > piece.start and difference(piece.value, flat[span], limit).exceeded:
            return True
    return False
