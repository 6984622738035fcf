"""One flat parameter through its states, as every rank of worlds of any size, in one process."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from fsdp_ref.comm.groups import DataParallelGroups
from fsdp_ref.config import MixedPrecision, ShardingStrategy, UnitConfig
from fsdp_ref.errors import FlattenError, FsdpRuntimeError, TransitionError
from fsdp_ref.handle.flat_handle import FlatHandle
from fsdp_ref.handle.flatten import build_layout, check_params, flatten
from fsdp_ref.states import UnitState
from fsdp_ref.storage.memory import FlatBuffer
from fsdp_ref.torch_names.flat_param import sites_below

CPU = torch.device("cpu")


@contextmanager
def fake_world(size: int, rank: int) -> Iterator[DataParallelGroups]:
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        yield DataParallelGroups(dist.group.WORLD)
    finally:
        dist.destroy_process_group()


def module() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 7), nn.Linear(7, 5), nn.LayerNorm(5))


def make(groups, *, uo=True, strategy=ShardingStrategy.FULL_SHARD, **options) -> FlatHandle:
    model = module()
    config = UnitConfig(strategy=strategy, device=CPU, groups=groups, use_orig_params=uo, **options)
    return FlatHandle(sites_below(model, model.parameters()), model, config)


def worlds():
    for size in (1, 2, 3, 7, 64, 1024):
        for rank in range(size) if size <= 64 else (0, 1, 7, 511, 1023):
            yield size, rank


@pytest.mark.covers("FLAT-05", "FLAT-06", "FLAT-07", "CPU-03", "ORIG-02", "CTOR-23")
@pytest.mark.parametrize("uo", [False, True])
def test_every_rank_holds_its_slice(uo):
    original = torch.cat([param.detach().reshape(-1) for param in module().parameters()])
    for size, rank in worlds():
        with fake_world(size, rank) as groups:
            handle = make(groups, uo=uo)
            assert handle.shard_S.numel() == handle.shard_map.shard_numel
            span = handle.shard_map.shard_span(rank)
            if not uo:
                want = torch.zeros(handle.shard_map.shard_numel)
                want[: span.numel] = original[span.as_slice()]
                assert torch.equal(handle.shard_S, want)
            assert not handle.shard_S[span.numel :].any()
            if uo and size > 1:
                held = sum(param.numel() for param in handle.originals.params)
                assert held == sum(piece.span_in_param.numel for piece in handle.shard_map.param_spans(rank))


@pytest.mark.covers("CPU-01", "STRAT-10", "FLAT-23")
@pytest.mark.parametrize("low", [False, True])
def test_states_and_memory(low):
    precision = MixedPrecision(param_dtype=torch.bfloat16 if low else None)
    for size, rank in [(1, 0), (2, 1), (1024, 7)]:
        with fake_world(size, rank) as groups:
            handle = make(groups, mixed_precision=precision)
            assert handle.state is UnitState.SHARDED
            assert handle.start_unshard()
            assert not handle.start_unshard()
            assert handle.state is UnitState.GATHERING
            handle.finish_unshard()
            handle.finish_unshard()
            assert handle.unsharded
            assert handle.full_F().dtype == (torch.bfloat16 if low else torch.float32)
            assert [tuple(view.shape) for view in handle.compute_views()] == [(7, 3), (7,), (5, 7), (5,), (5,), (5,)]
            handle.reshard()
            handle.reshard()
            assert handle.state is UnitState.SHARDED
            if handle.needs_buffer:
                assert handle.full_F().untyped_storage().size() == 0
            handle.start_unshard()
            handle.reshard()
            with pytest.raises(TransitionError, match="expected a move from SHARDED"):
                handle.life.move(UnitState.UNSHARDED, "")


@pytest.mark.covers("CTOR-06", "CTOR-07", "CTOR-08", "CTOR-09", "CTOR-10", "B079")
def test_what_cannot_be_flattened_is_refused_by_name():
    def refused(params, match, uo=False):
        with pytest.raises(FlattenError, match=match):
            check_params(params, [f"p{index}" for index in range(len(params))], use_orig_params=uo)

    with fake_world(2, 0) as groups:
        one = nn.Parameter(torch.ones(2))
        refused([], "empty parameter list")
        refused([one, nn.Parameter(torch.ones(2, dtype=torch.float64))], "uniform dtype but got .*p0.*p1")
        refused([one, nn.Parameter(torch.ones(2), requires_grad=False)], "uniform `requires_grad`")
        refused([nn.Parameter(torch.ones(2, dtype=torch.int32), requires_grad=False)], "Cannot flatten integer dtype")
        refused([nn.Parameter(torch.ones(2, dtype=torch.complex64))], "Cannot flatten complex")
        with FakeTensorMode():
            fake = nn.Linear(2, 2)
        refused(list(fake.parameters()), "Cannot flatten fake tensors: .* got p0, p1")
        refused([make(groups).flat_param], "Cannot flatten a `FlatParameter`")


@pytest.mark.covers("FLAT-20", "ORIG-03")
def test_without_sharding_nothing_is_copied_or_freed():
    with fake_world(4, 2) as groups:
        handle = make(groups, strategy=ShardingStrategy.NO_SHARD)
        handle.start_unshard()
        handle.finish_unshard()
        assert handle.full_F() is handle.shard_S
        assert all(
            view.data_ptr() == param.data_ptr() for view, param in zip(handle.compute_views(), handle.originals.params)
        )
        handle.reshard()
        assert [tuple(param.shape) for param in handle.originals.params][:2] == [(7, 3), (7,)]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_placeholders_have_shape_strides_and_dtype_of_what_they_stand_for(dtype):
    model = nn.Sequential(nn.Linear(3, 7), nn.LayerNorm(7)).to(dtype)
    model[0].weight.data = model[0].weight.data.t().contiguous().t()
    want = {name: (p.shape, p.stride(), p.dtype) for name, p in model.named_parameters()}
    with fake_world(2, 1) as groups:
        config = UnitConfig(strategy=ShardingStrategy.FULL_SHARD, device=CPU, groups=groups, use_orig_params=False)
        FlatHandle(sites_below(model, model.parameters()), model, config)
        shown = {
            "0.weight": model[0].weight,
            "0.bias": model[0].bias,
            "1.weight": model[1].weight,
            "1.bias": model[1].bias,
        }
        assert {name: (each.shape, each.stride(), each.dtype) for name, each in shown.items()} == want
        assert all(each.is_meta for each in shown.values())
        # torch itself multiplies a matrix on the CPU by one on meta: the result is uninitialised memory.
        with pytest.raises(FsdpRuntimeError, match=r"expected a parameter with values, got 0\.weight"):
            torch.nn.functional.linear(torch.ones(2, 3, dtype=dtype), model[0].weight)
        with pytest.raises(FsdpRuntimeError, match=r"got 1\.bias, 1\.weight"):
            torch.cat([model[1].weight, model[1].bias])
        assert copy.deepcopy(model[0].weight) is model[0].weight is model[0].weight.data
        assert repr(pickle.loads(pickle.dumps(model[0].weight))) == repr(model[0].weight)


def test_flattening_takes_one_tensor_for_each_place():
    model = module()
    layout = build_layout(sites_below(model, model.parameters()), torch.float32, 2)
    with pytest.raises(FlattenError, match="flatten: expected 6 tensors, got 5. Pass one each"):
        flatten(list(model.parameters())[:5], layout, CPU)


class _LostPeer:
    def wait(self):
        raise RuntimeError("peer is gone")


@pytest.mark.parametrize("given_up_by", [FlatHandle.finish_unshard, FlatHandle.reshard])
def test_a_gather_whose_wait_raised_is_made_again(given_up_by):
    with fake_world(2, 0) as groups:
        handle = make(groups)
        assert handle.start_unshard()
        handle._pending = _LostPeer()
        with pytest.raises(RuntimeError, match="peer is gone"):
            given_up_by(handle)
        assert handle.state is UnitState.SHARDED
        assert handle.start_unshard(), "the buffer that nobody filled would be read"
        handle.finish_unshard()
        assert handle.unsharded


@pytest.mark.parametrize("size", [1, 2])
def test_a_gather_that_raised_is_made_again(size, monkeypatch):
    with fake_world(size, 0) as groups:
        handle = make(groups, mixed_precision=MixedPrecision(param_dtype=torch.bfloat16))
        failing = ValueError("no memory")

        def refuse(*args):
            raise failing

        with monkeypatch.context() as patch:
            patch.setattr(FlatBuffer, "allocate", refuse)
            with pytest.raises(ValueError, match="no memory"):
                handle.start_unshard()
        assert handle.state is UnitState.SHARDED
        assert handle.start_unshard()
        handle.finish_unshard()
        assert handle.unsharded
        assert handle.full_F().untyped_storage().size() == handle.full_F().nbytes
