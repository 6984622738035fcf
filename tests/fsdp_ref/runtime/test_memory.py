"""Training in a steady state keeps nothing: what is alive after ten steps is all that is alive after fifty."""

from __future__ import annotations

import gc
from collections import Counter

import pytest
import torch
import torch.distributed as dist

from fsdp_ref.annotations import units_under


def alive():
    """Return the least of three counts: gloo's threads let go of what they sent a moment after it was waited for."""
    counts = []
    for _ in range(3):
        for _ in range(4):
            dist.barrier()
        counts.append(count())
    return min(counts, key=lambda each: (each[0].total(), each[1]))


def count():
    """Count live objects of torch and of the reference by type, and the bytes of all storages that tensors hold."""
    gc.collect()
    kinds = Counter()
    storages = {}
    for found in gc.get_objects():
        kind = type(found)
        if kind is torch.UntypedStorage:  # looking at a storage, as below, makes one of these; they own no bytes
            continue
        if kind.__module__.partition(".")[0] in {"torch", "fsdp_ref"}:
            kinds[f"{kind.__module__}.{kind.__qualname__}"] += 1
        if issubclass(kind, torch.Tensor) and not found.is_meta:
            storage = found.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return kinds, sum(storages.values())


def step(case, xs):
    case.loss(xs).backward()
    case.optimizer.step()
    case.optimizer.zero_grad()


@pytest.mark.world(2)
def test_steps_and_accumulations_leave_no_tensor_behind(trial, api, strategy):
    case = trial(api, strategy)
    xs = case.inputs(0)

    def train(rounds):
        for _ in range(rounds):
            step(case, xs)
            with case.no_sync():
                case.loss(xs).backward()
                case.loss(xs).backward()
            step(case, xs)
            with torch.no_grad():
                case.model(xs[case.world.rank])

    train(5)
    kinds, held_bytes = alive()
    train(20)
    kinds_later, held_bytes_later = alive()
    assert kinds_later - kinds == Counter()
    assert held_bytes_later == held_bytes
    assert any(name.endswith(".Parameter") for name in kinds)  # the count sees tensors
    assert held_bytes >= sum(param.untyped_storage().nbytes() for param in case.plain.parameters())


@pytest.mark.world(2)
def test_between_steps_no_full_parameter_is_alive(trial, api, full_bytes):
    case = trial(api, "FULL_SHARD")
    for _ in range(3):
        step(case, case.inputs(0))
        assert full_bytes(case.model) == 0


@pytest.mark.world(2)
def test_dropped_gradients_hold_no_memory_in_forward(trial, api, strategy):
    case = trial(api, strategy)
    xs = case.inputs(0)
    step(case, xs)
    stores = [unit.handle.grads for _, _, unit in units_under(case.model)]
    out = case.loss(xs)
    assert [store.reduced_S for store in stores] == [None] * len(stores)
    out.backward()
    assert all(store.reduced_S is not None for store in stores)
    case.loss(xs)
    assert all(store.reduced_S is not None for store in stores)  # gradients that are wanted stay
