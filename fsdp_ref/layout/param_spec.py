"""One parameter as a flat buffer knows it: enough to place it there and to rebuild it.

A name, a shape, the order in which its elements are stored, and the other names it is known by. No tensor, no dtype:
one flat buffer has one dtype, and the layout counts elements.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from fsdp_ref.errors import LayoutError, explain

if TYPE_CHECKING:
    from collections.abc import Sequence


def row_major_stride(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor of ``shape`` (a dimension of size 0 counts as 1, as torch does)."""
    stride: list[int] = []
    step = 1
    for size in reversed(shape):
        stride.append(step)
        step *= max(size, 1)
    return tuple(reversed(stride))


def is_row_major(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Return whether ``stride`` walks ``shape`` in row-major order; strides of dimensions of size 1 do not matter."""
    if 0 in shape:
        return True
    wanted = row_major_stride(shape)
    return all(size == 1 or have == want for size, have, want in zip(shape, stride, wanted, strict=True))


def is_dense(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Return whether the elements fill one gapless block of storage, each place once, in whatever order."""
    if 0 in shape:
        return True
    step = 1
    for have, size in sorted((st, sz) for sz, st in zip(shape, stride, strict=True) if sz != 1):
        if have != step:
            return False
        step *= size
    return True


# The parameters of a model have few shapes: what they imply is worked out once for each.
@lru_cache
def _form(shape: tuple[int, ...], stride: tuple[int, ...] | None) -> tuple[tuple[int, ...], tuple[int, ...], bool, int]:
    """Return sizes, strides, whether these are row-major, and the number of elements."""
    sizes = tuple(int(size) for size in shape)
    wanted = row_major_stride(sizes)
    steps = wanted if stride is None else tuple(int(step) for step in stride)
    # In row-major order dimensions of size 1 may carry any stride; torch's own values are kept.
    if steps != wanted and len(steps) == len(sizes) and not is_dense(sizes, steps):
        steps = wanted
    contiguous = steps == wanted or (len(steps) == len(sizes) and is_row_major(sizes, steps))
    return sizes, steps, contiguous, math.prod(sizes)


@lru_cache
def _contradictions(shape: tuple[int, ...], stride: tuple[int, ...], contiguous: bool, numel: int) -> tuple[str, ...]:
    problems: list[str] = []
    row_major = stride == row_major_stride(shape)  # most are, and then are dense
    if any(size < 0 for size in shape):
        problems.append("a negative size")
    if len(stride) != len(shape):
        problems.append(f"{len(stride)} strides for {len(shape)} dimensions")
    elif numel != math.prod(shape):
        problems.append(f"numel {numel} where the shape holds {math.prod(shape)}")
    elif not (row_major or is_dense(shape, stride)):
        problems.append("strides that leave gaps or overlap")
    elif contiguous != (row_major or is_row_major(shape, stride)):
        problems.append(f"contiguous={contiguous}, which its strides contradict")
    return tuple(problems)


@dataclass(frozen=True, slots=True)
class ParamSpec:
    """One parameter as the layout sees it.

    Attributes:
        fqn: fully qualified name, relative to the module that the flat parameter belongs to.
        shape: sizes per dimension; ``()`` is a scalar of one element.
        stride: element strides with which the parameter is rebuilt from its flat range.
        contiguous: whether that order is row-major.
        numel: number of elements.
        aliases: further names of the same (tied) parameter, in registration order.
    """

    fqn: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    contiguous: bool
    numel: int
    aliases: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Prove that shape, stride, order and size agree."""
        problems = _contradictions(tuple(self.shape), tuple(self.stride), self.contiguous, self.numel)
        if problems:
            raise LayoutError(
                explain(
                    f"ParamSpec({self.fqn!r})",
                    expected="a dense tensor description",
                    got=f"{', '.join(problems)} (shape {self.shape}, stride {self.stride})",
                    remedy="Build it with ParamSpec.of(...)",
                )
            )

    @classmethod
    def of(
        cls, fqn: str, shape: Sequence[int], stride: Sequence[int] | None = None, aliases: Sequence[str] = ()
    ) -> ParamSpec:
        """Describe a tensor of ``shape`` and ``stride``.

        A dense tensor keeps its own element order (channels-last weights stay channels-last). One whose strides leave
        gaps or overlap cannot be rebuilt from as many elements as it has, so it is laid out in row-major order.
        """
        return cls(fqn, *_form(tuple(shape), None if stride is None else tuple(stride)), tuple(aliases))

    @property
    def names(self) -> tuple[str, ...]:
        """Every name of the parameter, its own first."""
        return (self.fqn, *self.aliases)

    @property
    def storage_order(self) -> tuple[int, ...]:
        """Dimensions from outermost to innermost in storage: permuting by it makes the parameter row-major."""
        return tuple(sorted(range(len(self.shape)), key=lambda dim: (-self.stride[dim], dim)))
