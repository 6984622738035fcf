"""Keeps a rank's observations when the rank is lost: each is appended to a file as soon as its case is over.

A batch that ends badly in its tenth case has reported everything of the first nine. The files lie in a directory that
the controller made for itself (mode 0700) and removes; they are read by processes of the same campaign only.
"""

from __future__ import annotations

import copyreg
import io
import pickle
import struct
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any, BinaryIO

import torch

from fsdp_testing.cases.records import (
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
from fsdp_testing.ranks.pool.channel import loads, reduce_tensor

_HEADER = struct.Struct("<Q")


def _by_position(cls: type[Any]) -> Callable[[Any], tuple[Any, ...]]:
    names = tuple(field.name for field in fields(cls))
    return lambda record: (cls, tuple(getattr(record, name) for name in names))


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


class _RecordPickler(pickle.Pickler):
    """Write the records of this file by position and tensors as bytes: a case has some hundred of them."""

    dispatch_table = {
        **copyreg.dispatch_table,
        torch.Tensor: reduce_tensor,
        **{cls: _by_position(cls) for cls in _RECORDS},
    }


def path_of(directory: str, rank: int) -> Path:
    """Return the file of one rank."""
    return Path(directory) / f"rank{rank}"


def append(file: BinaryIO, record: CaseRecord) -> None:
    """Write one record and hands it to the kernel, where the death of this process does not matter."""
    buffer = io.BytesIO()
    _RecordPickler(buffer, protocol=5).dump(record)
    data = buffer.getvalue()
    # A concurrent reader finds the length before the record, and knows when the record is incomplete.
    file.write(_HEADER.pack(len(data)) + data)
    file.flush()


def read(directory: str, rank: int) -> list[CaseRecord]:
    """Return the complete records of one rank, in the order of writing; a record cut short by the rank's death is left out."""
    try:
        data = path_of(directory, rank).read_bytes()
    except FileNotFoundError:
        return []
    records: list[Any] = []
    position = 0
    while position + _HEADER.size <= len(data):
        (length,) = _HEADER.unpack_from(data, position)
        end = position + _HEADER.size + length
        # Cut short by the death of the rank, which only ever loses the last record.
        if end > len(data):
            break
        records.append(loads(data[position + _HEADER.size : end]))
        position = end
    return records
