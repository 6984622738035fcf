"""Names the pattern of wrong numbers, element by element: rounded, scaled, in other places, or those of another quantity.

Each pattern is tried on one process's values for every rank, and accepted only if every element of every wrong quantity agrees
within the bound.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import partial

import torch

from fsdp_testing.cases.records import UNIT_ROUNDOFF
from fsdp_testing.explain.compared_pieces import ComparedPiece
from fsdp_testing.oracle.quantities import Expected, Quantity
from fsdp_testing.oracle.tensors import difference

_ENOUGH = 2
"""The fewest elements for which a common factor means anything."""
_ROUNDINGS = 4
"""Of one element that is computed from the expected one, in its own dtype."""
_LARGEST_DENOMINATOR = 8

Like = Callable[[ComparedPiece], torch.Tensor | None]
"""The numbers that a rank would have; None if the pattern has no meaning."""

_Candidate = tuple[str, str, Like, bool]
"""Kind, words, the numbers, and whether they are computed (and so rounded) or copied."""


@dataclass(frozen=True, slots=True)
class Pattern:
    """The pattern of wrong numbers.

    Attributes:
        kind: One word for all quantities that a defect makes wrong.
        words: After "is": "1/2 times the right values".
    """

    kind: str
    words: str


def pattern_of(pieces: Sequence[ComparedPiece], expected: Mapping[Quantity, Expected]) -> Pattern | None:
    """Return the pattern of all wrong numbers, or None if no pattern fits.

    Args:
        pieces: What ranks hold of the quantities that are wrong, right pieces included.
        expected: Everything that is expected at the same point.
    """
    wrong = [piece for piece in pieces if piece.wrong]
    count = _count(wrong)
    if not count or any(piece.got is None or piece.due is None or piece.of_another_size for piece in wrong):
        return None
    if any(piece.of_another_dtype for piece in wrong):
        return _other_dtype(wrong)
    if not all(bool((piece.actual.isfinite() & piece.expected.isfinite()).all()) for piece in wrong):
        return None
    zero = ("zero", "zero", _zeros, False)
    if not all(piece.expected.is_floating_point() for piece in wrong):
        return _first(wrong, [zero])
    if not any(difference(piece.actual, piece.expected, _bound(piece)).exceeded for piece in wrong):
        return _last_place(wrong) if count >= _ENOUGH else None
    return _first(wrong, [zero]) or (_first(wrong, _candidates(wrong, pieces, expected)) if count >= _ENOUGH else None)


def _count(wrong: Sequence[ComparedPiece]) -> int:
    """The number of elements; elements that several ranks hold count once."""
    return sum(stop - start for _, _, _, start, stop in {(*piece.quantity[:3], *piece.span) for piece in wrong})


def _first(wrong: Sequence[ComparedPiece], candidates: Iterable[_Candidate]) -> Pattern | None:
    for kind, words, like, computed in candidates:
        if all(_agrees(piece, like(piece), computed=computed) for piece in wrong):
            return Pattern(kind, words)
    return None


def _agrees(piece: ComparedPiece, like: torch.Tensor | None, *, computed: bool) -> bool:
    if like is None or like.shape != piece.actual.shape:
        return False
    return not difference(piece.actual, like, _bound(piece) if computed else piece.bound).exceeded


def _bound(piece: ComparedPiece) -> torch.Tensor:
    unit = UNIT_ROUNDOFF.get(_name(piece.expected.dtype), 0.0)
    return piece.bound + _ROUNDINGS * unit * piece.expected.abs().double()


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _zeros(piece: ComparedPiece) -> torch.Tensor:
    return torch.zeros_like(piece.expected)


def _other_dtype(wrong: Sequence[ComparedPiece]) -> Pattern | None:
    """Numbers of another dtype: the right ones, or the right ones before or after a cast."""
    pairs = [(piece.got, piece.expected) for piece in wrong if piece.got is not None]
    names = {(_name(got.dtype), _name(due.dtype)) for got, due in pairs}
    floating = all(got.is_floating_point() and due.is_floating_point() for got, due in pairs)
    if len(names) != 1 or not floating or not all(piece.of_another_dtype for piece in wrong):
        return None
    got_name, due_name = names.pop()
    wider = UNIT_ROUNDOFF.get(got_name, 1.0) < UNIT_ROUNDOFF.get(due_name, 1.0)
    for piece, (got, due) in zip(wrong, pairs, strict=True):
        cast = (got.to(due.dtype), due) if wider else (got, due.to(got.dtype))
        if difference(*cast, piece.bound).exceeded:
            return None
    if wider:
        return Pattern("not cast", f"the right number, left in {got_name}, not cast to {due_name}")
    return Pattern("cast", f"the right values, cast to {got_name}")


def _last_place(wrong: Sequence[ComparedPiece]) -> Pattern | None:
    """Numbers next to the right ones in floating point; no other pattern could be told apart from them."""
    for piece in wrong:
        size = piece.expected.abs()
        step = torch.nextafter(size, torch.full_like(size, torch.inf)) - size
        if difference(piece.actual, piece.expected, step.double()).exceeded:
            return None
    return Pattern("last place", "the right values but for one unit in the last place")


def _candidates(
    wrong: Sequence[ComparedPiece], pieces: Sequence[ComparedPiece], expected: Mapping[Quantity, Expected]
) -> Iterator[_Candidate]:
    """Yield the patterns, each with the numbers that it would give."""
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        if all(torch.finfo(dtype).eps > torch.finfo(piece.expected.dtype).eps for piece in wrong):
            yield "rounded", f"the right values, rounded to {_name(dtype)}", partial(_rounded, dtype), True
    got = torch.cat([piece.actual.double() for piece in wrong])
    due = torch.cat([piece.expected.double() for piece in wrong])
    factor = _factor(got, due)
    if factor:
        small = Fraction(factor).limit_denominator(_LARGEST_DENOMINATOR)
        exact = abs(float(small) - factor) < 1e-9 * abs(factor)
        words = f"{small if exact else f'{factor:.9g}'} times the right values"
        yield "scaled", words, lambda piece: piece.expected * factor, True
    yield from _by_magnitude(wrong, got, due)
    yield from _stepped(wrong, expected, got - due)
    yield from _of_another(wrong, expected)
    yield from _elsewhere(wrong, pieces)
    yield from _in_part(wrong)
    if max(piece.expected.numel() for piece in wrong) > 2 * _ENOUGH:
        yield "permuted", "the right values, their elements in other places", _permuted, False


def _rounded(dtype: torch.dtype, piece: ComparedPiece) -> torch.Tensor:
    return piece.expected.to(dtype).to(piece.expected.dtype)


def _factor(got: torch.Tensor, due: torch.Tensor) -> float:
    square = float(due.square().sum())
    return float((got * due).sum()) / square if square else 0.0


def _by_magnitude(wrong: Sequence[ComparedPiece], got: torch.Tensor, due: torch.Tensor) -> Iterator[_Candidate]:
    """Large numbers cut off, or small ones dropped."""
    limit = float(got.abs().max())
    inside = due.abs() < limit
    if limit and bool(inside.any()) and bool((~inside).any()):
        words = f"the right values, cut off at {limit:.9g}"
        yield "cut off", words, lambda piece: piece.expected.clamp(-limit, limit), True
    if bool((got == 0).any()) and bool((got != 0).any()) and all(map(_smallest_are_zero, wrong)):
        words = "the right values, with their smallest numbers set to zero"
        yield "dropped", words, lambda piece: piece.expected.where(piece.actual != 0, _zeros(piece)), False


def _smallest_are_zero(piece: ComparedPiece) -> bool:
    zero, size = piece.actual == 0, piece.expected.abs()
    return bool(zero.any() & (~zero).any()) and float(size[zero].max()) < float(size[~zero].min())


def _stepped(
    wrong: Sequence[ComparedPiece], expected: Mapping[Quantity, Expected], moved: torch.Tensor
) -> Iterator[_Candidate]:
    """Parameters that were changed by a multiple of their gradients."""
    gradients: dict[Quantity, torch.Tensor] = {}
    for piece in wrong:
        gradient = expected.get(Quantity("gradient", piece.quantity.name))
        if piece.quantity.kind != "value" or gradient is None or gradient.value is None:
            return
        gradients[piece.quantity] = gradient.value
    factor = _factor(moved, torch.cat([piece.part_of(gradients[piece.quantity]).double() for piece in wrong]))
    if factor:
        words = f"the right values, moved by {factor:.3g} times their gradient"
        step: Like = lambda piece: piece.expected + factor * piece.part_of(gradients[piece.quantity])
        yield "stepped", words, step, True


def _of_another(wrong: Sequence[ComparedPiece], expected: Mapping[Quantity, Expected]) -> Iterator[_Candidate]:
    """The right values of another quantity of the same kind: another parameter, or another state of the same parameter."""
    first = wrong[0].quantity
    for quantity, due in expected.items():
        alike = quantity.kind == first.kind and quantity.rank in (-1, first.rank) and quantity != first
        state = quantity.subject == first.subject
        if not alike or due.value is None or not (state or quantity.part == first.part):
            continue
        if not state and len({piece.quantity.subject for piece in wrong}) > 1:
            continue  # the assignment is ambiguous
        words = f"the right values of {quantity.part if state else quantity}"

        def like(piece: ComparedPiece, quantity: Quantity = quantity, *, state: bool = state) -> torch.Tensor | None:
            same_part = piece.quantity.with_part(quantity.part)
            source = expected.get(same_part if state else same_part._replace(name=quantity.name))
            if source is None or source.value is None or source.value.numel() < piece.span[1]:
                return None
            return piece.part_of(source.value)

        yield "another's", words, like, False


def _elsewhere(wrong: Sequence[ComparedPiece], pieces: Sequence[ComparedPiece]) -> Iterator[_Candidate]:
    """The right numbers at another place: of the whole tensor, of the rank's own part, or another rank's."""
    wholes = {piece.quantity: _whole(piece.quantity, pieces) for piece in wrong}
    longest = max(whole.numel() for whole in wholes.values())
    if longest < _ENOUGH:
        return
    for rank in sorted({piece.rank for piece in pieces}):
        spans = {piece.quantity: piece.span for piece in pieces if piece.rank == rank}
        yield "another rank's", f"the right values of the part of rank {rank}", partial(_at, wholes, spans), False
    for shift in dict.fromkeys((1, -1, longest // 2)):
        words = f"the right values, moved by {shift} {'element' if abs(shift) == 1 else 'elements'}"
        yield "shifted", words, partial(_shifted, wholes, shift), False
    if any(piece.span != (0, wholes[piece.quantity].numel()) for piece in wrong):
        for shift in (1, -1):
            words = f"the right values, moved by {shift} element inside each rank's part"
            yield "shifted inside", words, partial(_rolled, shift), False
    yield (
        "reversed",
        "the right values in reverse, inside each rank's part",
        lambda piece: piece.expected.flip(0),
        False,
    )


def _at(
    wholes: Mapping[Quantity, torch.Tensor], spans: Mapping[Quantity, tuple[int, int]], piece: ComparedPiece
) -> torch.Tensor | None:
    span = spans.get(piece.quantity)
    if span is None or span == piece.span:
        return None
    return wholes[piece.quantity][span[0] : span[0] + piece.expected.numel()]


def _shifted(wholes: Mapping[Quantity, torch.Tensor], shift: int, piece: ComparedPiece) -> torch.Tensor:
    return piece.part_of(wholes[piece.quantity].roll(shift))


def _rolled(shift: int, piece: ComparedPiece) -> torch.Tensor:
    return piece.expected.roll(shift)


def _whole(quantity: Quantity, pieces: Sequence[ComparedPiece]) -> torch.Tensor:
    parts = [piece for piece in pieces if piece.quantity == quantity and piece.due is not None]
    whole = torch.full((max(part.span[1] for part in parts),), torch.nan, dtype=parts[0].expected.dtype)
    for part in parts:
        whole[part.span[0] : part.span[1]] = part.expected
    return whole


def _in_part(wrong: Sequence[ComparedPiece]) -> Iterator[_Candidate]:
    """Zeros where other ranks have the elements, or at the end."""
    words = "the right values in the rank's own part, and zero where other ranks have the elements"
    yield "own part", words, _own_alone, False
    tails = {_tail_of_zeros(piece) for piece in wrong}
    if len(tails) == 1 and (tail := tails.pop()):
        words = f"the right values, with zero in their last {'element' if tail == 1 else f'{tail} elements'}"
        yield "tail", words, lambda piece: torch.cat([piece.expected[:-tail], _zeros(piece)[-tail:]]), False


def _own_alone(piece: ComparedPiece) -> torch.Tensor | None:
    like, first = _zeros(piece), piece.span[0]
    for start, stop in piece.own:
        like[start - first : stop - first] = piece.expected[start - first : stop - first]
    return like if piece.own else None


def _tail_of_zeros(piece: ComparedPiece) -> int:
    filled = piece.actual.nonzero()
    return piece.actual.numel() - (int(filled.max()) + 1 if filled.numel() else 0)


def _permuted(piece: ComparedPiece) -> torch.Tensor:
    """Sorts both sides: equal only if the numbers are the same ones, in any order."""
    ordered = torch.empty_like(piece.expected)
    ordered[piece.actual.argsort()] = piece.expected.sort().values
    return ordered
