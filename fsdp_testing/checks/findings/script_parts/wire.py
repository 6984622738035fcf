"""Counts, for a script, the gathers and reductions of process groups."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

FLAG_BYTES = 16  # less is a flag or a norm
CALLS: Sequence[tuple[str, str, int]] = (
    ("_allgather_base", "gathers", 0),
    ("all_gather_single", "gathers", 0),
    ("allgather", "gathers", 0),
    ("_reduce_scatter_base", "reductions", 1),
    ("reduce_scatter_single", "reductions", 1),
    ("reduce_scatter", "reductions", 1),
    ("allreduce", "reductions", 0),
)


class Wire:
    """Sizes in bytes of the gathers and reductions since the last clear."""

    def __init__(self) -> None:
        self.sent: dict[str, list[int]] = {"gathers": [], "reductions": []}

    def clear(self) -> None:
        for sizes in self.sent.values():
            sizes.clear()

    def watch(self) -> Wire:
        for method, kind, place in CALLS:
            original = getattr(dist.ProcessGroup, method, None)
            if original is not None:
                setattr(dist.ProcessGroup, method, self._counting(original, kind, place))
        return self

    def _counting(self, original: Any, kind: str, place: int) -> Any:
        def call(group: Any, *arguments: Any, **options: Any) -> Any:
            tensors = arguments[place]
            while isinstance(tensors, (list, tuple)) and isinstance(tensors[0], (list, tuple)):
                tensors = tensors[0]
            tensors = tensors if isinstance(tensors, (list, tuple)) else [tensors]
            size = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
            if size > FLAG_BYTES:
                self.sent[kind].append(size)
            return original(group, *arguments, **options)

        return call


WIRE = Wire()
