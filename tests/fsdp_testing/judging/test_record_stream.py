"""What a rank appends is what is read, to the bit; a record that its death cut short is left out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from fsdp_testing.cases.records import (
    BufferObservation,
    CaseRecord,
    ObservedPiece,
    OperationResult,
    ParameterObservation,
    RankObservation,
    Snapshot,
)
from fsdp_testing.judging import record_stream

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.bool, torch.complex64)


def tensors() -> dict[str, torch.Tensor]:
    """Return tensors of every kind that is written in a way of its own, bits that `==` does not see included."""
    odd = torch.tensor([float("nan"), -0.0, 0.0, float("inf")], dtype=torch.float64)
    odd.view(torch.int64)[0] += 7
    made = {str(dtype): torch.arange(6).reshape(2, 3).to(dtype) for dtype in DTYPES}
    return made | {
        "odd": odd,
        "number": torch.tensor(3.0, dtype=torch.float64),
        "empty": torch.empty(0, dtype=torch.float64),
        "no rows": torch.empty((0, 3), dtype=torch.bfloat16),
        "turned": torch.arange(6.0).reshape(2, 3).t(),
        "trained": torch.ones(2, requires_grad=True),
    }


def record(index: int, values: dict[str, torch.Tensor]) -> CaseRecord:
    weight = torch.arange(3.0)
    pieces = (ObservedPiece(0, 3, weight), ObservedPiece(3, 3, weight[:0]))
    seen = ParameterObservation("w", (3,), "float32", True, pieces, None, None)
    snapshot = Snapshot(1, "end", {"w": seen}, {"b": BufferObservation("b", "float32", weight)})
    return CaseRecord(index, RankObservation(0, (OperationResult(0, values),), (snapshot,)), {1: (2, 2**63)}, ("leak",))


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def is_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return (one.dtype, one.shape, one.requires_grad, bits(one)) == (
        other.dtype,
        other.shape,
        other.requires_grad,
        bits(other),
    )


def write(folder: Path, *records: CaseRecord) -> Path:
    path = record_stream.path_of(str(folder), 0)
    with path.open("ab") as file:
        for one in records:
            record_stream.append(file, one)
    return path


def test_what_is_read_is_what_was_written_to_the_bit(tmp_path: Path):
    given = tensors()
    write(tmp_path, record(0, given), record(1, {}))
    first, second = record_stream.read(str(tmp_path), 0)
    found: Any = first.observation.results[0].values
    assert list(found) == list(given)
    assert [name for name, tensor in given.items() if not is_same(found[name], tensor)] == []
    snapshot = first.observation.snapshots[0]
    pieces = snapshot.parameters["w"].pieces
    assert [(piece.start, piece.stop, piece.value.tolist()) for piece in pieces] == [
        (0, 3, [0.0, 1.0, 2.0]),
        (3, 3, []),
    ]
    assert snapshot.buffers["b"].value.tolist() == [0.0, 1.0, 2.0]
    assert (first.collectives, first.leaks, second.index) == ({1: (2, 2**63)}, ("leak",), 1)
    assert dict(second.observation.results[0].values) == {}


@pytest.mark.parametrize("cut", [1, 9])
def test_a_record_that_was_cut_short_is_left_out(tmp_path: Path, cut: int):
    path = write(tmp_path, record(0, {}))
    whole = path.stat().st_size
    write(tmp_path, record(1, tensors()))
    data = path.read_bytes()
    path.write_bytes(data[:-cut])
    assert [one.index for one in record_stream.read(str(tmp_path), 0)] == [0]
    path.write_bytes(data[: whole + cut])
    assert [one.index for one in record_stream.read(str(tmp_path), 0)] == [0]
    assert record_stream.read(str(tmp_path), 1) == []
