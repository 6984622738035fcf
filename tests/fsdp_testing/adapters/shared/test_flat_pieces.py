"""Flat parameters are read in place: spans in row-major order, with the gradients that users see."""

from __future__ import annotations

import torch
from torch import nn

from fsdp_testing.adapters.protocol import Piece
from fsdp_testing.adapters.shared.flat_pieces import FlatOriginal, FlatUnit, local_pieces, optimizer_pieces

EMPTY = nn.Module()


def original(fqn: str, shape: tuple[int, ...], stride: tuple[int, ...], at: int, **place) -> FlatOriginal:
    whole = torch.Size(shape).numel()
    filled = {"parameter": None, "shard_start": at, "first": 0, "count": whole} | place
    return FlatOriginal(
        fqn, shape, stride, torch.empty_strided(shape, stride).is_contiguous(), unsharded_start=at, **filled
    )


def spans(pieces: tuple[Piece, ...], side: str = "value") -> list[tuple[int, int, list[float]]]:
    found = [(piece.start, piece.stop, getattr(piece, side)) for piece in pieces]
    return [(start, stop, tensor.tolist()) for start, stop, tensor in found if tensor is not None]


def test_a_transposed_original_is_shown_in_row_major_order():
    flat = nn.Parameter(torch.arange(6.0))
    unit = FlatUnit(flat, (original("w", (2, 3), (1, 2), 0),), flat.detach())
    (pieces,) = local_pieces(EMPTY, [unit]).values()
    whole = torch.empty(6)
    for start, stop, values in spans(pieces):
        whole[start:stop] = torch.tensor(values)
    assert whole.view(2, 3).tolist() == flat.detach().as_strided((2, 3), (1, 2)).tolist()


def test_the_own_sum_and_what_was_reduced_before_are_separate_pieces():
    flat = nn.Parameter(torch.arange(4.0))
    flat.grad = torch.tensor([1.0, 2.0, 3.0, 4.0])
    mine = original("w", (4,), (1,), 0, shard_start=0, first=2, count=2)
    unit = FlatUnit(flat, (mine,), torch.tensor([2.0, 3.0]), unsharded_grad=True, reduced_S=torch.tensor([8.0, 9.0]))
    shard, own = local_pieces(EMPTY, [unit])["w"]
    assert spans((shard,)) == [(2, 4, [2.0, 3.0])]
    assert (spans((shard,), "grad"), shard.reduced) == ([(2, 4, [8.0, 9.0])], True)
    assert (spans((own,), "grad"), own.reduced, own.value) == ([(0, 4, [1.0, 2.0, 3.0, 4.0])], False, None)


def test_an_original_without_a_gradient_shows_none_beside_others_that_have_one():
    flat = nn.Parameter(torch.zeros(4))
    trained, frozen = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2), requires_grad=False)
    trained.grad = torch.ones(2)
    both = (original("a", (2,), (1,), 0, parameter=trained), original("b", (2,), (1,), 2, parameter=frozen))
    unit = FlatUnit(flat, both, flat.detach(), unsharded_grad=True, reduced_S=torch.ones(4))
    shown = local_pieces(EMPTY, [unit])
    assert [piece.grad is not None for piece in shown["a"]] == [True, True]
    assert [(piece.grad, piece.requires_grad) for piece in shown["b"]] == [(None, False)]


def test_optimizer_state_is_cut_like_the_shard_and_steps_stay_numbers():
    flat = nn.Parameter(torch.zeros(3))
    optimizer = torch.optim.Adam([flat])
    flat.grad = torch.tensor([1.0, 2.0, 3.0])
    optimizer.step()
    unit = FlatUnit(flat, (original("a", (1,), (1,), 0), original("b", (2,), (1,), 1)), flat.detach())
    state = optimizer_pieces(EMPTY, optimizer, [unit])
    assert state["b"]["step"] == 1.0
    assert [tuple(piece.value.shape) for piece in state["b"]["exp_avg"]] == [(2,)]
    assert torch.equal(state["b"]["exp_avg"][0].value, optimizer.state[flat]["exp_avg"][1:])
