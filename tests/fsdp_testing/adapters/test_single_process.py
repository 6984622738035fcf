"""The textbook implementation: the mean of the ranks' gradients, and nothing left behind."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
import torch.distributed as dist

from fsdp_testing import run_ranks
from fsdp_testing.adapters import registry
from fsdp_testing.adapters.protocol import Setup
from fsdp_testing.cases.models import MODELS
from fsdp_testing.errors import InvalidImplementation


def setup_of(strategy: str = "no_shard") -> Setup:
    return Setup(dist.get_rank(), dist.get_world_size(), torch.device("cpu"), group=dist.group.WORLD, strategy=strategy)


def gradients(model_name: str, uses: list[tuple[bool, ...]], no_sync: list[bool]) -> dict[str, list[float] | None]:
    """Gradients after one micro-batch per entry of `no_sync`; rank r uses the branches `uses[r]`."""
    adapter, model = registry.load("single-process"), MODELS[model_name]
    wrapped = adapter.wrap(model.build(0), setup_of())
    for step, local in enumerate(no_sync):
        inputs = model.make_input(0, dist.get_rank(), step, 2, torch.float64, use=uses[dist.get_rank()])
        if local:
            with adapter.no_sync(wrapped):
                model.loss(wrapped(*inputs.args, **inputs.kwargs)).backward()
        else:
            model.loss(wrapped(*inputs.args, **inputs.kwargs)).backward()
    return {n: None if p.grad is None else p.grad.flatten().tolist() for n, p in wrapped.named_parameters()}


def expected(model_name: str, uses: list[tuple[bool, ...]], steps: int, size: int) -> dict[str, list[float] | None]:
    model = MODELS[model_name]
    module = model.build(0)
    for step in range(steps):
        for rank in range(size):
            inputs = model.make_input(0, rank, step, 2, torch.float64, use=uses[rank])
            (model.loss(module(*inputs.args, **inputs.kwargs)) / size).backward()
    return {n: None if p.grad is None else p.grad.flatten().tolist() for n, p in module.named_parameters()}


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("no_sync", [[False], [True, False], [False, True, True, False], [False, False]])
def test_gradients_are_the_mean_whoever_uses_what(size, no_sync):
    uses = [(True, False, False), (False, True, False), (True, True, False), (False, False, False)]
    wanted = expected("conditional", uses, len(no_sync), size)
    for found in run_ranks(gradients, "conditional", uses, no_sync, size=size):
        assert found.keys() == wanted.keys()
        for name, values in wanted.items():
            assert (found[name] is None) == (values is None), name
            assert values is None or found[name] == pytest.approx(values, rel=1e-12, abs=1e-12)


def collected() -> bool:
    """Whether the model is gone once nobody holds it."""
    adapter, model = registry.load("single-process"), MODELS["mlp"]
    wrapped = adapter.wrap(model.build(0), setup_of())
    model.loss(wrapped(*model.make_input(0, 0, 0, 2, torch.float64).args)).backward()
    gone = weakref.ref(wrapped)
    adapter.finish(wrapped)
    del wrapped
    gc.collect()
    return gone() is None


def test_a_model_is_collected_when_nobody_holds_it():
    assert run_ranks(collected) == [True, True]


def refused() -> str:
    with pytest.raises(InvalidImplementation) as caught:
        registry.load("single-process").wrap(MODELS["mlp"].build(0), setup_of("full_shard"))
    return str(caught.value)


def test_strategies_that_it_does_not_claim_are_refused():
    assert all("expected strategy 'no_shard', got 'full_shard'" in text for text in run_ranks(refused))
