"""What a user may rely on: which loops check_training passes, and what it raises of the others."""

from __future__ import annotations

import os
import signal
import threading

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from fsdp_testing import check_training
from fsdp_testing.errors import WorldFailed
from fsdp_testing.train.function import TrainingDiffers, TrainingUndecided

ROWS, STEPS = 12, 3


def data(step, dtype):
    draw = torch.Generator().manual_seed(step)
    return [torch.randn(ROWS, columns, generator=draw, dtype=torch.float64).to(dtype) for columns in (3, 1)]


def loop(world, *, make=None, dtype=torch.float64, stepping=None, local=None, after=None):
    """Train; what is returned is reduced over ranks, whatever weights each of them has.

    Args:
        world: Of the ranks.
        make: Makes the optimizer of parameters and the number of ranks.
        dtype: Of the model.
        stepping: Given rank, ranks and step, whether to step.
        local: Given ranks and step, whether its backward stays local.
        after: Called with the model, rank, ranks and step after each step.
    """
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1)).to(dtype)
    model = DistributedDataParallel(plain) if world.size > 1 else plain
    optimizer = (make or sgd)(plain.parameters(), world.size)
    losses = []
    for step in range(STEPS):
        inputs, targets = (tensor[world.rank :: world.size] for tensor in data(step, dtype))
        optimizer.zero_grad()
        with model.no_sync() if world.size > 1 and local and local(world.size, step) else torch.enable_grad():
            loss = (model(inputs) - targets).square().mean()
            loss.backward()
        if stepping is None or stepping(world.rank, world.size, step):
            optimizer.step()
        if after is not None:
            after(plain, world.rank, world.size, step)
        losses.append(reduced(loss.detach(), world))
    return {"loss": losses}


def reduced(number, world):
    dist.all_reduce(number)
    return number / world.size


def sgd(parameters, size):
    return torch.optim.SGD(parameters, lr=0.1)


def right(world):
    return loop(world)


def right_in_float32_with_adamw(world):
    return loop(world, make=lambda p, size: torch.optim.AdamW(p, lr=1e-6), dtype=torch.float32)


def last_step_inside_no_sync(world):
    return loop(world, local=lambda size, step: step == STEPS - 1)


def one_rank_skips_the_last_step(world):
    return loop(world, stepping=lambda rank, size, step: rank != 1 or step < STEPS - 1)


def one_rank_changes_its_weights_at_the_end(world):
    def after(model, rank, size, step):
        if rank == 1 and step == STEPS - 1:
            with torch.no_grad():
                model[0].bias += 1

    return loop(world, after=after)


def never_steps_on_two_ranks(world):
    def make(parameters, size):
        return torch.optim.AdamW(parameters, lr=1e-5)

    return loop(world, make=make, dtype=torch.float32, stepping=lambda rank, size, step: size == 1) and {}


def rate_times_ranks(world):
    return loop(world, make=lambda p, size: torch.optim.SGD(p, lr=1e-5 * size), dtype=torch.float32)


def adamw_rate_times_ranks(world):
    return loop(world, make=lambda p, size: torch.optim.AdamW(p, lr=1e-6 * size), dtype=torch.float32)


def decays(rate_of):
    def after(model, rank, size, step):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter *= 1 - rate_of(size)

    return after


def decays_by_hand(world):
    return loop(world, dtype=torch.float32, after=decays(lambda size: 5e-6))


def decay_times_ranks(world):
    return loop(world, dtype=torch.float32, after=decays(lambda size: 5e-6 * size))


def sums_and_divides_the_rate(world):
    """A sum over ranks where the rate is divided by their number: the same updates."""

    def after(model, rank, size, step):
        pass

    torch.manual_seed(0)
    model = nn.Linear(3, 1).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1 / world.size, momentum=0.9)
    for step in range(STEPS):
        inputs, targets = (tensor[world.rank :: world.size] for tensor in data(step, torch.float64))
        optimizer.zero_grad()
        (model(inputs) - targets).square().mean().backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        nn.utils.clip_grad_norm_(model.parameters(), 1e9)
        optimizer.step()
    return {}


def clears_before_the_step(world):
    torch.manual_seed(0)
    model = nn.Linear(3, 1).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        inputs, targets = data(step, torch.float64)
        (model(inputs) - targets).square().mean().backward()
        optimizer.zero_grad()
        optimizer.step()
    return {"weight": model.weight.detach()}


def has_a_rate_of_zero(world):
    return loop(world, make=lambda p, size: torch.optim.SGD(p, lr=0.0))


def returns_nothing(world):
    return {}


def raises_on_one_rank(world):
    if world.rank == 1:
        raise RuntimeError("only on rank 1")
    return right(world)


def raises_on_all_ranks(world):
    raise RuntimeError("on every rank")


def dies_early(world):
    if world.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return right(world)


class DiesWhenCollected:
    def __init__(self):
        self.here = self
        self.process = os.getpid()

    def __del__(self):
        if os.getpid() == self.process:
            os.kill(self.process, signal.SIGKILL)


def dies_after_its_report(world):
    if world.rank == world.size - 1 == 1:
        DiesWhenCollected()
    return right(world)


def hangs(world):
    if world.rank == 1:
        threading.Event().wait()
    return right(world)


def hangs_once(world):
    place = os.environ["HANGS_ONCE"]
    if world.rank == 1 and not os.path.exists(place):
        with open(place, "w", encoding="utf-8"):
            pass
        threading.Event().wait()
    return right(world)


def is_chaotic(world):
    number = torch.linspace(0.01, 0.03, 12)[world.rank :: world.size].sum()
    dist.all_reduce(number)
    for _ in range(60):
        number = 3.99 * number * (1 - number)
    return {"number": number}


