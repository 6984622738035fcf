"""Dumps of torch's flight recorder: who waits for whom, and what a file that is none does (nothing)."""

from __future__ import annotations

import json
import os
import pickle
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from fsdp_testing import run_ranks
from fsdp_testing.errors import InvalidArgument, InvalidRecord
from fsdp_testing.ranks.dumps import diagnose, read_dumps
from fsdp_testing.ranks.pool import default_pool
from fsdp_testing.ranks.pool.world import current_world


@pytest.fixture(scope="module", autouse=True)
def _no_rank_is_left() -> Iterator[None]:
    yield
    default_pool().close()


def entry(number, name="all_reduce", *, size=4, pending=False, group=("0", "default_pg"), line=10, at=0, **more):
    return {
        "record_id": number - 1,
        "process_group": group,
        "collective_seq_id": number,
        "p2p_seq_id": 0,
        "profiling_name": f"nccl:{name}",
        "time_created_ns": 10**9 * number + at,
        "input_sizes": [[size]],
        "input_dtypes": ["Float"],
        "output_sizes": [[size]],
        "output_dtypes": ["Float"],
        "state": "started" if pending else "completed",
        "retired": not pending,
        "is_p2p": False,
        "frames": [
            {"name": name, "filename": "/site-packages/torch/distributed/distributed_c10d.py", "line": 99},
            {"name": "train", "filename": "train.py", "line": line},
        ],
        **more,
    }


def dump(entries, ranks=(0, 1), **groups):
    config = {"0": {"name": "0", "desc": "default_pg", "ranks": str(list(ranks))}}
    config |= {
        name: {"name": name, "desc": "undefined", "ranks": str(list(members))} for name, members in groups.items()
    }
    return {"version": "2.10", "pg_config": config, "pg_status": {}, "entries": entries}


@pytest.fixture
def diagnosed(tmp_path):
    def diagnosed(*dumps, size=None, as_json=False):
        for rank, content in dumps:
            path = tmp_path / f"nccl_trace_rank_{rank}"
            path.write_bytes(json.dumps(content).encode() if as_json else pickle.dumps(content, 2))
        return diagnose(read_dumps([tmp_path]), size)

    return diagnosed


@pytest.mark.parametrize("as_json", [False, True])
@pytest.mark.parametrize("size", [2, 3])
def test_ranks_that_agree_have_nothing_wrong_and_the_late_one_stands_in_the_table(diagnosed, size, as_json):
    ranks = range(size)
    said = diagnosed(
        *((rank, dump([entry(1), entry(2, at=3 * 10**8 if rank == 1 else 0)], ranks)) for rank in ranks),
        as_json=as_json,
    )
    assert (said.exit_code, said.sentences) == (0, (f"{size} ranks hold the same collectives, and none is pending",))
    assert [(rank.compared, rank.mean, rank.most) for rank in said.ranks[:2]] == [(2, 0.0, 0.0), (2, 0.15, 0.3)]
    assert said.ranks[1].where == "all_reduce #2 float[4] at train.py:10 in train"


def test_a_rank_waits_for_one_that_never_joined(diagnosed):
    waiting = dump([entry(1), entry(2, "broadcast", pending=True, line=20)], range(3))
    said = diagnosed((0, waiting), (1, dump([entry(1, line=11)], range(3))), (2, waiting))
    assert said.exit_code == 1
    assert said.sentences == (
        "ranks 0, 2 wait in broadcast #2 float[4] at train.py:20 in train; rank 1 never joined it: it last issued all_reduce #1 "
        "float[4] at train.py:11 in train",
    )


def test_ranks_that_wait_for_each_other_are_called_so(diagnosed):
    def waits(group, line):
        return dump([entry(1, pending=True, group=(group, "undefined"), line=line)], a=(0, 1), b=(0, 1))

    said = diagnosed((0, waits("a", 1)), (1, waits("b", 2)))
    assert said.exit_code == 1
    assert said.sentences[0].startswith(
        "ranks wait for each other, for example because groups are used in opposite order: rank 0 waits in"
    )
    assert said.sentences[1].startswith(
        "rank 1 waits in all_reduce #1 float[4] on group 'b' of ranks [0, 1] at train.py:2"
    )


