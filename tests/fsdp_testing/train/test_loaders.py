"""What is seen of a DataLoader: its rows by index, the rest of a pass that was not ended, the rows that an item is made of."""

from __future__ import annotations

import random

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, Subset

from fsdp_testing.train import loaders as loaders_module
from fsdp_testing.train.feed import Feed, Feeder
from fsdp_testing.train.loaders import of_training


class Augmented(Dataset):
    """Rows that torch and Python disturb at random; `own` draws them of a generator of its own."""

    def __init__(self, own=None, first=0.0):
        self.own, self.first = own, first

    def __len__(self):
        return 8

    def __getitem__(self, place):
        return torch.full((2,), self.first + place) + torch.rand(2, generator=self.own) + random.random()


def taken(loader, items=None, before=lambda _: None, passes=1):
    """Return what is seen of passes of which so many items are taken, each followed by a forward."""
    feeder = Feeder(Feed(), keeps=True)
    with feeder.watch():
        for number in range(passes):
            before(number)
            for place, _ in enumerate(loader):
                feeder.forward((), {})
                if place + 1 == items:
                    break
    feeder.finish()
    return feeder.taken.loaders[0]


@pytest.mark.parametrize("workers", [0, 1])
def test_rows_are_known_by_their_indices_in_the_dataset_under_all_subsets(workers):
    data = Subset(Subset(Augmented(), [7, 6, 5, 4, 3, 2]), range(1, 6, 2))
    loader = DataLoader(data, batch_size=2, num_workers=workers)
    sampler, collate = loader.batch_sampler, loader.collate_fn
    seen = taken(loader)
    [one] = seen.passes
    assert one.indices == ["6", "4", "2"] and one.complete and one.planned
    assert [len(samples) for samples in one.samples] == [2, 1] and len(one.rows) == 3
    assert loader.batch_sampler is sampler and loader.collate_fn is collate


def test_torchs_samplers_are_asked_for_the_rest_of_a_pass_and_others_are_not():
    class Own:
        def __iter__(self):
            yield from range(8)

    sampler = DistributedSampler(Augmented(), num_replicas=2, rank=1, shuffle=False)
    [one] = taken(DataLoader(Augmented(), batch_size=2, sampler=sampler), items=1).passes
    assert (one.indices, one.complete, one.planned) == (["1", "3", "5", "7"], False, True)
    [one] = taken(DataLoader(Augmented(), batch_size=2, sampler=Own()), items=1).passes
    assert (one.indices, one.complete, one.planned) == (["0", "1"], False, False)


def test_a_dataset_is_known_again_whatever_is_drawn_for_its_rows():
    random.seed(1)
    one = taken(DataLoader(Augmented(), batch_size=4)).dataset
    random.seed(2)
    state = random.getstate(), torch.get_rng_state()
    assert one == taken(DataLoader(Subset(Augmented(), [1, 2, 3]), batch_size=3)).dataset != ()
    assert one != taken(DataLoader(Augmented(first=9.0), batch_size=4)).dataset
    # What draws by a generator of its own is known by its rows, or not at all.
    own = [taken(DataLoader(Augmented(torch.Generator().manual_seed(seed)), batch_size=4)).dataset for seed in (1, 2)]
    assert own[0] != own[1]

    class Stream(IterableDataset):
        def __iter__(self):
            yield torch.ones(2)

    assert taken(DataLoader(Stream())).dataset == ()
    assert state[0] != random.getstate()  # rows have drawn of it


def test_a_look_at_a_dataset_leaves_the_generators_as_they_were():
    loader, feeder = DataLoader(Augmented(), batch_size=8), Feeder(Feed(), keeps=True)
    with feeder.watch():
        list(loader)
    state = random.getstate(), torch.get_rng_state().tolist()
    feeder.finish()
    assert state == (random.getstate(), torch.get_rng_state().tolist())


def test_set_epoch_is_observed_for_each_pass():
    sampler = DistributedSampler(Augmented(), num_replicas=2, rank=0)
    loader = DataLoader(Augmented(), batch_sampler=torch.utils.data.BatchSampler(sampler, 2, drop_last=False))
    right = taken(loader, before=lambda epoch: sampler.set_epoch(epoch), passes=2)
    assert [(one.epoch, one.epoch_calls) for one in right.passes] == [(0, 1), (1, 2)] and not right.repeats_order
    assert taken(loader, passes=2).repeats_order == "is not called"
    assert taken(loader, passes=2, before=lambda _: sampler.set_epoch(3)).repeats_order == "is called with 3 again"
    assert taken(loader, passes=2, items=1).repeats_order == ""  # looks at the first batch


@pytest.mark.parametrize("draws", [False, True])
def test_a_collator_that_draws_is_told_from_one_that_does_not_and_is_given_its_rows_whole(draws):
    def collate(rows):
        parts = [row.pop("x") for row in rows]
        return torch.stack(parts) + (torch.rand(1) if draws else 0)

    rows = [{"x": torch.full((2,), float(place))} for place in range(4)]
    seen = taken(DataLoader([dict(row) for row in rows], batch_size=2, collate_fn=collate))
    assert (seen.draws, seen.collates) == (draws, True)
    assert [sorted(sample) for sample in seen.passes[0].samples[0]] == [["x"], ["x"]]


def test_a_loader_that_only_validates_is_told_from_those_of_the_training():
    feeder = Feeder(Feed(), keeps=True)
    training, validation = DataLoader(Augmented(), batch_size=4), DataLoader(Augmented(), batch_size=8)
    with feeder.watch():
        for _ in training:
            feeder.forward((), {})
        list(validation)
        next(iter(validation))
    loaders = feeder.taken.loaders
    assert [[one.trained for one in loader.passes] for loader in loaders] == [[2], [0, 0]]
    assert of_training(loaders) == [True, False]
    assert of_training(loaders[1:]) == [True]  # nothing tells them apart


def test_the_rest_of_a_pass_is_not_kept_of_a_very_large_dataset(monkeypatch):
    monkeypatch.setattr(loaders_module, "_MOST_INDICES", 4)
    [one] = taken(DataLoader(Augmented(), batch_size=2), items=1).passes
    assert (one.indices, one.planned) == (["0", "1"], False)
