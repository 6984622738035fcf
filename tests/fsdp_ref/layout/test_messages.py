"""Every message of the layout, word for word: where, expected, got, what to do, all offenders at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from fsdp_ref.errors import LayoutError
from fsdp_ref.layout import FlatLayout, ParamSpec, ShardMap, Span


def _layout(*params: Any) -> FlatLayout:
    return FlatLayout.build([ParamSpec.of(*param) for param in params])


def _map(world: int, *params: Any) -> ShardMap:
    return ShardMap(_layout(*params), world)


TWO = (ParamSpec.of("a", (3,)), ParamSpec.of("b", (2,)))

CASES: dict[str, Callable[[], object]] = {
    "Span: expected 0 <= start <= stop, got start=3, stop=2. Give the first element and one past the last.": lambda: (
        Span(3, 2)
    ),
    "ParamSpec('w'): expected a dense tensor description, got a negative size, numel 1 where the shape holds -2 "
    "(shape (2, -1), stride (1, 1)). Build it with ParamSpec.of(...).": lambda: ParamSpec(
        "w", (2, -1), (1, 1), True, 1
    ),
    "ParamSpec('w'): expected a dense tensor description, got 1 strides for 2 dimensions (shape (2, 3), stride (1,)). "
    "Build it with ParamSpec.of(...).": lambda: ParamSpec.of("w", (2, 3), (1,)),
    "ParamSpec('w'): expected a dense tensor description, got strides that leave gaps or overlap "
    "(shape (2, 2), stride (4, 1)). Build it with ParamSpec.of(...).": lambda: ParamSpec("w", (2, 2), (4, 1), False, 4),
    "ParamSpec('w'): expected a dense tensor description, got contiguous=True, which its strides contradict "
    "(shape (2, 3), stride (1, 2)). Build it with ParamSpec.of(...).": lambda: ParamSpec("w", (2, 3), (1, 2), True, 6),
    "FlatLayout.build: expected units of at least 1, got alignment_numel=0, pad_to_multiple=-2. "
    "Pass 1 for none.": lambda: FlatLayout.build(TWO, alignment_numel=0, pad_to_multiple=-2),
    "FlatLayout: expected aligned, ordered, disjoint parameters with minimal padding and distinct names, got "
    "name 'a' given 2 times. Build it with FlatLayout.build(...).": lambda: _layout(("a", (2,)), ("a", (3,))),
    "FlatLayout: expected aligned, ordered, disjoint parameters with minimal padding and distinct names, got "
    "1 offsets for 2 parameters. Build it with FlatLayout.build(...).": lambda: FlatLayout(TWO, (0,), 5, 1, 1),
    "FlatLayout: expected aligned, ordered, disjoint parameters with minimal padding and distinct names, got "
    "'b' at 3 after an end at 3 with alignment 4, total 7 for an end at 5 and multiples of 2. "
    "Build it with FlatLayout.build(...).": lambda: FlatLayout(TWO, (0, 3), 7, 4, 2),
    "ShardMap: expected a world size of at least 1, got 0. Pass it.": lambda: _map(0, ("a", (2,))),
    "ShardMap.owner_at: expected a position in [0, 2), got 2. Positions count elements of the flat buffer without "
    "right padding.": lambda: _map(2, ("a", (2,))).owner_at(2),
    "ShardMap: expected a rank in [0, 2), got 2. Ranks count within the shard group.": lambda: _map(
        2, ("a", (2,))
    ).shard_span(2),
}


@pytest.mark.parametrize("message", CASES)
def test_it_says_what_is_wrong(message: str) -> None:
    with pytest.raises(LayoutError) as info:
        CASES[message]()
    assert str(info.value) == message


def test_of_very_many_offenders_the_rest_is_counted() -> None:
    names = tuple(ParamSpec.of(f"w{index}", (1,)) for index in range(53))
    with pytest.raises(LayoutError) as info:
        FlatLayout(names, tuple(range(0, 106, 2)), 105, 1, 1)
    said = str(info.value)
    assert "'w1' at 2 after an end at 1 with alignment 1" in said
    assert "'w50' at 100" in said
    assert "'w51'" not in said
    assert " and 2 more. Build it with" in said
