"""Measures how far roundings alone may move a loop's results, by running it again with each rounding made differently.

Two right runs on worlds of different sizes round differently: sums have other orders, each rank rounds the gradient of
its own rows, and a loss divided by another count is rounded elsewhere. Where computation is in bfloat16, or an optimizer
divides a gradient by its own size, no count of roundings of the *result* bounds that. So each result of an operation is
moved here, at random, by up to two units in the last place of the dtype that it was computed in, as autocast casts.

Model (first order, as in Higham, chapter 3): the error of a number is a sum of many independent roundings. A rounding is
uniform over one unit, with variance 1/12; the difference of two runs has twice that, 1/6. A disturbance is -1, 0 or 1
times one to two units, with variance of at least 2/3. Two worlds together: the deviation between right runs is at most
half of that between a run and a disturbed one.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from fsdp_testing.base import compat
from fsdp_testing.cases.records.specs import UNIT_ROUNDOFF

STAGES = {1: (2 / math.pi) ** 0.5, 2: 1.0, 4: 3.0, 8: 105.0}
"""Numbers of disturbed runs after which a difference is looked at, and the moments of |z| that go with them.

A difference that exceeds the bound of any of them is no rounding: one run shows that of a factor of two in float64.
"""
RUNS = max(STAGES)

# Exact: they move numbers, choose among them, or make them without rounding. Random draws are not rounded.
_EXACT = frozenset(
    re.findall(
        r"\w+",
        """
        abs alias amax amin argmax argmin arange as_strided bernoulli bernoulli_ cat ceil clamp clamp_ clamp_min clone
        constant_pad_nd copy_ detach detach_ dropout embedding empty empty_like empty_strided eye fill fill_ flip floor full
        full_like gather index index_put index_put_ index_select lift_fresh masked_fill masked_fill_ masked_select max maximum
        min minimum nan_to_num neg neg_ new_empty new_empty_strided new_full new_ones new_zeros normal_ ones ones_like rand
        rand_like randn randn_like random_ relu relu_ repeat resize_ roll round scatter scatter_ select_backward set_ sgn sign
        slice_backward sort stack threshold_backward topk tril triu trunc uniform_ where zero_ zeros zeros_like _foreach_copy_
        _foreach_neg _foreach_zero_ _local_scalar_dense _reshape_alias _unsafe_view
        """,
    )
)


_DRAWING = re.compile(
    r"aten\.(rand|bernoulli|multinomial|(native_)?dropout|(uniform|normal|random|exponential|geometric)_?\.)"
)


def is_drawing(operation: str) -> bool:
    """Whether an operation, such as "aten.rand.generator", draws random numbers."""
    return _DRAWING.match(operation) is not None


def _unseen(_operation: str, _results: list[Any]) -> None:
    """See nothing."""


@contextmanager
def disturbed(seed: int, see: Callable[[str, list[Any]], None] = _unseen) -> Iterator[None]:
    """Move what every operation computes, in each element independently, by up to two units in the last place.

    Args:
        seed: Different for each run and rank. The program's own generators are left alone.
        see: Is given the name and the results of each operation.
    """
    at_random = partial(_random_steps, torch.Generator().manual_seed(seed))
    by_value = partial(_steps_by_value, seed)

    def move(name: str, inputs: list[Any], results: list[Any]) -> None:
        see(name, results)
        space, operation = name.split(".")[:2]
        if space != "aten" or operation in _EXACT:
            return
        # A sparse tensor has no storage: its numbers are a tensor of their own.
        rounded = _rounded(operation, *([compat.numbers_of(tensor) for tensor in side] for side in (inputs, results)))
        with torch.no_grad():
            for tensor in rounded:
                # A cast rounds equal numbers equally, and programs rely on it: a shard that is cast twice is one shard.
                _disturb(tensor, by_value if operation == "_to_copy" else at_random)

    with compat.each_operation(move):
        yield


def _rounded(operation: str, inputs: Sequence[torch.Tensor], results: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the results that an operation rounded; a view of an input was not computed."""
    floating = [tensor for tensor in inputs if tensor.is_floating_point()]
    if not floating:
        return []
    if operation == "_to_copy":
        return [tensor for tensor in results if tensor.element_size() < floating[0].element_size()]
    if operation.endswith("_"):
        return list(results)
    sources = {tensor.untyped_storage().data_ptr() for tensor in inputs if tensor.layout is torch.strided}
    return [tensor for tensor in results if tensor.untyped_storage().data_ptr() not in sources]


def _disturb(tensor: torch.Tensor, steps_for: Callable[[torch.Tensor], torch.Tensor]) -> None:
    unit = UNIT_ROUNDOFF.get(str(tensor.dtype).removeprefix("torch."))
    overlapping = any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape))
    if unit is None or not tensor.numel() or overlapping or tensor.device.type == "meta":
        return
    steps = steps_for(tensor)
    tensor.mul_((1 + 2 * unit * steps.double()).to(tensor.dtype).to(tensor.device))


def _random_steps(generator: torch.Generator, tensor: torch.Tensor) -> torch.Tensor:
    return torch.randint(-1, 2, tensor.shape, generator=generator)


def _steps_by_value(seed: int, tensor: torch.Tensor) -> torch.Tensor:
    """Return -1, 0 or 1 for each element: the same for the same number."""
    bits = tensor.view({1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()])
    mixed = (bits.long() + (seed << 20)) * -0x61C8864680B583EB  # wraps around, as Knuth's multiplicative hash
    mixed = (mixed ^ (mixed >> 32)) * -0x4B47D0C5A1B9D1C3
    return ((mixed >> 33) & 0xFFFF) % 3 - 1


def room(spread: torch.Tensor, numbers: int, runs: int) -> torch.Tensor:
    """Return how far two right runs may be apart where disturbed ones were at most `spread` away.

    With z normal, the difference of right runs is at most z/2 deviations of a disturbed run, and the largest of k disturbed ones
    is below x deviations with probability of at most (0.8 x)^k. So a difference exceeds c times the spread with probability
    of at most E[|0.4 z / c|^k] = M (0.4 / c)^k, M the k-th moment of |z|. The factor c makes that a millionth over all numbers.

    Args:
        spread: Largest distance of a disturbed run, for each element.
        numbers: How many numbers are compared in all.
        runs: How many disturbed runs there were (k): one of `STAGES`.
    """
    return spread * (0.4 * (STAGES[runs] * 1e6 * max(numbers, 1)) ** (1 / runs))
