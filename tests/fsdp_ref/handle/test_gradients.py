"""The gradient of one flat parameter: what is added, what users see of it, and what they do to it, without a training step."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from fsdp_ref.comm.groups import DataParallelGroups
from fsdp_ref.config import MixedPrecision, ShardingStrategy, UnitConfig
from fsdp_ref.errors import WritebackError
from fsdp_ref.handle.accumulated import dense, fill_flat
from fsdp_ref.handle.flat_handle import FlatHandle
from fsdp_ref.storage.views import flat_views
from fsdp_ref.torch_names.flat_param import sites_below

CPU = torch.device("cpu")
KINDS = ["flat", "orig"]
F32, F64, BF16 = torch.float32, torch.float64, torch.bfloat16


@pytest.fixture
def groups() -> Iterator[DataParallelGroups]:
    """Rank 0 of two, in one process: it holds the first nine of eighteen elements (ten of twenty with gaps)."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        yield DataParallelGroups(dist.group.WORLD)
    finally:
        dist.destroy_process_group()


class Three(nn.Module):
    """Weights of 6, 3 and 9 elements: the second lies in the first shard, the third is cut by the border."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.zeros(2, 3))
        self.b = nn.Parameter(torch.zeros(3))
        self.c = nn.Parameter(torch.zeros(9))


def make(groups, kind, *, strategy=ShardingStrategy.FULL_SHARD, precision=None, model=None) -> FlatHandle:
    model = (model or Three)()
    config = UnitConfig(strategy, CPU, groups, precision or MixedPrecision(), use_orig_params=kind == "orig")
    return FlatHandle(sites_below(model, model.parameters()), model, config)


def grads(value, *, without=(), dtype=F32):
    shapes = [(2, 3), (3,), (9,)]
    return [None if i in without else torch.full(shape, float(value), dtype=dtype) for i, shape in enumerate(shapes)]


def reduced(handle, value, dtype=F32):
    return torch.full((handle.shard_map.shard_numel,), float(value), dtype=dtype)


def shown(handle):
    params = handle.originals.params if handle.originals.use_orig_params else [handle.flat_param]
    return [param.grad for param in params]


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_shown_before_anything_is_published(groups, kind):
    handle = make(groups, kind)
    assert handle.grads.reduced_S is None
    assert handle.grads.local_F is None
    handle.grads.publish()
    assert shown(handle) == [None] * len(shown(handle))
    assert handle.grads.take_local()[0] is None


@pytest.mark.parametrize("kind", KINDS)
def test_reduced_parts_are_added_and_shown(groups, kind):
    handle = make(groups, kind)
    first = reduced(handle, 1.5)
    handle.grads.add_reduced(first)
    handle.grads.publish()
    held = [grad for grad in shown(handle) if grad is not None]
    assert held
    assert all(torch.equal(grad, torch.full_like(grad, 1.5)) for grad in held)
    handle.grads.add_reduced(reduced(handle, 2.0))
    handle.grads.publish()
    assert all(torch.equal(grad, torch.full_like(grad, 3.5)) for grad in shown(handle) if grad is not None)
    if kind == "orig":
        assert [None if grad is None else grad.numel() for grad in shown(handle)] == [6, 3, piece_of_last(handle)]
        # They are pieces of one tensor: what an optimizer zeroes is the store's own.
        pointers = {grad.untyped_storage().data_ptr() for grad in shown(handle) if grad is not None}
        assert pointers == {handle.grads.reduced_S.untyped_storage().data_ptr()}


def piece_of_last(handle):
    return handle.originals.pieces[2][1] if 2 in handle.originals.pieces else None


@pytest.mark.parametrize("kind", KINDS)
def test_local_parts_are_added_up_and_hide_the_reduced_part(groups, kind):
    handle = make(groups, kind)
    handle.grads.add_reduced(reduced(handle, 7.0))
    handle.grads.add_local(grads(1.0, without=(1,)))
    handle.grads.add_local(grads(2.0, without=(2,)))
    handle.grads.publish()
    want = [3.0, 2.0, 1.0]
    if kind == "orig":
        assert [grad.shape for grad in shown(handle)] == [(2, 3), (3,), (9,)]
        assert [grad.unique().tolist() for grad in shown(handle)] == [[value] for value in want]
    else:
        assert shown(handle)[0].tolist() == [3.0] * 6 + [2.0] * 3 + [1.0] * 9
    local_F, _ = handle.grads.take_local()
    assert [view.unique().tolist() for view in flat_views(local_F, handle.layout)] == [[value] for value in want]
    assert handle.grads.local_F is None
    # Padding between and behind the parameters is zero: it takes part in the sum over ranks.
    assert float(local_F.sum()) == 6 * 3.0 + 3 * 2.0 + 9 * 1.0
    assert handle.grads.reduced_S.unique().tolist() == [7.0]


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_that_users_drop_are_forgotten(groups, kind):
    handle = make(groups, kind)
    handle.grads.add_reduced(reduced(handle, 7.0))
    handle.grads.add_local(grads(1.0))
    handle.grads.publish()
    for param in handle.originals.params if kind == "orig" else [handle.flat_param]:
        param.grad = None
    handle.grads.release()
    assert handle.grads.reduced_S is None
    assert handle.grads.local_F is None
    handle.grads.add_reduced(reduced(handle, 2.0))
    handle.grads.publish()
    assert {grad.unique().item() for grad in shown(handle) if grad is not None} == {2.0}


def test_what_nobody_dropped_is_not_released(groups):
    handle = make(groups, "orig")
    handle.grads.add_reduced(reduced(handle, 7.0))
    handle.grads.release()  # not published yet: that users hold nothing says nothing
    assert handle.grads.reduced_S is not None
    handle.grads.publish()
    handle.originals.params[0].grad = None
    handle.grads.release()
    assert handle.grads.reduced_S is not None


def test_one_gradient_dropped_counts_as_zero(groups):
    handle = make(groups, "orig")
    handle.grads.add_reduced(reduced(handle, 7.0))
    handle.grads.publish()
    handle.originals.params[0].grad = None
    handle.grads.add_reduced(reduced(handle, 1.0))
    handle.grads.publish()
    assert [grad.unique().tolist() for grad in shown(handle) if grad is not None and grad.numel()][:2] == [[1.0], [8.0]]


class Matrix(nn.Module):
    """No parameter looks the same whole and sharded: none of the gradients shares more than memory with the store."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.zeros(2, 3))


