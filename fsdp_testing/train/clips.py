"""Reconstructs a step's gradients without its clips; another backward pass may follow each of them."""

from __future__ import annotations

from dataclasses import replace

import torch

from fsdp_testing.train.holdings import Spans
from fsdp_testing.train.reading import Reader
from fsdp_testing.train.spans import Span


class Clips:
    """Adds back to this rank's gradients what clips have removed since the last step; `reader` reads its models."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self.end_step()

    def end_step(self) -> None:
        self._unclipped: Spans = {}
        self._taken: Spans = {}
        self._left: Spans = {}
        self._is_read = self._clears = False

    def before(self) -> None:
        """Read gradients before the first clip since a backward pass: a second one, of other parameters, adds nothing."""
        if not self._is_read:
            self._unclipped = _combined(self._reader.gradients(), self._taken, 1)
            self._is_read = True

    def after(self) -> None:
        if self._clears:
            self._left = self._reader.gradients()

    def begin_pass(self) -> None:
        """Note what clips removed from gradients that a further pass adds to; cleared gradients lose nothing."""
        if not self._unclipped:
            return
        now = self._reader.gradients()
        taken = _combined(self._unclipped, now, -1) if self._is_read else self._taken
        self._taken = {name: spans for name, spans in taken.items() if name in now and _is_filled(now[name])}
        self._clears |= any(_is_filled(spans) for name, spans in taken.items() if name not in self._taken)
        self._is_read, self._left = False, {}

    def at_step(self) -> Spans:
        """Return the gradients without clips before an optimizer's step; nothing if unknown.

        A script that takes clipped gradients away to add them up (as DP-SGD does) steps gradients that were not clipped.
        """
        if not self._unclipped or (self._left and not _same(self._left, self._reader.gradients())):
            return {}
        self.before()
        return self._unclipped


def _combined(spans: Spans, others: Spans, factor: int) -> Spans:
    """Return gradients plus `factor` times others, where there are some at the same places."""

    def total(one: Span, other: Span) -> Span:
        digest = one.digest and f"{one.digest}{factor:+}{other.digest}"
        return replace(one, values=one.values + factor * other.values, digest=digest)

    fits = {name: _places(held) == _places(others.get(name, ())) for name, held in spans.items()}
    return {n: tuple(map(total, held, others[n])) if fits[n] else held for n, held in spans.items()}


def _places(spans: tuple[Span, ...]) -> list[tuple[int, int]]:
    return [(span.start, span.stop) for span in spans]


def _is_filled(spans: tuple[Span, ...]) -> bool:
    return any(bool(span.values.any()) for span in spans)


def _same(one: Spans, other: Spans) -> bool:
    pairs = [(a, b) for name, held in one.items() for a, b in zip(held, other.get(name, ()))]
    return all(a.digest == b.digest and torch.equal(a.values, b.values) for a, b in pairs)
