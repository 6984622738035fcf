"""What one process is given in place of its own data: the ranks' batches as one, or their rows for the script's own collator."""

from __future__ import annotations

import pytest
import torch
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

from fsdp_testing.errors import InvalidArgument
from fsdp_testing.train.collators import Uncollated
from fsdp_testing.train.feed import Feed, Feeder, Source, Taken, feeds_of
from fsdp_testing.train.loaders import LoaderSeen, Pass
from fsdp_testing.train.observation import Call


def rank(items, samples=(), draws=False, calls=()):
    one = Pass(items=list(items), samples=list(samples), complete=True)
    return Taken(loaders=[LoaderSeen(passes=[one], draws=draws)], calls=list(calls))


def rows(*lengths):
    return [torch.arange(1, length + 1) for length in lengths]


def pad(samples):
    return pad_sequence(samples, batch_first=True)


def fed(loader, feed):
    feeder = Feeder(feed, keeps=False)
    with feeder.watch():
        return list(loader)


def test_batches_of_one_shape_are_put_together():
    [feed] = feeds_of([rank([torch.zeros(2, 3)], [rows(3, 3)]), rank([torch.ones(1, 3)], [rows(3)])], 1, 1)
    assert feed.source is Source.LOADER and not feed.pads
    assert feed.loaders[0].passes[0][0].sum(1).tolist() == [0, 0, 3]


def test_rows_of_different_lengths_are_padded_together_by_the_loaders_collator():
    ranks = [rank([pad(samples)], [samples]) for samples in (rows(2, 1), rows(4))]
    [feed] = feeds_of(ranks, 1, 1)
    assert feed.pads and "padded together" in str(feed)
    loader = DataLoader(rows(1, 1), batch_size=2, collate_fn=pad)
    assert fed(loader, feed)[0].tolist() == [[1, 2, 0, 0], [1, 0, 0, 0], [1, 2, 3, 4]]
    of_ranks = [fed(loader, Feed(Source.LOADER, feed.loaders, pads=True, rank=number))[0] for number in (0, 1)]
    assert [batch.tolist() for batch in of_ranks] == [[[1, 2, 0, 0], [1, 0, 0, 0]], [[1, 2, 3, 4]]]


def test_what_is_no_tensor_is_made_by_the_collator_too_and_is_rank_0s_where_it_cannot_be():
    items = [{"x": torch.zeros(1, 2), "text": [word]} for word in "ab"]
    feeds = [*feeds_of([rank([item], [[item]]) for item in items], 1, 1)]
    given = [feed.loaders[0].passes[0][0] for feed in feeds]
    assert [type(one) for one in given] == [Uncollated, Uncollated] and not feeds[0].pads
    assert given[0].item is None and given[1].item["text"] == ["a"]
    assert [feed.collates for feed in feeds] == [True, False]
    [feed] = feeds_of([rank([item]) for item in items], 1, 1)
    assert feed.loaders[0].passes[0][0]["text"] == ["a"]


def test_padding_that_cannot_be_replayed_is_refused_with_a_sentence():
    ranks = [rank([pad(samples)], [samples], draws=True) for samples in (rows(2), rows(4))]
    with pytest.raises(InvalidArgument, match="draws random numbers: its padding cannot be replayed"):
        [*feeds_of(ranks, 1, 1)]
    with pytest.raises(InvalidArgument, match="expected rows of one shape on all ranks"):
        [*feeds_of([rank([pad(rows(2))]), rank([pad(rows(4))])], 1, 1)]


def test_batches_are_given_one_by_one_where_one_process_makes_as_many_forwards():
    [feed] = feeds_of([rank([pad(rows(2))]), rank([pad(rows(4))])], 2, 1)
    assert [item.shape[1] for item in feed.loaders[0].passes[0]] == [2, 4]


def test_arguments_of_forward_are_tried_after_the_items_of_loaders():
    """An augmentation in the loop comes between these."""
    ranks = [rank([torch.zeros(1, 2)], calls=[Call((torch.ones(1, 2),), {}, determines_loss=True)]) for _ in range(2)]
    assert [feed.source for feed in feeds_of(ranks, 1, 1)] == [Source.LOADER, Source.FORWARD]


def test_a_loader_that_only_validates_keeps_its_own_items():
    ranks = [rank([torch.ones(1, 2)]) for _ in range(2)]
    for one in ranks:
        one.loaders[0].passes[0].trained = 1
        one.loaders.append(LoaderSeen(length=3, passes=[Pass(items=[torch.ones(5, 3)])]))
    [feed] = feeds_of(ranks, 1, 1)
    assert [loader.passes is None for loader in feed.loaders] == [False, True]
    feeder, loaders = Feeder(feed, keeps=False), [DataLoader(torch.zeros(4, 2), batch_size=2) for _ in range(2)]
    with feeder.watch():
        assert [[len(item) for item in loader] for loader in loaders] == [[2], [2, 2]]
        assert [len(loader) for loader in loaders] == [2, 2]
