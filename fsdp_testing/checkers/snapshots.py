"""Do the ranks' pieces of parameters, gradients, optimizer state and buffers make up the oracle's?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

import torch

from fsdp_testing.checkers.assemble import Assembled, assemble
from fsdp_testing.checkers.divergence import Compared, Divergence
from fsdp_testing.checkers.quantities import Expected, ExpectedPoint, Quantity
from fsdp_testing.checkers.results import compare_tensor
from fsdp_testing.checkers.tensors import difference
from fsdp_testing.records import FailureKind, Mismatch, ObservedPiece, ParameterObservation, Snapshot

if TYPE_CHECKING:
    from fsdp_testing.checkers.comparison import Comparison

Shapes = Mapping[str, tuple[int, ...]]
RankPieces = list[tuple[int, Sequence[ObservedPiece]]]


def check_state(
    tally: Compared, point: ExpectedPoint, shapes: Shapes, snapshots: Sequence[Snapshot], asked: Comparison
) -> None:
    """Compare everything held at one point.

    Args:
        tally: Takes what is found.
        point: What the oracle says.
        shapes: Shape of every parameter.
        snapshots: What each rank reports, by rank.
        asked: Which kinds to compare.
    """
    _StateCheck(tally, point, shapes, snapshots, asked).run()


def absent_snapshot(point: ExpectedPoint, ranks: tuple[int, ...]) -> Divergence:
    """The divergence that ranks did not report their state at a point."""
    return Divergence(FailureKind.MISSING, Quantity("result", "state"), point.index, ranks, "was not reported")


class _StateCheck:
    """One point of the program on all ranks, being compared."""

    def __init__(
        self, tally: Compared, point: ExpectedPoint, shapes: Shapes, snapshots: Sequence[Snapshot], asked: Comparison
    ) -> None:
        self._tally = tally
        self._point = point
        self._shapes = shapes
        self._snapshots = snapshots
        self._asked = asked

    def run(self) -> None:
        """Compare every quantity that is asked for, in the oracle's order."""
        checks = {"value": self._value}
        checks |= {"gradient": self._gradient} if self._asked.gradients and not self._point.pending else {}
        checks |= {"optimizer": self._optimizer} if self._asked.optimizer else {}
        checks |= {"buffer": self._buffer} if self._asked.buffers else {}
        for quantity, expected in self._point.quantities.items():
            ignored = any(fnmatchcase(quantity.name, pattern) for pattern in self._asked.ignore)
            if quantity.kind in checks and not ignored:
                checks[quantity.kind](quantity, expected)

    def _observed(self, fqn: str) -> list[tuple[int, ParameterObservation]]:
        seen = [(rank, snapshot.parameters.get(fqn)) for rank, snapshot in enumerate(self._snapshots)]
        return [(rank, parameter) for rank, parameter in seen if parameter is not None]

    def _value(self, quantity: Quantity, expected: Expected) -> None:
        held: RankPieces = []
        for rank, seen in self._observed(quantity.name):
            held.append((rank, seen.pieces))
            wanted = self._point.dtypes.get(quantity.name, seen.dtype)
            if seen.dtype and seen.dtype != wanted:
                self._differs(Mismatch.DTYPE, quantity, (rank,), f"has dtype {seen.dtype}, expected {wanted}")
            flag = self._point.requires_grad.get(quantity.name, seen.requires_grad)
            if seen.requires_grad != flag:
                self._differs(
                    Mismatch.REQUIRES_GRAD,
                    quantity,
                    (rank,),
                    f"has requires_grad={seen.requires_grad}, expected {flag}",
                )
        self._pieces(quantity, held, expected)

    def _gradient(self, quantity: Quantity, expected: Expected) -> None:
        held: RankPieces = []
        without: list[int] = []
        for rank, seen in self._observed(quantity.name):
            if seen.grad_pieces is not None:
                held.append((rank, seen.grad_pieces))
                if seen.dtype and seen.grad_dtype != seen.dtype:
                    self._differs(
                        Mismatch.DTYPE, quantity, (rank,), f"has dtype {seen.grad_dtype}, expected {seen.dtype}"
                    )
            elif any(piece.stop > piece.start for piece in seen.pieces):
                without.append(rank)
        if expected.value is None:
            self._none(quantity, held)
        elif not without:
            self._pieces(quantity, held, expected)
        else:
            self._absent(quantity, expected.value, tuple(without))

    def _absent(self, quantity: Quantity, wanted: torch.Tensor, without: tuple[int, ...]) -> None:
        """Some ranks have no gradient where one process has one."""
        self._tally.count()
        size = float(wanted.abs().max()) if wanted.numel() else 0.0
        if size != 0.0 or not self._asked.none_is_zero:
            self._differs(Mismatch.NONE, quantity, without, f"is None, expected numbers (up to {size:.3g})")

    def _none(self, quantity: Quantity, held: RankPieces) -> None:
        """One process has no gradient."""
        self._tally.count()
        for rank, pieces in held:
            filled = [piece for piece in pieces if piece.stop > piece.start]
            size = max((float(piece.value.abs().max()) for piece in filled), default=0.0)
            if filled and not (self._asked.none_is_zero and size == 0.0):
                self._differs(Mismatch.NOT_NONE, quantity, (rank,), f"holds numbers (up to {size:.3g}), expected None")

    def _optimizer(self, quantity: Quantity, expected: Expected) -> None:
        if any(snapshot.optimizer is None for snapshot in self._snapshots) or expected.value is None:
            return
        held: RankPieces = []
        scalars: list[tuple[int, float]] = []
        for rank, snapshot in enumerate(self._snapshots):
            state = (snapshot.optimizer or {}).get(quantity.name)
            if state is not None and quantity.part in state.tensors:
                held.append((rank, state.tensors[quantity.part]))
            elif state is not None and quantity.part in state.scalars:
                scalars.append((rank, state.scalars[quantity.part]))
        if not scalars or expected.value.numel() != 1:
            self._pieces(quantity, held, expected)
            return
        for rank, number in scalars:
            actual = torch.tensor(number, dtype=expected.value.dtype).reshape(expected.value.shape)
            compare_tensor(self._tally, self._point, quantity._replace(rank=rank), actual, expected)

    def _buffer(self, quantity: Quantity, expected: Expected) -> None:
        seen = self._snapshots[quantity.rank].buffers.get(quantity.name)
        if seen is None:
            self._report(FailureKind.MISSING, quantity, (quantity.rank,), "is gone")
        else:
            compare_tensor(self._tally, self._point, quantity, seen.value, expected)

    def _pieces(self, quantity: Quantity, held: RankPieces, expected: Expected) -> None:
        """Compare a tensor that the ranks hold together: nothing missing, replicas equal, numbers within the bound."""
        if expected.value is None or not expected.value.numel():
            return
        self._tally.count()
        whole = assemble(held, self._shapes[quantity.name])
        if whole is None or not whole.complete:
            where = "" if whole is None else f" from element {whole.first_hole()} on"
            self._report(FailureKind.MISSING, quantity, (), f"is held by no rank{where}")
            return
        for one, other, position in whole.contradictions[:1]:
            sentence = f"differs between ranks {one} and {other}, first in element {position}"
            self._report(FailureKind.DISAGREED, quantity, (one, other), sentence)
        self._numbers(quantity, held, whole, expected)

    def _numbers(self, quantity: Quantity, held: RankPieces, whole: Assembled, expected: Expected) -> None:
        if expected.value is None:
            return
        found = difference(whole.flat, expected.value, expected.bound)
        if not found.exceeded:
            self._tally.within(self._point, quantity, tuple(rank for rank, _ in held), found)
            return
        ranks = tuple(rank for rank, pieces in held if _diverges(pieces, expected))
        sentence = f"is off by {found.error:.3g} (bound {found.bound:.3g}), element {found.position} is {found.text}"
        index, why = self._point.index, expected.derivation
        self._tally.add(Divergence.sized(quantity, index, ranks, sentence, found, why))

    def _report(self, kind: FailureKind, quantity: Quantity, ranks: tuple[int, ...], sentence: str) -> None:
        self._tally.add(Divergence(kind, quantity, self._point.index, ranks, sentence))

    def _differs(self, mismatch: Mismatch, quantity: Quantity, ranks: tuple[int, ...], sentence: str) -> None:
        self._tally.add(Divergence(FailureKind.DIVERGED, quantity, self._point.index, ranks, sentence, mismatch))


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
