"""What are wrong numbers like, element by element? Rounded, scaled, in other places, or those of something else.

Each pattern is tried against what one process has, on what every rank holds, and taken only if every element of
everything that is wrong agrees, within the bound.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import partial

import torch

from fsdp_testing.cases.records import UNIT_ROUNDOFF
from fsdp_testing.explain.held import Held
from fsdp_testing.oracle.quantities import Expected, Quantity
from fsdp_testing.oracle.tensors import difference

_ENOUGH = 2
"""Elements without which any two numbers are a multiple of one another."""
_ROUNDINGS = 4
"""Of one element that is computed from the expected one, in its own dtype."""
_LARGEST_DENOMINATOR = 8

Like = Callable[[Held], torch.Tensor | None]
"""What a rank would have; None where the pattern has no meaning."""


@dataclass(frozen=True, slots=True)
class Pattern:
    """What wrong numbers are like.

    Attributes:
        kind: The same word for all quantities that one defect makes wrong.
        words: After "is": "1/2 times what is due".
    """

    kind: str
    words: str


def pattern_of(pieces: Sequence[Held], expected: Mapping[Quantity, Expected]) -> Pattern | None:
    """Return what all wrong numbers are like, or None if like nothing that is tried.

    Args:
        pieces: What ranks hold of the quantities that are wrong, right pieces included.
        expected: Everything that is expected at the same point.
    """
    wrong = [one for one in pieces if one.wrong]
    numbers = _numbers(wrong)
    if not numbers or any(one.got is None or one.due is None for one in wrong):
        return None
    if any(one.of_another_dtype for one in wrong):
        return _other_dtype(wrong)
    if not all(bool(_got(one).isfinite().all() & _due(one).isfinite().all()) for one in wrong):
        return None
    if not all(_due(one).is_floating_point() for one in wrong):
        return _first(wrong, ((("zero", "zero", lambda one: torch.zeros_like(_due(one)), False)),))
    if not any(difference(_got(one), _due(one), _bound(one)).exceeded for one in wrong):
        return _last_place(wrong) if numbers >= _ENOUGH else None
    return _first(wrong, _tried(wrong, pieces, expected))


def _numbers(wrong: Sequence[Held]) -> int:
    """How many numbers there are; what several ranks have of the same is one."""
    return sum(stop - start for _, _, _, start, stop in {(*one.quantity[:3], *one.span) for one in wrong})


_Candidate = tuple[str, str, Like, bool]
"""Kind, words, the numbers, and whether they are computed (and so rounded) or copied."""


def _first(wrong: Sequence[Held], candidates: Iterator[_Candidate] | tuple[_Candidate, ...]) -> Pattern | None:
    for kind, words, like, computed in candidates:
        if all(_agrees(one, like(one), computed=computed) for one in wrong):
            return Pattern(kind, words)
    return None


def _agrees(one: Held, like: torch.Tensor | None, *, computed: bool) -> bool:
    if like is None or like.shape != _got(one).shape:
        return False
    bound = _bound(one) if computed else one.bound
    return not difference(_got(one), like, bound).exceeded


def _bound(one: Held) -> torch.Tensor:
    own = UNIT_ROUNDOFF.get(str(_due(one).dtype).removeprefix("torch."), 0.0)
    return one.bound + _ROUNDINGS * own * _due(one).abs().double()


def _got(one: Held) -> torch.Tensor:
    assert one.got is not None
    assert one.due is not None
    return one.got.to(one.due.dtype)


def _due(one: Held) -> torch.Tensor:
    assert one.due is not None
    return one.due


def _other_dtype(wrong: Sequence[Held]) -> Pattern | None:
    """Numbers of another dtype: the right ones, or the right ones before or after a cast."""
    names = {tuple(str(t.dtype).removeprefix("torch.") for t in (one.got, one.due) if t is not None) for one in wrong}
    if len(names) != 1 or not all(one.of_another_dtype for one in wrong):
        return None
    got, due = names.pop()
    floating = all(
        one.got is not None and one.got.is_floating_point() and _due(one).is_floating_point() for one in wrong
    )
    wider = UNIT_ROUNDOFF.get(got, 1.0) < UNIT_ROUNDOFF.get(due, 1.0)
    if not floating:
        return None
    for one in wrong:
        assert one.got is not None
        pair = (one.got.to(_due(one).dtype), _due(one)) if wider else (one.got, _due(one).to(one.got.dtype))
        if difference(*pair, one.bound).exceeded:
            return None
    if wider:
        return Pattern("not cast", f"the right number, left in {got} where a cast to {due} is due")
    return Pattern("cast", f"what is due, cast to {got}")


def _last_place(wrong: Sequence[Held]) -> Pattern | None:
    """As near to what is due as to anything else: said only of neighbours of the right numbers."""
    for one in wrong:
        step = torch.nextafter(_due(one).abs(), torch.full_like(_due(one), torch.inf)) - _due(one).abs()
        if difference(_got(one), _due(one), step.double()).exceeded:
            return None
    return Pattern("last place", "what is due but for one unit in the last place")


def _tried(
    wrong: Sequence[Held], pieces: Sequence[Held], expected: Mapping[Quantity, Expected]
) -> Iterator[_Candidate]:
    """Yield what may have happened, each with the numbers that would be right if it had."""
    yield "zero", "zero", lambda one: torch.zeros_like(_due(one)), False
    if _numbers(wrong) < _ENOUGH:
        return
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        if all(torch.finfo(dtype).eps > torch.finfo(_due(one).dtype).eps for one in wrong):
            name = str(dtype).removeprefix("torch.")
            yield "rounded", f"what is due, rounded to {name}", _cast(dtype), True
    got, due = (torch.cat([side(one).double() for one in wrong]) for side in (_got, _due))
    factor = _factor(got, due)
    if factor:
        small = Fraction(factor).limit_denominator(_LARGEST_DENOMINATOR)
        exact = abs(float(small) - factor) < 1e-9 * abs(factor)
        yield "scaled", f"{small if exact else f'{factor:.9g}'} times what is due", lambda one: _due(one) * factor, True
    yield from _by_magnitude(wrong, got, due)
    yield from _stepped(wrong, expected, got - due)
    yield from _of_another(wrong, expected)
    yield from _elsewhere(wrong, pieces)
    yield from _in_part(wrong)
    if max(_due(one).numel() for one in wrong) > 2 * _ENOUGH:
        yield "permuted", "what is due, its elements in other places", _permuted, False


def _cast(dtype: torch.dtype) -> Like:
    return lambda one: _due(one).to(dtype).to(_due(one).dtype)


def _factor(got: torch.Tensor, due: torch.Tensor) -> float:
    square = float(due.square().sum())
    return float((got * due).sum()) / square if square else 0.0


def _by_magnitude(wrong: Sequence[Held], got: torch.Tensor, due: torch.Tensor) -> Iterator[_Candidate]:
    """Large numbers cut off, or small ones dropped."""
    limit = float(got.abs().max())
    inside = due.abs() < limit
    if limit and bool(inside.any()) and bool((~inside).any()):
        yield "cut off", f"what is due, cut off at {limit:.9g}", lambda one: _due(one).clamp(-limit, limit), True
    if bool((got == 0).any()) and bool((got != 0).any()) and all(_smallest_are_zero(one) for one in wrong):
        words = "what is due, with its smallest numbers set to zero"
        yield "dropped", words, lambda one: _due(one).where(_got(one) != 0, torch.zeros_like(_due(one))), False


def _smallest_are_zero(one: Held) -> bool:
    zero, size = _got(one) == 0, _due(one).abs()
    return bool(zero.any() & (~zero).any()) and float(size[zero].max()) < float(size[~zero].min())


def _stepped(wrong: Sequence[Held], expected: Mapping[Quantity, Expected], moved: torch.Tensor) -> Iterator[_Candidate]:
    """Parameters that were changed by a multiple of their gradients."""
    by = [expected.get(Quantity("gradient", one.quantity.name)) for one in wrong if one.quantity.kind == "value"]
    values = [one.value for one in by if one is not None and one.value is not None]
    if len(values) != len(wrong):
        return
    gradients = {one.quantity: value for one, value in zip(wrong, values)}
    factor = _factor(moved, torch.cat([one.part_of(gradients[one.quantity]).double() for one in wrong]))
    if factor:
        words = f"what is due, moved by {factor:.3g} times its gradient"
        yield "stepped", words, lambda one: _due(one) + factor * one.part_of(gradients[one.quantity]), True


def _of_another(wrong: Sequence[Held], expected: Mapping[Quantity, Expected]) -> Iterator[_Candidate]:
    """What is due of another quantity of the same kind: another parameter, or another state of the same one."""
    first = wrong[0].quantity
    for other, one in expected.items():
        alike = other.kind == first.kind and other.rank in (-1, first.rank) and other != first
        state = other.name == first.name
        if not alike or one.value is None or not (state or other.part == first.part):
            continue
        if not state and len({piece.quantity.name for piece in wrong}) > 1:
            continue  # which belongs to which is anybody's guess
        words = f"what is due of {other}" if not state else f"what is due of {other.part}"

        def like(piece: Held, other: Quantity = other, *, state: bool = state) -> torch.Tensor | None:
            place = piece.quantity._replace(part=other.part)
            there = expected.get(place if state else place._replace(name=other.name))
            if there is None or there.value is None or there.value.numel() < piece.span[1]:
                return None
            return piece.part_of(there.value)

        yield "another's", words, like, False


def _elsewhere(wrong: Sequence[Held], pieces: Sequence[Held]) -> Iterator[_Candidate]:
    """The right numbers at another place: of the whole tensor, of the rank's own part, or another rank's."""
    wholes = {one.quantity: _whole(one.quantity, pieces) for one in wrong}
    longest = max(whole.numel() for whole in wholes.values())
    if longest < _ENOUGH:
        return
    for other in sorted({one.rank for one in pieces}):
        spans = {one.quantity: one.span for one in pieces if one.rank == other}

        def theirs(one: Held, spans: Mapping[Quantity, tuple[int, int]] = spans) -> torch.Tensor | None:
            span = spans.get(one.quantity)
            return (
                None
                if span is None or span == one.span
                else wholes[one.quantity][span[0] : span[0] + _due(one).numel()]
            )

        yield "another rank's", f"what is due of the part of rank {other}", theirs, False
    for shift in dict.fromkeys((1, -1, longest // 2)):
        words = f"what is due, moved by {shift} {'element' if abs(shift) == 1 else 'elements'}"

        def moved(one: Held, shift: int = shift) -> torch.Tensor:
            return one.part_of(wholes[one.quantity].roll(shift))

        yield "shifted", words, moved, False
    if any(one.span != (0, wholes[one.quantity].numel()) for one in wrong):
        for shift in (1, -1):
            words = f"what is due, moved by {shift} element inside each rank's part"
            yield "shifted inside", words, partial(_rolled, shift), False
    yield "reversed", "what is due in reverse, inside each rank's part", lambda one: _due(one).flip(0), False


def _rolled(shift: int, one: Held) -> torch.Tensor:
    return _due(one).roll(shift)


def _whole(quantity: Quantity, pieces: Sequence[Held]) -> torch.Tensor:
    mine = [one for one in pieces if one.quantity == quantity and one.due is not None]
    whole = torch.full((max(one.span[1] for one in mine),), torch.nan, dtype=_due(mine[0]).dtype)
    for one in mine:
        whole[one.span[0] : one.span[1]] = _due(one)
    return whole


def _in_part(wrong: Sequence[Held]) -> Iterator[_Candidate]:
    """Zeros where other ranks have the elements, or at the end."""

    def own_alone(one: Held) -> torch.Tensor | None:
        if not one.own:
            return None
        like = torch.zeros_like(_due(one))
        for start, stop in one.own:
            like[start - one.span[0] : stop - one.span[0]] = _due(one)[start - one.span[0] : stop - one.span[0]]
        return like

    yield (
        "own part",
        "what is due in the rank's own part, and zero where other ranks have the elements",
        own_alone,
        False,
    )
    tails = {_tail_of_zeros(one) for one in wrong}
    if len(tails) == 1 and (tail := tails.pop()):
        words = f"what is due, with zero in its last {'element' if tail == 1 else f'{tail} elements'}"
        yield "tail", words, lambda one: torch.cat([_due(one)[:-tail], torch.zeros_like(_due(one)[-tail:])]), False


def _tail_of_zeros(one: Held) -> int:
    filled = _got(one).nonzero()
    return _got(one).numel() - (int(filled.max()) + 1 if filled.numel() else 0)


def _permuted(one: Held) -> torch.Tensor:
    """Each number that is due at the place of its rank among all: equal only if the numbers are the same ones."""
    ordered = torch.empty_like(_due(one))
    ordered[_got(one).argsort()] = _due(one).sort().values
    return ordered
