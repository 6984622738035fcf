"""Bytes of a block that a tensor covers, and whether two tensors share any."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

MAX_RUNS = 4096
"""Runs of bytes that are listed one by one; a region with more counts as its whole span."""


@dataclass(frozen=True, slots=True)
class Region:
    """The bytes of one tensor inside its storage.

    Attributes:
        offset_bytes: Offset of the first element.
        shape: Number of elements along each dimension; no dimension of size 0.
        strides_bytes: Distance between neighbours along each dimension; not negative.
        itemsize_bytes: Size of one element.
    """

    offset_bytes: int
    shape: tuple[int, ...]
    strides_bytes: tuple[int, ...]
    itemsize_bytes: int

    @property
    def end_bytes(self) -> int:
        """One past the last byte."""
        reach = sum((size - 1) * stride for size, stride in zip(self.shape, self.strides_bytes, strict=True))
        return self.offset_bytes + reach + self.itemsize_bytes

    def runs(self) -> Iterator[tuple[int, int]]:
        """Yield half-open spans of bytes, which may come in any order and overlap."""
        length = self.itemsize_bytes
        outer: list[tuple[int, int]] = []
        for stride, size in sorted(zip(self.strides_bytes, self.shape, strict=True)):
            if size == 1 or stride == 0:
                continue
            if stride == length and not outer:
                length *= size
            else:
                outer.append((stride, size))
        count = 1
        for _, size in outer:
            count *= size
        if count > MAX_RUNS:
            yield self.offset_bytes, self.end_bytes
            return
        for steps in product(*(range(size) for _, size in outer)):
            start = self.offset_bytes + sum(step * stride for step, (stride, _) in zip(steps, outer, strict=True))
            yield start, start + length

    def overlaps(self, other: Region) -> bool:
        """Return whether some byte belongs to both."""
        if self.end_bytes <= other.offset_bytes or other.end_bytes <= self.offset_bytes:
            return False
        mine, theirs = sorted(self.runs()), sorted(other.runs())
        index, reach = 0, -1
        for start, end in mine:
            # A run that begins before this one may reach into it; the furthest end of those is all that counts.
            while index < len(theirs) and theirs[index][0] < end:
                reach = max(reach, theirs[index][1])
                index += 1
            if reach > start:
                return True
        return False
