"""Spans of tensors and DTensors: against slices of the whole tensor, on every rank of worlds of 2, 3 and 4."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from fsdp_testing import run_ranks
from fsdp_testing.adapters.shared import pieces
from fsdp_testing.errors import InvalidImplementation

SHAPES = [(7,), (1,), (5, 3), (2, 3, 4), (0, 4), (4, 0), (6, 1)]


def whole_of(shape: tuple[int, ...]) -> torch.Tensor:
    numel = torch.Size(shape).numel()
    return torch.arange(numel, dtype=torch.float64).view(shape)


def spans_on_rank(size: int) -> list[str]:
    """Compare the pieces of DTensors with slices of the whole tensor; returns what is wrong."""
    mesh = init_device_mesh("cpu", (size,))
    wrong = []
    for shape in SHAPES:
        for placement in [Replicate(), *(Shard(dim) for dim in range(len(shape)))]:
            whole = whole_of(shape)
            parameter = nn.Parameter(distribute_tensor(whole.clone(), mesh, [placement]))
            held = pieces.of_parameter(parameter)
            for piece in held:
                flat = whole.reshape(-1)[piece.start : piece.stop]
                if piece.value is None or not torch.equal(piece.value.reshape(-1), flat):
                    wrong.append(f"{shape} {placement}: {piece}")
            gathered = pieces.gather({"w": held})
            if not torch.equal(gathered["w"], whole):
                wrong.append(f"{shape} {placement}: gathered {gathered['w']}")
            pieces.scatter_back({"w": whole * 2}, {"w": held})
            if not torch.equal(parameter.full_tensor(), whole * 2):
                wrong.append(f"{shape} {placement}: scattered {parameter.full_tensor()}")
    return wrong


def spans_on_two_axes() -> list[str]:
    mesh = init_device_mesh("cpu", (2, 2))
    wrong = []
    for shape, placements in itertools.product(
        [(7, 5), (3, 4)], [(Replicate(), Shard(0)), (Shard(0), Shard(1)), (Shard(1), Shard(1)), (Shard(0), Replicate())]
    ):
        whole = whole_of(shape)
        held = pieces.of_tensor(distribute_tensor(whole, mesh, placements))
        if not torch.equal(pieces.gather({"w": held})["w"], whole):
            wrong.append(f"{shape} {placements}: {held}")
    return wrong + spans_of_what_was_cut_before()


def spans_of_what_was_cut_before() -> list[str]:
    """FSDP2 cuts what tensor parallelism has left of a dimension; of 5 rows the parts are 3 and 2, then 2+1 and 1+1."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    wrong = []
    for style in (ColwiseParallel(), RowwiseParallel()):
        model = nn.Linear(3, 5)
        whole = {name: whole_of(tuple(value.shape)).float() for name, value in model.named_parameters()}
        model.load_state_dict(whole)
        fully_shard(parallelize_module(model, mesh["tp"], style), mesh=mesh["dp"])
        gathered = pieces.gather(pieces.of_parameters(model.named_parameters()))
        wrong += [f"{style} {name}: {gathered[name]}" for name in whole if not torch.equal(gathered[name], whole[name])]
    return wrong


@pytest.mark.parametrize("size", [2, 3, 4])
def test_dtensor_spans_are_slices_of_the_whole(size):
    assert run_ranks(spans_on_rank, size, size=size) == [[]] * size


def test_two_mesh_axes():
    assert run_ranks(spans_on_two_axes, size=4) == [[]] * 4


def test_a_plain_parameter_is_one_piece_and_a_view():
    parameter = nn.Parameter(torch.arange(6.0).view(3, 2).t())
    parameter.grad = torch.ones(2, 3)
    (piece,) = pieces.of_parameter(parameter)
    assert (piece.start, piece.stop, piece.shape, piece.requires_grad) == (0, 6, (2, 3), True)
    assert piece.value is not None
    assert piece.value.data_ptr() == parameter.data_ptr()
    assert piece.value.reshape(-1).tolist() == [0, 2, 4, 1, 3, 5]
    assert piece.grad is parameter.grad or torch.equal(piece.grad, parameter.grad)


def test_a_scalar_parameter_is_one_element():
    (piece,) = pieces.of_parameter(nn.Parameter(torch.tensor(3.0)))
    assert (piece.start, piece.stop, piece.shape) == (0, 1, ())


def test_elements_that_nobody_holds_are_not_a_number():
    held = pieces.Piece((4,), 1, 3, torch.tensor([5.0, 6.0]))
    gathered = pieces.gather({"w": (held,)})["w"]
    assert gathered[1:3].tolist() == [5.0, 6.0]
    assert gathered.isnan().tolist() == [True, False, False, True]


def test_optimizer_state_is_read_by_name():
    layer = nn.Linear(2, 2)
    layer(torch.ones(1, 2)).sum().backward()
    optimizer = torch.optim.AdamW(layer.parameters())
    optimizer.step()
    state = pieces.optimizer_state(dict(layer.named_parameters()), optimizer)
    assert state["weight"]["step"] == 1.0
    (piece,) = state["weight"]["exp_avg"]
    assert torch.equal(piece.value, optimizer.state[layer.weight]["exp_avg"])
    assert pieces.optimizer_state(dict(layer.named_parameters()), torch.optim.SGD(layer.parameters())) == {}


def partial_placement_on_rank() -> str:
    from torch.distributed.tensor import DTensor, Partial

    tensor = DTensor.from_local(torch.ones(2), init_device_mesh("cpu", (2,)), [Partial()])
    try:
        pieces.of_tensor(tensor)
    except InvalidImplementation as error:
        return str(error)
    return ""


def test_a_placement_that_holds_no_span_is_refused():
    assert all("expected Shard and Replicate" in text for text in run_ranks(partial_placement_on_rank))
