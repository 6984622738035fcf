"""Batches that are lists of samples: their rows are elements, and one process is given the lists of all ranks as one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fsdp_testing.cases.records import Verdict
from fsdp_testing.train.batches import joined, row_digests
from fsdp_testing.train.sample_lists import are_samples_apart, samples_in
from fsdp_testing.train.script import Launch, examine

SCRIPT = str(Path(__file__).parent / "with_samples.py")


@pytest.mark.parametrize("kind", ["texts", "boxes"])
def test_lists_of_samples_are_compared(kind):
    judgements = examine(Launch(SCRIPT, ("--kind", kind), isolation="warm"), (2, 3)).judgements
    assert [each.verdict for each in judgements] == [Verdict.PASS] * 2, "\n".join(map(str, judgements))
    assert all("the same rows" in str(each) for each in judgements), judgements


@pytest.mark.parametrize("kind", ["texts", "boxes"])
def test_a_mistake_beside_lists_of_samples_is_found(kind):
    judgements = examine(Launch(SCRIPT, ("--kind", kind, "--wrong"), isolation="warm"), (2, 3)).judgements
    assert [each.verdict for each in judgements] == [Verdict.FAIL] * 2, judgements
    assert all("gradients are summed over ranks" in str(each) for each in judgements), judgements


def ragged(*lengths: int) -> list[torch.Tensor]:
    return [torch.full((length,), float(length)) for length in lengths]


def test_which_lists_hold_samples():
    boxes = [{"boxes": torch.ones(1, 4)}, {"boxes": torch.ones(2, 4)}]
    assert samples_in((ragged(3, 4),)) == 2
    assert samples_in({"images": tuple(ragged(3, 3)), "targets": boxes}) == 2
    # Fields: what a step is given itself, and lists of tensors with as many rows each.
    assert samples_in((torch.ones(4, 2), torch.ones(3))) == 0
    assert samples_in(ragged(3, 4)) == 0
    assert samples_in(([torch.ones(4, 2), torch.ones(4, 2)],)) == 0
    assert samples_in(([{"threshold": 0.5}],)) == 0


def test_samples_of_all_ranks_are_one_list():
    parts = [(ragged(3, 4), torch.ones(2, 1)), (ragged(5, 5), torch.zeros(2, 1))]
    texts, labels = joined(parts)
    assert [len(text) for text in texts] == [3, 4, 5, 5]
    assert labels.tolist() == [[1.0]] * 2 + [[0.0]] * 2
    kwargs = joined([((part,), {}) for part in parts], depth=-1)[0][0]
    assert [len(text) for text in kwargs[0]] == [3, 4, 5, 5]
    # As many fields as samples.
    two = joined(
        [((torch.ones(2, 3), torch.ones(2)), ragged(3, 4)), ((torch.zeros(2, 3), torch.zeros(2)), ragged(5, 6))]
    )
    assert [tuple(field.shape) for field in two[0]] == [(4, 3), (4,)]
    fields = joined([([torch.ones(3, 1), torch.ones(3, 2)],), ([torch.zeros(2, 1), torch.zeros(2, 2)],)])
    assert [tuple(field.shape) for field in fields[0]] == [(5, 1), (5, 2)]


def test_samples_of_one_length_on_each_rank_are_told_from_fields():
    assert are_samples_apart([ragged(3, 3, 3), ragged(4, 4, 4)])
    assert not are_samples_apart([ragged(3, 3, 3), ragged(3, 3, 3)])
    assert not are_samples_apart([ragged(3, 3), ragged(4, 4)])
    assert [len(text) for text in joined([(ragged(3, 3, 3),), (ragged(4, 4, 4),)])[0]] == [3, 3, 3, 4, 4, 4]


def test_rows_of_lists_are_their_samples():
    images = tuple(torch.randn(3, 2 + place) for place in range(3))
    targets = [{"boxes": torch.ones(place + 1, 4)} for place in range(3)]
    rows = row_digests((images, targets))
    assert len(set(rows)) == 3
    assert row_digests((images[1:], targets[1:])) == rows[1:]
    other = [*targets[:2], {"boxes": torch.zeros(3, 4)}]
    assert row_digests((images, other))[:2] == rows[:2]
    assert row_digests((images, other))[2] != rows[2]