@pytest.mark.parametrize("train", [right, right_in_float32_with_adamw, decays_by_hand, sums_and_divides_the_rate])
def test_a_right_loop_passes(train):
    check_training(train, world_sizes=(1, 2))


@pytest.mark.parametrize(
    ("train", "message"),
    [
        (
            last_step_inside_no_sync,
            r"ranks of a world of 2 do not hold the same: parameter 0.weight differs between ranks 0 and 1 at step 2. Cause: "
            r"the no_sync boundary is off by one",
        ),
        (one_rank_skips_the_last_step, r"ranks of a world of 2 make different numbers of optimizer steps: 3, 2"),
        (
            one_rank_changes_its_weights_at_the_end,
            r"weights at the end of 0.bias differs between ranks 0 and 1 at the end",
        ),
    ],
)
def test_ranks_that_end_with_different_weights_fail(train, message):
    with pytest.raises(TrainingDiffers, match=message):
        check_training(train, world_sizes=(1, 2))


@pytest.mark.parametrize(
    ("train", "message"),
    [
        (never_steps_on_two_ranks, r"the optimizer has 0 steps, expected 3"),
        (rate_times_ranks, r"learning rate at step 0 .*Cause: the learning rate is multiplied by the number of ranks"),
        (adamw_rate_times_ranks, r"learning rate at step 0 .*Cause: the learning rate is multiplied by"),
        (decay_times_ranks, r"(parameter|weights at the end of|gradient of) .* is off by"),
    ],
)
def test_a_wrong_number_fails_however_small_it_is_beside_the_weights(train, message):
    with pytest.raises(TrainingDiffers, match=message):
        check_training(train, world_sizes=(1, 2))


@pytest.mark.parametrize(
    ("train", "message"),
    [
        (has_a_rate_of_zero, "no parameter that changes in any step"),
        (returns_nothing, "nothing is compared: the loop returns nothing"),
        (is_chaotic, "Roundings decide most of number"),
    ],
)
def test_nothing_is_not_a_pass(train, message):
    with pytest.raises(TrainingUndecided, match=message):
        check_training(train, world_sizes=(1, 2))


def test_gradients_that_are_cleared_before_the_step_fail_on_any_world():
    with pytest.raises(TrainingDiffers, match="no parameter has a gradient when the optimizer steps at step 0"):
        check_training(clears_before_the_step, world_sizes=(1, 2))


@pytest.mark.parametrize(
    ("train", "message"),
    [
        (raises_on_one_rank, "only on rank 1"),
        (raises_on_all_ranks, "on every rank"),
        (dies_early, "rank 1 died by SIGKILL"),
        (dies_after_its_report, "rank 1 died by SIGKILL"),
    ],
)
def test_a_rank_that_raises_or_dies_fails_early_and_late(train, message):
    with pytest.raises(WorldFailed, match=message):
        check_training(train, world_sizes=(1, 2))


@pytest.mark.slow  # tests/acceptance/contract: check_training-hung always
def test_a_loop_that_hangs_always_fails():
    with pytest.raises(WorldFailed, match="rank 1 hung"):
        check_training(hangs, world_sizes=(1, 2), timeout=6.0)


@pytest.mark.slow  # tests/acceptance/contract: check_training-hung once, passes alone
def test_of_a_loop_that_hung_once_nothing_is_known(tmp_path, monkeypatch):
    monkeypatch.setenv("HANGS_ONCE", str(tmp_path / "hung"))
    with pytest.raises(TrainingUndecided, match="run again, it finished"):
        check_training(hangs_once, world_sizes=(1, 2), timeout=6.0)


class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return ROWS

    def __getitem__(self, row):
        inputs, targets = data(0, torch.float64)
        return inputs[row], targets[row]


def takes_one_order_in_each_epoch(world, tell=False):
    """All ranks together take all rows of an epoch, in an order that depends on the epoch; each rank trains on its share."""
    sampler = torch.utils.data.DistributedSampler(Rows(), num_replicas=1, rank=0, shuffle=True)
    loader = torch.utils.data.DataLoader(Rows(), batch_size=6, sampler=sampler)
    torch.manual_seed(0)
    model = nn.Linear(3, 1).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(2):
        if tell:
            sampler.set_epoch(epoch)
        for inputs, targets in loader:
            mine = slice(world.rank, None, world.size)
            optimizer.zero_grad()
            (model(inputs[mine]) - targets[mine]).square().mean().backward()
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
                parameter.grad /= world.size
            optimizer.step()
    return {"weight": model.weight.detach()}


def takes_another_order_in_each_epoch(world):
    return takes_one_order_in_each_epoch(world, tell=True)


def test_an_order_of_data_that_every_world_repeats_fails_as_in_a_script():
    check_training(takes_another_order_in_each_epoch, world_sizes=(1, 2))
    with pytest.raises(TrainingDiffers, match=r"wrong with any number of ranks.* set_epoch is not called"):
        check_training(takes_one_order_in_each_epoch, world_sizes=(1, 2))


def takes_uneven_shares(world):
    """Seven rows on one rank and five on the other, and the plain mean of their gradients."""
    torch.manual_seed(0)
    model = nn.Linear(3, 1).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inputs, targets = data(0, torch.float64)
    mine = slice(None) if world.size == 1 else slice(0, 7) if world.rank == 0 else slice(7, None)
    (model(inputs[mine]) - targets[mine]).square().mean().backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= world.size
    optimizer.step()
    return {"weight": model.weight.detach()}


def test_an_uneven_batch_is_named_as_in_a_script():
    with pytest.raises(TrainingDiffers, match=r"Cause: an uneven batch. At step 0 the ranks have 7, 5 rows"):
        check_training(takes_uneven_shares, world_sizes=(1, 2))
