"""The life cycle of one flat parameter, for every rank of worlds that are not there, in one process.

FakeProcessGroup moves nothing: a gather leaves every chunk as the group's stand-in pleases. What each rank cuts, what
it owns, which states follow one another and which memory is live do not depend on the bytes of others. Run in a
process of its own, because the default process group is one per process.
"""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest

PRELUDE = """
import torch, torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore
from fsdp_ref import ShardingStrategy as S
from fsdp_ref.errors import TransitionError
from fsdp_ref.flat_param import FlatParamHandle
from fsdp_ref.states import ShardState

def module(shapes=((7, 3), (5, 7), (), (5, 5), (0, 2))):
    made = nn.Module()
    for index, shape in enumerate(shapes):
        numel = torch.Size(shape).numel()
        made.register_parameter(f"p{index}", nn.Parameter(torch.arange(1.0, numel + 1).reshape(shape) + 100 * index))
    return made

def handle(made, orig, strategy=S.FULL_SHARD, low=None):
    return FlatParamHandle(list(made.parameters()), made, torch.device("cpu"), strategy, False, low, None, False,
                           dist.group.WORLD, orig)

def world(size, rank):
    dist.init_process_group("fake", rank=rank, world_size=size, store=FakeStore())
"""


def run(body: str) -> str:
    script = PRELUDE + textwrap.dedent(body)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.covers("CPU-01", "CPU-03", "FLAT-06", "FLAT-07", "FLAT-08", "FLAT-09", "STRAT-10", "CTOR-23")
@pytest.mark.parametrize("sizes", [range(1, 20), [64, 100], [1024]], ids=["1 to 19", "64 and 100", "1024"])
def test_every_rank_of_every_world(sizes):
    out = run(
        f"""
        checked = 0
        for size in {list(sizes)}:
            for rank in range(size):
                world(size, rank)
                for orig in (True, False):
                    plain = module()
                    values = [p.detach().clone() for p in plain.parameters()]
                    made = handle(plain, orig)
                    inner, maps = made.handle, made.handle.shard_map
                    flat = inner.shard_S.new_full((maps.layout.numel,), 42.0)
                    for span, value in zip(maps.layout.spans, values):
                        flat[span.as_slice()] = value.reshape(-1)
                    chunks = torch.chunk(flat, size)
                    mine = chunks[rank] if rank < len(chunks) else flat[:0]
                    assert torch.equal(inner.shard_S[: mine.numel()], mine)
                    assert not inner.shard_S[mine.numel():].any()
                    assert inner.shard_S.numel() == chunks[0].numel() == maps.shard_numel
                    for info, value in zip(made.shard_param_infos(), values):
                        if info.in_shard:
                            piece = inner.shard_S[info.offset_in_shard : info.offset_in_shard + info.numel_in_shard]
                            assert torch.equal(piece, value.reshape(-1)[info[3] : info[4] + 1])
                    if orig:
                        assert sum(p.numel() for p in plain.parameters()) == sum(
                            piece.span_in_param.numel for piece in maps.param_spans(rank)) or size == 1
                    states = [inner.state]
                    inner.start_unshard(); states.append(inner.state)
                    inner.finish_unshard(); states.append(inner.state)
                    views = inner.compute_views()
                    assert [v.shape for v in views] == [v.shape for v in values]
                    span = maps.shard_span(rank)
                    assert torch.equal(inner.full_F()[span.as_slice()], mine)
                    inner.reshard(); states.append(inner.state)
                    assert states == [ShardState.SHARDED, ShardState.UNSHARDING, ShardState.UNSHARDED, ShardState.SHARDED]
                    if size > 1:
                        assert inner._buffers[torch.float32].tensor.untyped_storage().nbytes() == 0
                    checked += 1
                dist.destroy_process_group()
        print(checked)
        """
    )
    assert int(out) == 2 * sum(sizes)


def test_asking_twice_costs_nothing_and_illegal_moves_are_named():
    out = run(
        """
        world(4, 1)
        inner = handle(module(), True).handle
        assert inner.start_unshard() is True
        assert inner.start_unshard() is False
        inner.finish_unshard()
        inner.finish_unshard()
        assert inner.start_unshard() is False
        before = inner.full_F().data_ptr()
        inner.unshard()
        assert inner.full_F().data_ptr() == before
        inner.reshard()
        inner.reshard()
        inner.start_unshard()
        inner.reshard()  # a gather that nobody waited for
        assert inner.state is ShardState.SHARDED
        try:
            inner._move_to(ShardState.UNSHARDED)
        except TransitionError as error:
            print(error)
        """
    )
    assert "expected a move from SHARDED" in out


@pytest.mark.covers("MP-02", "MP-18", "FLAT-02", "FLAT-04", "FLAT-20")
def test_copies_and_alignment_by_strategy_and_dtype():
    run(
        """
        world(2, 0)
        for strategy in (S.FULL_SHARD, S.SHARD_GRAD_OP, S.NO_SHARD):
            for low in (None, torch.float32, torch.bfloat16):
                for orig in (True, False):
                    inner = handle(module(), orig, strategy, low).handle
                    sharded = strategy is not S.NO_SHARD
                    lowered = low is torch.bfloat16
                    assert inner.sharded == sharded
                    assert inner.needs_buffer == (sharded or lowered)
                    assert inner.layout.alignment_numel == ((8 if lowered else 4) if orig else 1)
                    inner.unshard()
                    assert inner.full_F().dtype == (torch.bfloat16 if lowered else torch.float32)
                    assert inner.shard_S.dtype == torch.float32
                    if not inner.needs_buffer:
                        assert inner.full_F() is inner.shard_S
                    inner.reshard()
                    assert inner.shard_S.untyped_storage().nbytes() > 0
        """
    )


@pytest.mark.covers("LIM-07")
def test_memory_is_counted_and_given_back():
    run(
        """
        from fsdp_ref.storage.flat_buffer import LEDGER
        world(8, 3)
        handles = [handle(module(), True).handle for _ in range(5)]
        LEDGER.reset_peak()
        base = LEDGER.live_bytes
        for each in handles:
            each.unshard()
            each.reshard()
        full = handles[0].shard_map.padded_numel * 4
        assert LEDGER.live_bytes == base
        assert LEDGER.peak_bytes == base + full
        """
    )
