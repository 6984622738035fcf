"""Many small tensors in few calls."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

import torch
from torch import Tensor

T = TypeVar("T", bound=Tensor)


def cut_into_buckets(tensors: Iterable[T], max_bytes: int) -> list[list[T]]:
    """Cut tensors, in order, into runs of one dtype and device of at most ``max_bytes``, or of one larger tensor."""
    buckets: list[list[T]] = []
    # One open run per kind, so that kinds which alternate (weights, norms in float32) do not end each other's.
    last: dict[tuple[torch.dtype, torch.device], tuple[list[T], int]] = {}
    for tensor in tensors:
        kind = tensor.dtype, tensor.device
        bucket, size = last.get(kind, ([], max_bytes))
        if size + tensor.nbytes > max_bytes:
            bucket, size = [], 0
            buckets.append(bucket)
        bucket.append(tensor)
        last[kind] = bucket, size + tensor.nbytes
    return buckets
