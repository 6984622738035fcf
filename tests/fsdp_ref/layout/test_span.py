"""Spans by example: the ends that are refused, and the ones that are empty."""

from __future__ import annotations

import pytest

from fsdp_ref.errors import FsdpError, LayoutError
from fsdp_ref.layout import Span


@pytest.mark.parametrize(("start", "stop"), [(3, 2), (-1, 2), (-3, -1)])
def test_a_backward_or_negative_span_is_refused_with_its_values(start, stop):
    with pytest.raises(LayoutError, match=f"start={start}, stop={stop}") as info:
        Span(start, stop)
    assert isinstance(info.value, FsdpError)
    assert isinstance(info.value, ValueError)


def test_length_and_containing():
    span = Span(3, 7)
    assert len(span) == 4
    assert "3" not in span
