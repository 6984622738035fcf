"""How do a rank's observations survive the rank? Each is appended to a file as soon as its case is over.

A batch that ends badly in its tenth case has reported everything of the first nine. The files lie in a directory that
the controller made for itself (mode 0700) and removes; they are read by processes of the same campaign only.
"""

from __future__ import annotations

import copyreg
import io
import math
import pickle
import struct
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any, BinaryIO

import torch

from fsdp_testing.pool.channel import loads, reduce_tensor
from fsdp_testing.records import (
    BufferObservation,
    CaseRecord,
    ObservedPiece,
    OperationAccount,
    OperationResult,
    OptimizerObservation,
    ParameterObservation,
    RankObservation,
    Snapshot,
)

_HEADER = struct.Struct("<Q")


def _by_position(cls: type[Any]) -> Callable[[Any], tuple[Any, ...]]:
    names = tuple(field.name for field in fields(cls))
    return lambda record: (cls, tuple(getattr(record, name) for name in names))


_AS_BYTES = frozenset(
    {torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.uint8, torch.bool}
)
_RECORDS = (
    CaseRecord,
    RankObservation,
    Snapshot,
    ParameterObservation,
    BufferObservation,
    OptimizerObservation,
    OperationResult,
    OperationAccount,
    ObservedPiece,
)


_TABLE: dict[type, Callable[[Any], Any]] = {**copyreg.dispatch_table, **{cls: _by_position(cls) for cls in _RECORDS}}
"""Records are written by position: a case has some hundred of them."""


def tensor_of_record(number: int) -> Any:
    """Stand for a tensor of the record; who reads the record has the tensor itself in the place of this call."""
    raise LookupError(f"tensor {number}: expected to be read by `record_stream.read`, got another reader")


def _written(record: CaseRecord) -> bytes:
    """Write the tensors of one dtype as one piece of memory, and in the record their numbers."""
    tensors: list[torch.Tensor] = []

    def numbered(tensor: torch.Tensor) -> tuple[Any, ...]:
        plain = tensor.dtype in _AS_BYTES and tensor.layout is torch.strided and tensor.device.type == "cpu"
        if not plain or tensor.requires_grad:
            return reduce_tensor(tensor)
        tensors.append(tensor)
        return tensor_of_record, (len(tensors) - 1,)

    body = io.BytesIO()
    pickler = pickle.Pickler(body, protocol=5)
    pickler.dispatch_table = {**_TABLE, torch.Tensor: numbered}
    pickler.dump(record)
    by_dtype: dict[torch.dtype, list[int]] = {}
    for number, tensor in enumerate(tensors):
        by_dtype.setdefault(tensor.dtype, []).append(number)
    groups = []
    for dtype, numbers in by_dtype.items():
        flat = torch.cat([tensors[number].reshape(-1) for number in numbers])
        shapes = [tuple(tensors[number].shape) for number in numbers]
        groups.append((str(dtype).removeprefix("torch."), numbers, shapes, flat.view(torch.uint8).numpy().tobytes()))
    return pickle.dumps((body.getvalue(), groups), protocol=5)


class _Reader(pickle.Unpickler):
    """Reads what `_written` wrote; the tensors of one dtype are views of one piece of memory."""

    def __init__(self, data: bytes) -> None:
        body, groups = loads(data)
        super().__init__(io.BytesIO(body))
        self._tensors: dict[int, torch.Tensor] = {}
        for dtype, numbers, shapes, values in groups:
            kind = getattr(torch, dtype)
            flat = torch.frombuffer(bytearray(values), dtype=kind) if values else torch.empty(0, dtype=kind)
            parts = flat.split([math.prod(shape) for shape in shapes])
            self._tensors.update(
                (number, part if len(shape) == 1 else part.view(shape))
                for number, part, shape in zip(numbers, parts, shapes)
            )

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == (__name__, tensor_of_record.__name__):
            return self._tensors.__getitem__
        return super().find_class(module, name)


def path_of(directory: str, rank: int) -> Path:
    """Return the file of one rank."""
    return Path(directory) / f"rank{rank}"


def append(file: BinaryIO, record: CaseRecord) -> None:
    """Write one record and hands it to the kernel, where the death of this process does not matter."""
    data = _written(record)
    file.write(_HEADER.pack(len(data)) + data)
    file.flush()


def read(directory: str, rank: int) -> list[CaseRecord]:
    """Return the complete records of one rank, in the order of writing; a record cut short by the rank's death is left out."""
    try:
        data = path_of(directory, rank).read_bytes()
    except FileNotFoundError:
        return []
    records: list[Any] = []
    place = 0
    while place + _HEADER.size <= len(data):
        (length,) = _HEADER.unpack_from(data, place)
        end = place + _HEADER.size + length
        if end > len(data):
            break
        records.append(_Reader(data[place + _HEADER.size : end]).load())
        place = end
    return records
