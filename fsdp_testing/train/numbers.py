"""Which numbers does a script take out of tensors, as it does for its log, and at which lines?

`item`, `float`, `tolist` of one number and formatting are seen. Calls from inside torch are no log of the script.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch

_TORCH = str(Path(torch.__file__).parent)
_FORMATTING = str(Path(_TORCH, "_tensor.py"))
_OURS = str(Path(__file__).parents[1])
_MOST = 1000


@dataclass(slots=True)
class NumbersTaken:
    """Floating numbers that one expression took out of tensors, in order, and the last dtype that they had.

    Attributes:
        place: Of the expression in the code of its function; a line may have several.
    """

    place: int = 0
    dtype: torch.dtype = torch.float64
    values: list[float] = field(default_factory=list)

    @property
    def tensor(self) -> torch.Tensor:
        """The numbers in the dtype that they had."""
        return torch.tensor(self.values, dtype=torch.float64).to(self.dtype)


Log = dict[str, NumbersTaken]
"""By "file.py:line"; further expressions of a line have their number after it."""


@contextmanager
def watch_numbers() -> Iterator[Log]:
    """Take note of the numbers that are taken while the context lasts."""
    log: Log = {}

    def seeing(original: Any) -> Any:
        def take(tensor: torch.Tensor, *args: Any) -> Any:
            value = original(tensor, *args)
            if isinstance(value, float):
                _note(log, sys._getframe(1), tensor.dtype, value)
            return value

        return take

    with ExitStack() as stack:
        for name in ("item", "tolist", "__float__"):
            stack.enter_context(mock.patch.object(torch.Tensor, name, seeing(getattr(torch.Tensor, name))))
        yield log


def _note(log: Log, frame: Any, dtype: torch.dtype, value: float) -> None:
    while frame is not None and frame.f_code.co_filename == _FORMATTING:
        frame = frame.f_back
    if frame is None or frame.f_code.co_filename.startswith((_TORCH, _OURS)):
        return
    line = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
    key, number = line, 1
    while key in log and log[key].place != frame.f_lasti:
        number += 1
        key = f"{line}, number {number}"
    taken = log.setdefault(key, NumbersTaken(frame.f_lasti))
    taken.dtype = dtype
    if len(taken.values) < _MOST:
        taken.values.append(value)
