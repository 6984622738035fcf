"""``backward(inputs=...)`` gives what one process gives, to the chosen parameters alone, and hooks run as they always do."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fsdp_ref import FullyShardedDataParallel, ShardingStrategy, fully_shard
from fsdp_ref.errors import FsdpRuntimeError

S = ShardingStrategy
pytestmark = pytest.mark.filterwarnings("ignore:The `NO_SHARD` sharding strategy:FutureWarning")
STRATEGIES = pytest.mark.parametrize(
    "strategy", [S.FULL_SHARD, S.SHARD_GRAD_OP, S.NO_SHARD], ids=lambda each: each.name
)


def plain() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 3).double(), nn.Tanh(), nn.Linear(3, 1).double())


def wrapped(strategy: ShardingStrategy = S.FULL_SHARD, *, flat: bool = False) -> nn.Module:
    model = plain()
    model[0] = FullyShardedDataParallel(model[0], sharding_strategy=strategy, use_orig_params=not flat)
    return FullyShardedDataParallel(model, sharding_strategy=strategy, use_orig_params=not flat)


def composed(strategy: ShardingStrategy) -> nn.Module:
    model = plain()
    fully_shard(model[0], strategy=strategy)
    return fully_shard(model, strategy=strategy)


def loss_of(model: nn.Module, rank: int | None = None) -> torch.Tensor:
    rank = dist.get_rank() if rank is None else rank
    loss: torch.Tensor = model(torch.full((2, 3), rank + 1.0, dtype=torch.float64)).sum()
    return loss


def stepped(model: nn.Module) -> list[torch.Tensor]:
    """The whole parameters after a step by the gradients that are there."""
    torch.optim.SGD(model.parameters(), lr=1.0).step()
    with FullyShardedDataParallel.summon_full_params(model):
        return [param.detach().clone() for param in model.parameters()]


def in_one_process(chosen: tuple[int, ...]) -> list[torch.Tensor]:
    """The same of the mean loss in one process."""
    model, size = plain(), dist.get_world_size()
    params = list(model.parameters())
    loss = sum((loss_of(model, rank) for rank in range(size)), torch.tensor(0.0, dtype=torch.float64)) / size
    loss.backward(inputs=[params[index] for index in chosen])
    torch.optim.SGD(params, lr=1.0).step()
    return [param.detach() for param in params]


@pytest.mark.world(3)
@STRATEGIES
@pytest.mark.parametrize("chosen", [(0, 1, 2, 3), (0,), (3,), (1, 2)], ids=str)
@pytest.mark.parametrize("make", [wrapped, composed])
def test_chosen_parameters_have_the_gradients_of_one_process_and_no_other_has_one(world, make, chosen, strategy):
    model = make(strategy)
    params = list(model.parameters())
    loss_of(model).backward(inputs=[params[index] for index in chosen])
    assert all(param.grad is None for index, param in enumerate(params) if index not in chosen)
    torch.testing.assert_close(stepped(model), in_one_process(chosen))
    assert loss_of(model).isfinite()


@pytest.mark.world(2)
@STRATEGIES
@pytest.mark.parametrize("chosen", [(0, 1), (0,), (1,)], ids=str)
def test_flat_parameters_are_chosen_whole(world, chosen, strategy):
    model = wrapped(strategy, flat=True)
    flats = list(model.parameters())
    loss_of(model).backward(inputs=[flats[unit] for unit in chosen])
    assert [flat.grad is not None for flat in flats] == [unit in chosen for unit in (0, 1)]
    of_units = {0: (2, 3), 1: (0, 1)}
    torch.testing.assert_close(
        stepped(model), in_one_process(tuple(index for unit in chosen for index in of_units[unit]))
    )


@pytest.mark.world(2)
def test_gradients_of_inputs_alone_are_no_matter_of_parameters(world):
    model = wrapped()
    rows = torch.ones(2, 3, dtype=torch.float64, requires_grad=True)
    (gradient,) = torch.autograd.grad(model(rows).sum(), [rows])
    model(rows).sum().backward(inputs=[rows])
    torch.testing.assert_close(rows.grad, gradient)
    assert all(param.grad is None for param in model.parameters())


@pytest.mark.world(2)
@pytest.mark.parametrize("flat", [False, True], ids=["originals", "flat"])
@pytest.mark.parametrize("allow_unused", [False, True])
def test_gradients_that_would_be_returned_are_refused_in_words(world, flat, allow_unused):
    model = wrapped(flat=flat)
    loss = loss_of(model)
    with pytest.raises(FsdpRuntimeError, match=r"torch\.autograd\.grad for parameters.*Call backward\(inputs="):
        torch.autograd.grad(loss, list(model.parameters()), allow_unused=allow_unused)
    loss_of(model).backward()
    assert all(param.grad is not None for param in model.parameters() if param.numel())


@pytest.mark.world(2)
def test_hooks_run_once_with_a_gradient_whenever_they_were_put_on(world):
    model = wrapped(S.NO_SHARD)
    param = next(iter(model.parameters()))
    calls: list[str] = []

    def note(name: str, value: torch.Tensor | None) -> None:
        assert value is not None
        calls.append(name)

    param.register_hook(lambda grad: note("before", grad))
    loss = loss_of(model)

    def at_first(grad: torch.Tensor) -> None:
        note("between", grad)
        once.remove()

    once = param.register_hook(at_first)
    later = param.register_post_accumulate_grad_hook(lambda held: note("accumulated", held.grad))
    loss.backward()
    assert calls == ["before", "between", "accumulated"]
    loss_of(model).backward()
    assert calls[3:] == ["before", "accumulated"]
    later.remove()
    loss = loss_of(model) + loss_of(model)  # two graphs, of which each is reduced
    loss.backward(inputs=[param])
    assert set(calls[5:]) == {"before"}


@pytest.mark.world(2)
def test_hooks_survive_a_backward_that_fails(world):
    model = wrapped(S.NO_SHARD)
    calls: list[torch.Tensor] = []
    for param in model.parameters():
        param.register_hook(calls.append)
    rows = torch.ones(2, 3, dtype=torch.float64, requires_grad=True)
    rows.register_hook(lambda grad: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(rows).sum().backward()
    calls.clear()
    loss_of(model).backward()
    assert len(calls) == 4
