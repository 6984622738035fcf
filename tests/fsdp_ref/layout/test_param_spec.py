"""Parameter descriptions by example: element orders that are kept, and those that cannot be."""

from __future__ import annotations

import pytest
import torch

from fsdp_ref.errors import LayoutError
from fsdp_ref.layout import ParamSpec, is_dense, is_row_major, row_major_stride


@pytest.mark.covers("FLAT-14")
def test_channels_last_keeps_its_element_order():
    weight = torch.arange(2 * 3 * 4 * 5).reshape(2, 3, 4, 5).contiguous(memory_format=torch.channels_last)
    spec = ParamSpec.of("w", weight.shape, weight.stride())
    assert spec.stride == weight.stride()
    assert not spec.contiguous
    assert spec.storage_order == (0, 2, 3, 1)
    stored = torch.as_strided(weight, (weight.numel(),), (1,))
    assert torch.equal(weight.permute(spec.storage_order).reshape(-1), stored)


@pytest.mark.parametrize(
    "tensor",
    [torch.zeros(4, 6)[:, ::2], torch.zeros(1, 3).expand(4, 3), torch.zeros(4, 3, 2)[..., 0]],
    ids=["strided", "expanded", "last-dim-selected"],
)
def test_elements_with_gaps_or_overlap_are_laid_out_row_major(tensor):
    spec = ParamSpec.of("w", tensor.shape, tensor.stride())
    assert not is_dense(tensor.shape, tensor.stride())
    assert spec.stride == row_major_stride(tensor.shape)
    assert spec.contiguous


@pytest.mark.parametrize("question", [is_row_major, is_dense])
def test_a_stride_too_few_is_no_answer(question):
    with pytest.raises(ValueError, match="shorter"):
        question((3, 2), (2,))


@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (1, 1), (2, 1, 3), (4,)])
def test_order_agrees_with_torch(shape):
    tensor = torch.zeros(shape)
    spec = ParamSpec.of("w", tensor.shape, tensor.stride())
    assert spec.stride == tensor.stride()
    assert spec.contiguous == tensor.is_contiguous()
    assert is_row_major(shape, tensor.stride())
    assert spec.numel == tensor.numel()


@pytest.mark.parametrize(
    ("fields", "fragment"),
    [
        (dict(shape=(2, -1), stride=(1, 1), contiguous=True, numel=-2), "negative size"),
        (dict(shape=(2, 2), stride=(1,), contiguous=True, numel=4), "1 strides for 2 dimensions"),
        (dict(shape=(2, 2), stride=(2, 1), contiguous=True, numel=5), "numel 5 where the shape holds 4"),
        (dict(shape=(2, 2), stride=(4, 1), contiguous=False, numel=4), "gaps or overlap"),
        (dict(shape=(2, 3), stride=(1, 2), contiguous=True, numel=6), "contiguous=True"),
    ],
)
def test_a_contradictory_description_is_refused_by_name(fields, fragment):
    with pytest.raises(LayoutError, match=fragment) as info:
        ParamSpec("block.weight", **fields)
    assert "block.weight" in str(info.value)


def test_a_stride_of_the_wrong_length_is_refused():
    with pytest.raises(LayoutError, match="1 strides for 2 dimensions"):
        ParamSpec.of("w", (2, 3), (1,))


def test_names_list_the_own_name_first():
    assert ParamSpec.of("a", (2,), aliases=["b", "c"]).names == ("a", "b", "c")