@pytest.mark.parametrize("change", [{"name": "broadcast"}, {"size": 5}])
def test_collectives_that_differ_lead(diagnosed, change):
    said = diagnosed(
        (0, dump([entry(1), entry(2, pending=True)])), (1, dump([entry(1), entry(2, pending=True, line=30, **change)]))
    )
    assert said.exit_code == 1
    assert said.sentences[0].startswith(
        "ranks disagree: collective #2 of the default group differs: rank 0 issued all_reduce float[4] at train.py:10 in train; "
        "rank 1 issued"
    )
    assert said.sentences[0].endswith("at train.py:30 in train")


def test_sizes_that_every_rank_may_choose_are_no_difference(diagnosed):
    dumps = [(rank, dump([entry(1, "all_to_all_single", size=4 + rank)])) for rank in range(2)]
    assert diagnosed(*dumps).exit_code == 0


def test_a_rank_without_a_dump_is_named(diagnosed):
    said = diagnosed(
        (0, dump([entry(1), entry(2, pending=True)], range(3))), (2, dump([entry(1), entry(2, pending=True)], range(3)))
    )
    assert said.exit_code == 1
    assert said.sentences[0].startswith("ranks 0, 2 wait in all_reduce #2")
    assert said.sentences[0].endswith("rank 1 never joined it: it left no dump")
    assert said.sentences[1].startswith("rank 1 left no dump")


def test_the_number_of_ranks_can_be_said(diagnosed):
    alike = [(rank, {**dump([entry(1)]), "pg_config": {}}) for rank in range(2)]
    assert diagnosed(*alike).exit_code == 0
    assert diagnosed(*alike, size=3).sentences == (
        "rank 2 left no dump: a rank that died, or that could not write one",
    )


def test_what_no_dump_explains_is_unknown(diagnosed):
    under_way = [(rank, dump([entry(1, pending=True)])) for rank in range(2)]
    assert diagnosed(*under_way).exit_code == 3
    assert "is pending on every member" in diagnosed(*under_way).sentences[0]
    behind = [(0, dump([entry(1), entry(2)])), (1, dump([entry(1)]))]
    assert diagnosed(*behind).exit_code == 3
    assert (
        "#2 of the default group is pending in no dump, but rank 1 never joined it" in diagnosed(*behind).sentences[0]
    )
    receives = [(rank, dump([entry(1), entry(2, "recv 1<-0", is_p2p=True, pending=True)])) for rank in range(2)]
    assert diagnosed(*receives).exit_code == 3
    assert diagnosed((0, dump([])), (1, dump([]))).exit_code == 3