@pytest.mark.parametrize("model", [Three, Matrix])
@pytest.mark.parametrize("kind", KINDS)
def test_zeroing_the_local_part_in_place_forgets_all_of_it(groups, kind, model):
    handle = make(groups, kind, model=model)
    handle.grads.add_reduced(reduced(handle, 7.0))
    handle.grads.add_local(grads(1.0)[: len(handle.fqns)])
    handle.grads.publish()
    for grad in shown(handle):
        grad.zero_()
    handle.grads.absorb()
    assert handle.grads.local_F is None
    assert not handle.grads.reduced_S.any()
    # Zeros of the shard and not None, as in one process; a backward that does not use the unit shows nothing anew.
    assert [(grad.any().item(), grad.shape) for grad in shown(handle) if grad is not None][:1] == [
        (False, (handle.originals.params[0] if kind == "orig" else handle.flat_param).shape)
    ]


@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize("drop", [False, True])
def test_clearing_one_local_gradient_forgets_that_one(groups, place, drop):
    handle = make(groups, "orig")
    handle.grads.add_reduced(reduced(handle, 7.0))
    handle.grads.add_local(grads(1.0))
    handle.grads.publish()
    if drop:
        handle.originals.params[place].grad = None
    else:
        shown(handle)[place].zero_()
    local_F, _ = handle.grads.take_local()
    assert [view.unique().tolist() for view in flat_views(local_F, handle.layout)][place] == [0.0]
    pieces = handle.originals.pieces_of(handle.grads.reduced_S)
    assert [piece.unique().tolist() for piece in pieces[:2]] == [[0.0 if index == place else 7.0] for index in range(2)]


@pytest.mark.parametrize("replace", [False, True])
def test_one_local_gradient_dropped_and_the_others_zeroed_forgets_all(groups, replace):
    handle = make(groups, "orig")
    handle.grads.add_reduced(reduced(handle, 7.0))
    handle.grads.add_local(grads(1.0))
    handle.grads.publish()
    handle.originals.params[0].grad = None
    for param in handle.originals.params[1:]:
        if replace:
            param.grad.data = torch.zeros_like(param.grad)
        else:
            param.grad.zero_()
    handle.grads.absorb()
    assert not handle.grads.reduced_S.any()
    handle.grads.add_reduced(reduced(handle, 2.0))
    handle.grads.publish()
    assert [grad.unique().tolist() for grad in shown(handle)[:2]] == [[2.0]] * 2


