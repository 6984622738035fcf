"""Putting pieces together: holes and contradictions are named, whatever the order of ranks and spans."""

from __future__ import annotations

import itertools

import torch
from hypothesis import given
from hypothesis import strategies as st

from fsdp_testing.cases.records import ObservedPiece
from fsdp_testing.oracle.assemble import assemble


def piece(start, *values, dtype=torch.float64):
    tensor = torch.tensor(values, dtype=dtype)
    return ObservedPiece(start, start + len(values), tensor)


def test_disjoint_pieces_make_a_whole():
    whole = assemble([(0, [piece(0, 1.0, 2.0)]), (1, [piece(2, 3.0)])], (3,))
    assert whole is not None
    assert whole.flat.tolist() == [1.0, 2.0, 3.0]
    assert whole.complete
    assert not whole.contradictions


def test_a_hole_is_named():
    whole = assemble([(0, [piece(0, 1.0)]), (1, [piece(2, 3.0)])], (3,))
    assert whole is not None
    assert not whole.complete
    assert whole.first_hole() == 1


def test_replicas_that_agree_are_no_contradiction():
    whole = assemble([(0, [piece(0, 1.0, 2.0)]), (1, [piece(0, 1.0, 2.0)])], (2,))
    assert whole is not None
    assert not whole.contradictions


def test_replicas_that_differ_name_ranks_and_element():
    whole = assemble([(0, [piece(0, 1.0, 2.0, 3.0)]), (1, [piece(1, 2.0, 3.5)])], (3,))
    assert whole is not None
    assert whole.contradictions == ((0, 1, 2),)


def test_a_replica_one_ulp_off_is_a_contradiction():
    nearly = torch.nextafter(torch.tensor(1.0), torch.tensor(2.0)).item()
    whole = assemble([(0, [piece(0, 1.0, dtype=torch.float32)]), (3, [piece(0, nearly, dtype=torch.float32)])], (1,))
    assert whole is not None
    assert whole.contradictions == ((0, 3, 0),)


def test_zero_and_minus_zero_are_different_bits():
    whole = assemble([(0, [piece(0, 0.0)]), (1, [piece(0, -0.0)])], (1,))
    assert whole is not None
    assert whole.contradictions


def test_dtypes_that_differ_are_a_contradiction():
    whole = assemble([(0, [piece(0, 1.0)]), (1, [piece(0, 1.0, dtype=torch.float32)])], (1,))
    assert whole is not None
    assert whole.contradictions


def test_a_span_outside_the_parameter_is_a_contradiction_and_harmless():
    whole = assemble([(0, [piece(0, 1.0, 2.0)]), (1, [piece(1, 9.0, 9.0)])], (2,))
    assert whole is not None
    assert whole.contradictions == ((1, 1, 1),)
    assert whole.flat.tolist() == [1.0, 2.0]


def test_no_piece_at_all():
    assert assemble([(0, []), (1, [])], (2,)) is None


def test_an_empty_parameter_is_complete():
    whole = assemble([(0, [ObservedPiece(0, 0, torch.empty(0))])], (0, 3))
    assert whole is not None
    assert whole.complete


@given(st.data())
def test_any_cut_of_a_tensor_is_put_together_again(data):
    numel = data.draw(st.integers(1, 20))
    whole = torch.arange(numel, dtype=torch.float64)
    cuts = sorted(data.draw(st.lists(st.integers(0, numel), max_size=6)))
    edges = [0, *cuts, numel]
    pieces = [ObservedPiece(a, b, whole[a:b].clone()) for a, b in itertools.pairwise(edges)]
    extra = data.draw(st.lists(st.sampled_from(pieces), max_size=3))
    spread = [(data.draw(st.integers(0, 3)), [p]) for p in data.draw(st.permutations(pieces + extra))]
    found = assemble(spread, (numel,))
    assert found is not None
    assert found.complete
    assert not found.contradictions
    assert torch.equal(found.flat, whole)
