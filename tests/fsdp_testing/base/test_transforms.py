"""Tensors inside torch.func's transforms, as they are outside."""

from __future__ import annotations

import pytest
import torch
from torch.func import grad, vmap

from fsdp_testing.base.compat import outside_of_transforms

ROWS = torch.arange(24.0).reshape(4, 6)


@pytest.mark.parametrize("shape", [(6,), (1, 6), (2, 3)])
def test_rows_of_all_calls_are_joined(shape):
    def see(row):
        seen.append(outside_of_transforms(row.reshape(shape)).clone())
        return row.sum()

    seen: list[torch.Tensor] = []
    vmap(grad(see))(ROWS)
    vmap(see, in_dims=1)(ROWS.t())
    expected = ROWS if len(shape) == 1 else ROWS.reshape(-1, shape[-1])
    assert all(torch.equal(each, expected) for each in seen)


@pytest.mark.parametrize("inner", [0, 1])
def test_of_nested_maps_the_outer_comes_first(inner):
    def see(row):
        seen.append(outside_of_transforms(row[None]).clone())
        return row.sum()

    seen: list[torch.Tensor] = []
    rows = torch.arange(30.0).reshape(2, 3, 5)
    vmap(vmap(see, in_dims=inner), in_dims=1)(rows.transpose(1, 2).transpose(0, 1) if inner else rows.transpose(0, 1))
    assert torch.equal(seen[0], rows.reshape(6, 5))


def test_what_is_mapped_over_may_stand_anywhere():
    seen: list[torch.Tensor] = []
    rows = torch.arange(30.0).reshape(2, 3, 5)

    def see(row):
        seen.append(outside_of_transforms(row).clone())
        return row.sum()

    vmap(vmap(see, in_dims=1), in_dims=2)(rows.permute(2, 1, 0))
    vmap(vmap(see, in_dims=1), in_dims=0)(rows.transpose(1, 2))
    assert [each.tolist() for each in seen] == [rows.reshape(6, 5).tolist()] * 2


def test_a_plain_tensor_is_returned_as_it_is():
    assert outside_of_transforms(ROWS) is ROWS