def test_an_unused_gradient_keeps_its_reduced_part_when_another_is_zeroed(groups):
    handle = make(groups, "orig")
    handle.grads.add_reduced(reduced(handle, 7.0))
    handle.grads.add_local(grads(1.0, without=(1,)))
    handle.grads.publish()
    shown(handle)[0].data.zero_()
    handle.grads.absorb()
    pieces = handle.originals.pieces_of(handle.grads.reduced_S)
    assert [piece.unique().tolist() for piece in pieces[:2]] == [[0.0], [7.0]]


EDITS = {
    "in place": lambda param: param.grad.mul_(3.0),
    "through .data, which raises no counter": lambda param: param.grad.data.mul_(3.0),
    "another tensor": lambda param: setattr(param, "grad", param.grad * 3.0),
    "other data": lambda param: setattr(param.grad, "data", param.grad * 3.0),
}


# torch refuses another tensor of the full size for a flat parameter's shard.
@pytest.mark.parametrize(
    ("kind", "edit"), [(k, e) for e in EDITS for k in KINDS if (k, e) != ("flat", "another tensor")]
)
def test_a_change_of_the_local_part_beside_a_reduced_one_is_refused(groups, kind, edit):
    """One part would change and the other, which nobody sees, would come back whole: neither what DDP gives nor a rule."""
    handle = make(groups, kind)
    handle.grads.add_reduced(reduced(handle, 7.0))
    handle.grads.add_local(grads(1.0))
    handle.grads.publish()
    EDITS[edit](handle.originals.params[1] if kind == "orig" else handle.flat_param)
    with pytest.raises(WritebackError, match=r"untouched or zeroed .* got others for .*\bb\b"):
        handle.grads.take_local()


@pytest.mark.parametrize("kind", KINDS)
def test_replaced_gradients_are_taken_over(groups, kind):
    handle = make(groups, kind)
    handle.grads.add_reduced(reduced(handle, 7.0))
    handle.grads.publish()
    param = handle.originals.params[1] if kind == "orig" else handle.flat_param
    param.grad = torch.full_like(param.grad, 5.0)
    handle.grads.add_reduced(reduced(handle, 1.0))
    handle.grads.publish()
    changed = shown(handle)[1 if kind == "orig" else 0]
    assert changed.unique().tolist() == [6.0]
    if kind == "orig":
        assert shown(handle)[0].unique().tolist() == [8.0]


@pytest.mark.parametrize("kind", KINDS)
def test_a_gradient_set_where_there_was_none_is_taken_over(groups, kind):
    handle = make(groups, kind)
    param = handle.originals.params[1] if kind == "orig" else handle.flat_param
    param.grad = torch.full(param.shape, 5.0)
    handle.grads.absorb()
    assert handle.grads.reduced_S.dtype == F32
    assert handle.grads.reduced_S.numel() == handle.shard_map.shard_numel
    assert float(handle.grads.reduced_S.sum()) == 5.0 * param.numel()


def test_a_replaced_local_gradient_is_what_is_reduced(groups):
    handle = make(groups, "orig")
    handle.grads.add_local(grads(1.0))
    handle.grads.publish()
    handle.originals.params[1].grad = torch.full((3,), 4.0)
    local_F, _ = handle.grads.take_local()
    assert [view.unique().tolist() for view in flat_views(local_F, handle.layout)] == [[1.0], [4.0], [1.0]]


def test_a_gradient_of_another_shape_is_refused_by_name(groups):
    handle = make(groups, "orig")
    handle.grads.add_local(grads(1.0))
    handle.grads.publish()
    # What torch itself refuses never gets here: the parameter was given another shape together with its gradient.
    handle.originals.params[0].data = torch.zeros(3, 2)
    handle.originals.params[0].grad = torch.zeros(3, 2)
    with pytest.raises(WritebackError, match=r"gradient of a .*expected shape \(2, 3\), got \(3, 2\)"):
        handle.grads.absorb()


@pytest.mark.parametrize("keep", [False, True])
def test_low_precision_gradients_are_added_in_the_wider_dtype(groups, keep):
    precision = MixedPrecision(BF16, keep_low_precision_grads=keep)
    handle = make(groups, "flat", precision=precision)
    for value in (256.0, 1.0, 1.0):  # bfloat16 has no number between 256 and 258
        handle.grads.add_reduced(reduced(handle, value, BF16))
    assert handle.grads.reduced_S.dtype == (BF16 if keep else F32)
    assert handle.grads.reduced_S.unique().tolist() == [258.0]  # also where the sum is shown in bfloat16