def test_groups_of_one_name_on_other_ranks_are_not_compared(diagnosed):
    pairs = [(0, 1), (2, 3)]
    dumps = [
        (rank, dump([entry(1, size=4 + rank // 2, group=("tp", "undefined"))], range(4), tp=pairs[rank // 2]))
        for rank in range(4)
    ]
    assert diagnosed(*dumps).exit_code == 0


def test_one_that_is_made_of_several_is_one(diagnosed):
    parts = [entry(1, "coalesced"), entry(1, "all_reduce", record_id=1)]
    assert diagnosed((0, dump(parts)), (1, dump(parts))).exit_code == 0
    assert diagnosed((0, dump(parts)), (1, dump(parts[:1]))).exit_code == 1


def leaves_dumps(folder: str, *, joins_late: int) -> None:
    """All ranks but one are in a collective while all write their dumps; then that one joins."""
    world = current_world()
    value = torch.ones(3)
    dist.all_reduce(value)
    work = dist.all_reduce(value, async_op=True) if world.rank != joins_late else None
    Path(folder, f"dump_{world.rank}").write_bytes(c10d._dump_fr_trace())
    # Not before all have written: what the late rank issues would end the wait.
    while len(list(Path(folder).iterdir())) < world.size:
        os.sched_yield()
    (work or dist.all_reduce(value, async_op=True)).wait()


@pytest.mark.parametrize("size", [2, 3])
def test_real_dumps_name_the_rank_and_both_places(tmp_path, size):
    run_ranks(leaves_dumps, str(tmp_path), size=size, joins_late=1, isolation="fresh")
    said = diagnose(read_dumps([tmp_path]))
    others = "rank 0 waits" if size == 2 else "ranks 0, 2 wait"
    here = f"{__file__}:{{}} in leaves_dumps"
    first = leaves_dumps.__code__.co_firstlineno
    assert said.exit_code == 1
    assert said.sentences == (
        f"{others} in all_reduce #2 float[3] at {here.format(first + 5)}; rank 1 never joined it: it last issued all_reduce #1 "
        f"float[3] at {here.format(first + 4)}",
    )
    assert [rank.compared for rank in said.ranks] == [1] * size


class Opens:
    """A pickle of it opens a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return (open, (str(self.path), "w"))


WIDE: list = []
for _ in range(60):
    WIDE = [WIDE, WIDE]


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x80",
        b"garbage",
        b"{",
        b"[1]",
        b"\x80\x02r" + struct.pack("<I", 2**31) + b".",
        b"\x80\x02]r" + struct.pack("<I", 2**31 - 1) + b".",
        b"\x80\x04\x8d" + struct.pack("<Q", 2**62),
        b"\x80\x02cos\nsystem\n(X\x04\x00\x00\x00true\x85R.",
        b"\x80\x02)\x81.",
        pickle.dumps(dump([entry(1)]))[:-20],
        pickle.dumps([1]),
        pickle.dumps({"version": "2.10"}),
        pickle.dumps({"version": "3.0", "entries": []}),
        pickle.dumps({"version": WIDE, "entries": []}, 2),
        pickle.dumps(dump([None])),
        pickle.dumps(dump([{}])),
        pickle.dumps(dump([entry(1, time_created_ns=float("inf"))])),
        pickle.dumps(dump([entry(1, process_group=(WIDE, WIDE))]), 2),
        pickle.dumps(dump([entry(1, frames=[{"filename": WIDE, "line": 1, "name": "f"}])]), 2),
        pickle.dumps(dump([entry(1, input_sizes=[["x"]])])),
        b'{"version": "2.10", "entries": [' + b"[" * 100_000,
    ],
    ids=lambda data: f"{len(data)} bytes",
)
def test_a_file_that_is_no_dump_is_refused_by_its_name(tmp_path, data):
    path = tmp_path / "trace_0"
    path.write_bytes(data)
    with pytest.raises(InvalidRecord, match="trace_0"):
        diagnose(read_dumps([path]))


def test_nothing_in_a_dump_is_executed(tmp_path):
    trap = tmp_path / "opened"
    (tmp_path / "trace_0").write_bytes(pickle.dumps({**dump([entry(1)]), "more": Opens(trap)}))
    with pytest.raises(InvalidRecord, match="nothing in it was executed"):
        read_dumps([tmp_path / "trace_0"])
    assert not trap.exists()


@pytest.mark.parametrize(
    ("names", "message"),
    [([], "got none"), (["notes.txt"], "a name that ends with the rank"), (["a_0", "b_0"], "a rank that no other has")],
)
def test_names_of_files_say_the_rank(tmp_path, names, message):
    for name in names:
        (tmp_path / name).write_bytes(pickle.dumps(dump([entry(1)])))
    with pytest.raises(InvalidArgument, match=message):
        read_dumps([tmp_path])


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(InvalidArgument, match="trace_7"):
        read_dumps([tmp_path / "trace_7"])
