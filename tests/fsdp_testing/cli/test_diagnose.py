"""`diagnose`: what is printed and written, and the exit code of each answer."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


def dump(*states: str) -> bytes:
    frames = [{"filename": "train.py", "line": 7, "name": "step"}]
    sizes = {"input_sizes": [[4]], "output_sizes": [[4]], "input_dtypes": ["Float"], "output_dtypes": ["Float"]}
    entries = [
        {
            "record_id": number - 1,
            "collective_seq_id": number,
            "process_group": ("0", "default_pg"),
            "profiling_name": "nccl:all_reduce",
            "time_created_ns": number,
            "state": state,
            "frames": frames,
            **sizes,
        }
        for number, state in enumerate(states, start=1)
    ]
    return pickle.dumps({"version": "2.10", "pg_config": {}, "entries": entries})


@pytest.mark.parametrize(
    ("dumps", "code", "sentence"),
    [
        ([["completed"], ["completed"]], 0, "2 ranks hold the same collectives, and none is pending"),
        (
            [["completed", "started"], ["completed"]],
            1,
            "rank 0 waits in all_reduce #2 float[4] at train.py:7 in step; rank 1 never",
        ),
        ([["completed", "started"], ["completed", "started"]], 3, "is pending on every member"),
    ],
)
def test_an_answer_is_printed_and_written(
    verify: Callable[..., Any], tmp_path: Path, dumps: list[list[str]], code: int, sentence: str
) -> None:
    folder, document = tmp_path / "dumps", tmp_path / "diagnosis.json"
    folder.mkdir()
    for rank, states in enumerate(dumps):
        (folder / f"nccl_trace_rank_{rank}").write_bytes(dump(*states))
    ended = verify("diagnose", str(folder), "--json", str(document))
    assert ended.code == code, ended
    assert sentence in " ".join(ended.out.split())
    assert f"exit code {code}" in ended.out
    written = json.loads(document.read_text())
    assert written["format"] == "fsdp_testing/diagnosis"
    assert written["exit_code"] == code
    assert sentence in written["sentences"][0]
    assert [rank["rank"] for rank in written["ranks"]] == [0, 1]
    # Each file by its name is the same.
    assert verify("diagnose", *map(str, sorted(folder.iterdir()))).code == code


def test_what_is_no_dump_is_one_message(verify: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "trace_0").write_bytes(b"no dump")
    ended = verify("diagnose", str(tmp_path / "trace_0"))
    assert (ended.code, ended.out) == (2, "")
    assert "expected a dump of torch's flight recorder" in ended.err