def test_replacing_the_reduced_part_leaves_padding_alone(groups):
    handle = make(groups, "flat")
    handle.grads.sum.replace_reduced(torch.full((4,), 3.0, dtype=F64), [True] * 3)
    assert handle.grads.reduced_S.dtype == F64
    assert handle.grads.reduced_S.tolist() == [3.0] * 4 + [0.0] * (handle.shard_map.shard_numel - 4)
    handle.grads.sum.replace_reduced(torch.full((2,), 1.0, dtype=F64), [True] * 3)
    assert handle.grads.reduced_S[:4].tolist() == [1.0, 1.0, 3.0, 3.0]


def test_frozen_originals_are_given_nothing_new_and_keep_what_they_had(groups):
    handle = make(groups, "orig", strategy=ShardingStrategy.NO_SHARD)
    handle.originals.params[0].requires_grad_(False)
    handle.grads.add_reduced(reduced(handle, 1.0))
    handle.grads.publish()
    assert shown(handle)[0] is None
    assert shown(handle)[1] is not None
    handle.originals.params[1].requires_grad_(False)
    handle.grads.publish()
    assert shown(handle)[1] is not None


@pytest.mark.parametrize("kind", KINDS)
def test_casting_the_model_casts_the_local_part_before_more_is_added(groups, kind):
    handle = make(groups, kind)
    handle.grads.add_local(grads(1.0))
    handle.set_precision(F64)
    handle.grads.add_local(grads(2.0**-30, dtype=F64))
    assert handle.grads.local_F.dtype == F64
    assert flat_views(handle.grads.local_F, handle.layout)[0].unique().tolist() == [1.0 + 2.0**-30]


@pytest.mark.parametrize("divisor", [1.0, 2.0, 4.0])
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_filling_divides_and_clears(groups, divisor, dtype):
    handle = make(groups, "orig")
    flat_F = torch.full((handle.shard_map.padded_numel,), float("nan"), dtype=dtype)
    fill_flat(flat_F, handle.layout, grads(257.0, without=(1,)), divisor)
    # Cast first, divided then: 257 is no bfloat16.
    want = float(torch.tensor(257.0).to(dtype)) / divisor
    assert [view.unique().tolist() for view in flat_views(flat_F, handle.layout)] == [[want], [0.0], [want]]
    assert float(flat_F.double().sum()) == want * 15


# Torch 2.11 warns of every sparse tensor.
@pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled")
def test_sparse_gradients_become_dense():
    sparse = torch.sparse_coo_tensor(torch.tensor([[1]]), torch.tensor([[2.0, 3.0]]), (3, 2), check_invariants=True)
    assert dense(sparse).tolist() == [[0.0, 0.0], [2.0, 3.0], [0.0, 0.0]]
    strided = torch.ones(2)
    assert dense(strided) is strided


@pytest.mark.parametrize("kind", KINDS)
def test_the_local_part_is_added_up_in_the_dtype_of_reduction(groups, kind):
    handle = make(groups, kind, precision=MixedPrecision(param_dtype=BF16, reduce_dtype=F32))
    handle.grads.add_local(grads(1.0, dtype=BF16))
    for _ in range(64):  # each alone is half of the last bit that bfloat16 keeps beside 1
        handle.grads.add_local(grads(2.0**-8, dtype=BF16))
    handle.grads.publish()
    want = [[1.25]] * 3
    assert [view.unique().tolist() for view in flat_views(handle.grads.take_local()[0], handle.layout)] == want


@pytest.mark.parametrize("kind", KINDS)
def test_the_host_never_waits_for_each_parameter(groups, kind, monkeypatch):
    reads = []
    for name in ("__bool__", "item", "tolist"):
        original = getattr(torch.Tensor, name)
        monkeypatch.setattr(torch.Tensor, name, lambda self, _read=original: reads.append(self.shape) or _read(self))
    handle = make(groups, kind)
    handle.grads.add_reduced(reduced(handle, 7.0))
    handle.grads.add_local(grads(1.0))
    handle.grads.publish()
    handle.grads.add_local(grads(1.0))
    handle.grads.publish()
    assert len(reads) == 1  # whether users edited what was shown beside a reduced part
    for grad in shown(handle):
        grad.zero_()
    handle.grads.absorb()
    assert len(reads) == 2
