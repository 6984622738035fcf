"""check_training: a right loop passes on every world size; each classic mistake is caught and the cause named."""

from __future__ import annotations

import os
import re

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from fsdp_testing import check_training
from fsdp_testing.errors import InvalidArgument, WorldFailed
from fsdp_testing.train.comparison import first_difference, suggestion
from fsdp_testing.train.function import TrainingDiffers, TrainingPartlyUndecided
from fsdp_testing.train.quantities import LOSS

ROWS, STEPS, PARTS = 12, 4, 2


def data(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(step)
    return torch.randn(ROWS, 3, generator=draw, dtype=torch.float64), torch.randn(ROWS, 1, generator=draw).double()


def train(world, *, divide=True, boundary=PARTS - 1, seed=0, metric="mean", drop=0.0, reduce=True):
    """Linear regression over micro-batches; every rank takes every size-th row of each micro-batch."""
    torch.manual_seed(seed)
    plain = nn.Sequential(nn.Linear(3, 5), nn.Dropout(drop), nn.Linear(5, 1)).double()
    model = DistributedDataParallel(plain) if world.size > 1 and reduce else plain
    steps = torch.optim.SGD(plain.parameters(), lr=0.1)
    losses = []
    for step in range(STEPS):
        inputs, targets = data(step)
        steps.zero_grad()
        total = torch.zeros((), dtype=torch.float64)
        for part in range(PARTS):
            rows = slice(part * ROWS // PARTS + world.rank, (part + 1) * ROWS // PARTS, world.size)
            local = part < boundary and world.size > 1 and reduce
            with model.no_sync() if local else torch.enable_grad():
                loss = (model(inputs[rows]) - targets[rows]).square().mean() / (PARTS if divide else world.size)
                loss.backward()
            total += loss.detach()
        if metric == "mean" and world.size > 1:
            dist.all_reduce(total)
            total /= world.size
        elif metric == "sum" and world.size > 1:
            dist.all_reduce(total)
        losses.append(total)
        steps.step()
    return {"loss": losses, **{name: p.detach() for name, p in plain.named_parameters()}}


def right(world):
    return train(world)


def boundary_off_by_one(world):
    return train(world, boundary=PARTS)


def divided_by_world_size(world):
    return train(world, divide=False)


def seed_depends_on_rank(world):
    # No DDP: it would broadcast rank 0's parameters and hide the seed.
    return train(world, seed=world.rank, reduce=False)


def dropout_out_of_step(world):
    return train(world, drop=0.5)


def boundary_one_too_early(world):
    """The first of two micro-batches is reduced, the last one runs inside no_sync."""
    torch.manual_seed(0)
    plain = nn.Linear(3, 1).double()
    model = DistributedDataParallel(plain) if world.size > 1 else plain
    steps = torch.optim.SGD(plain.parameters(), lr=0.1)
    inputs, targets = data(0)
    for part in range(PARTS):
        rows = slice(part * ROWS // PARTS + world.rank, (part + 1) * ROWS // PARTS, world.size)
        with model.no_sync() if part == PARTS - 1 and world.size > 1 else torch.enable_grad():
            ((model(inputs[rows]) - targets[rows]).square().mean() / PARTS).backward()
    steps.step()
    return {name: p.detach() for name, p in plain.named_parameters()}


def accumulate(world, *, divide):
    """Micro-batches of one size, so that more ranks make fewer of them: each step sees the same global batch."""
    torch.manual_seed(0)
    plain = nn.Linear(3, 1).double()
    model = DistributedDataParallel(plain) if world.size > 1 else plain
    steps = torch.optim.SGD(plain.parameters(), lr=0.1)
    inputs, targets = data(0)
    parts = 4 // world.size
    for _ in range(2):
        steps.zero_grad()
        for part in range(parts):
            begin = 3 * (part * world.size + world.rank)
            with model.no_sync() if part < parts - 1 and world.size > 1 else torch.enable_grad():
                loss = (model(inputs[begin : begin + 3]) - targets[begin : begin + 3]).square().mean()
                (loss / parts if divide else loss).backward()
        steps.step()
    return {name: p.detach() for name, p in plain.named_parameters()}


def accumulates_rightly(world):
    return accumulate(world, divide=True)


def loss_not_divided_by_accumulation_steps(world):
    return accumulate(world, divide=False)


def dropout_one_draw_ahead(world):
    """Every rank computes the same, but rank 1 has drawn a random number more before step 1."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.5), nn.Linear(8, 1)).double()
    steps = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(3):
        inputs, targets = data(step)
        if step == 1 and world.rank == 1:
            torch.rand(1)
        steps.zero_grad()
        loss = (model(inputs) - targets).square().mean()
        loss.backward()
        for parameter in model.parameters():
            if world.size > 1:
                dist.all_reduce(parameter.grad)
                parameter.grad /= world.size
        losses.append(loss.detach())
        steps.step()
    return {"loss": losses}


def draws_noise(world):
    """Noise of each rank's own shape, without any dropout layer."""
    torch.manual_seed(0)
    plain = nn.Linear(3, 1).double()
    model = DistributedDataParallel(plain) if world.size > 1 else plain
    steps = torch.optim.SGD(plain.parameters(), lr=0.1)
    inputs, targets = data(0)
    mine = slice(world.rank, ROWS, world.size)
    noise = torch.nn.functional.dropout(model(inputs[mine]), 0.5)
    (noise - targets[mine]).square().mean().backward()
    steps.step()
    return {name: p.detach() for name, p in plain.named_parameters()}


def metric_not_reduced(world):
    return train(world, metric="own")


def metric_summed(world):
    return train(world, metric="sum")


def gradients_not_reduced(world):
    return train(world, reduce=False)


def not_seeded(world):
    return {"noise": torch.Generator().seed() * torch.ones(1)}


def raises_on_rank_one(world):
    if world.rank == 1:
        raise RuntimeError("only on rank 1")
    return {}


def returns_a_tensor(world):
    return torch.ones(1)


def returns_text(world):
    return {"name": "text"}


def other_names(world):
    return {"a": torch.ones(1)} if world.size == 1 else {"b": torch.ones(1)}


def fewer_steps(world):
    return {"loss": [torch.ones(1)] * (4 - world.size)}


def other_shape(world):
    return {"x": torch.ones(world.size)}


@pytest.mark.parametrize("loop", [right, accumulates_rightly])
def test_a_right_loop_passes(loop):
    check_training(loop, world_sizes=(1, 2) if loop is accumulates_rightly else (1, 2, 3))


@pytest.mark.parametrize(
    ("loop", "message"),
    [
        (
            boundary_off_by_one,
            r"rank 1 of a world of 2 differs.*Cause: the no_sync boundary is off by one. At step 0 all 2 backward passes",
        ),
        (
            boundary_one_too_early,
            r"Cause: the no_sync boundary is off by one. At step 0, of 2 backward passes number 1 is reduced and the last",
        ),
        (
            loss_not_divided_by_accumulation_steps,
            r"Cause: the loss is not divided by the number of accumulation steps. At step 0 the gradient is 0.5 times "
            r"that of the reference, exactly as 2 backward passes are to 4",
        ),
        (dropout_one_draw_ahead, r"Cause: dropout is out of step. At step 1 ranks 0 and 1 reach the first dropout"),
        (draws_noise, r"Cause: random numbers are drawn during step 0"),
        (
            divided_by_world_size,
            r"loss at step 0 .*Cause: gradients are divided by the number of ranks once too often. At step 0 .* exactly 1/2",
        ),
        (
            seed_depends_on_rank,
            r"rank 1 of a world of 2 differs from rank 0: .*Cause: the seed depends on the rank. At step 0 "
            r"torch.initial_seed\(\) is 0 on rank 0 and 1 on rank 1, and the ranks start from different weights",
        ),
        (
            dropout_out_of_step,
            r"a world of 2 differs from a world of 1: loss at step 0 .*Cause: dropout is out of step between world sizes",
        ),
        (
            metric_not_reduced,
            r"rank 1 of a world of 2 differs from rank 0: loss at step 0 .*Cause: loss is not synchronised. The weights "
            r"are equal on all ranks at every step.*its mean over ranks is what one rank alone gives",
        ),
        (metric_summed, r"loss at step 0 .*It is exactly 2 times as large: a sum over ranks"),
        (
            gradients_not_reduced,
            r"rank 1 of a world of 2 .*: 0.weight is off .*Cause: gradients are not reduced. At step 0 no collective",
        ),
        (not_seeded, r"two runs on a world of 1 differ: noise .*not a function of its seeds"),
        (other_names, r"a is returned by only one of them"),
        (fewer_steps, r"loss has 2 steps, expected 3"),
        (other_shape, r"x is torch.float32\[2\], expected torch.float32\[1\]"),
    ],
)
def test_each_mistake_is_caught_and_told(loop, message):
    with pytest.raises(TrainingDiffers) as caught:
        check_training(loop, world_sizes=(1, 2))
    assert re.search(message, str(caught.value).replace("\n", " ")), str(caught.value)
    assert loop.__name__ in str(caught.value)


@pytest.mark.parametrize(("loop", "words"), [(returns_a_tensor, "got Tensor"), (returns_text, r"'name': \['str'\]")])
def test_a_loop_that_returns_something_else(loop, words):
    with pytest.raises(InvalidArgument, match=words):
        check_training(loop, world_sizes=(1,))


def test_a_rank_that_raises_is_accounted_for():
    with pytest.raises(WorldFailed, match="only on rank 1"):
        check_training(raises_on_rank_one, world_sizes=(2,))


def test_no_world_size_at_all():
    with pytest.raises(InvalidArgument, match="at least one world size"):
        check_training(right, world_sizes=())


class Odd(torch.optim.Optimizer):
    """An optimizer whose parameters are not what a witness expects."""

    def __init__(self, parameters):
        super().__init__(parameters, {})

    def step(self, closure=None):
        return None


def with_an_odd_optimizer(world):
    optimizer = Odd([torch.ones(2, requires_grad=True)])
    optimizer.param_groups[0]["params"] = [object()]
    optimizer.step()
    return {"x": torch.ones(1)}


def with_an_odd_optimizer_after_a_backward(world):
    torch.ones(2, requires_grad=True).sum().backward()
    return with_an_odd_optimizer(world)


def test_what_cannot_be_seen_does_not_end_the_loop():
    check_training(with_an_odd_optimizer, world_sizes=(1, 2))


def test_parameters_that_cannot_be_read_are_told():
    with pytest.warns(TrainingPartlyUndecided, match="Parameters could not be read .* only what the loop returns"):
        check_training(with_an_odd_optimizer_after_a_backward, world_sizes=(1, 2))


def metric_not_awaited(world):
    returned = train(world, metric="own")
    for loss in returned["loss"]:
        dist.all_reduce(loss, async_op=True)
        dist.barrier()  # by now the sum is there, in other programs
        loss /= world.size
    return returned


def test_a_metric_that_nobody_waits_for_is_never_there():
    with pytest.raises(
        TrainingDiffers,
        match="rank 0 of a world of 1 computes NaN, first in loss at step 0. Cause: the result of an asynchronous collective",
    ):
        check_training(metric_not_awaited, world_sizes=(1, 2))


def test_memory_that_nobody_wrote_to_is_not_zero():
    with pytest.raises(TrainingDiffers, match="weight"):
        check_training(returns_zero_if_lucky, world_sizes=(1, 2))


def returns_zero_if_lucky(world):
    lucky = bool((torch.empty(4_300_000, dtype=torch.float64)[:4] == 0).all())
    return {"weight": torch.tensor([1.0 if lucky else float(world.size)])}


def diverges(world):
    return {"loss": [torch.tensor(1.0), torch.tensor(float("nan"))]}


def test_nothing_is_proved_by_a_loop_that_ends_in_nan():
    with pytest.raises(TrainingDiffers, match="first in loss at step 1 .* nothing can be compared"):
        check_training(diverges, world_sizes=(1, 2))


def overflows(world):
    return {"loss": torch.tensor([1.0, float("inf"), -float("inf")])}


def overflows_and_differs(world):
    return {"loss": torch.tensor([float(world.size), float("inf")])}


def test_infinities_are_equal_to_themselves_and_hide_nothing():
    check_training(overflows, world_sizes=(1, 2))
    with pytest.raises(TrainingDiffers, match=r"off by .* most in element 0: got 2.0, expected 1.0"):
        check_training(overflows_and_differs, world_sizes=(1, 2))


def low_precision_differs(world):
    return {"loss": torch.tensor([1.0 / world.size, 1.0], dtype=torch.bfloat16)}


def test_low_precision_admits_no_half():
    with pytest.raises(TrainingDiffers, match=r"bound 0.0156"):
        check_training(low_precision_differs, world_sizes=(1, 2))


@pytest.mark.parametrize(
    ("reference", "other", "suggested"),
    [
        ([1.0, 2.0], [1.5, 3.0], "Every element is 1.5 times as large"),
        ([1.0], [1.5], "Look for data that is not split evenly"),  # one number always has one ratio
        ([1.0], [2.0], "It is exactly 2 times as large"),
    ],
)
def test_a_factor_is_suggested_where_it_says_something(reference, other, suggested):
    found = first_difference({LOSS: [torch.tensor(reference)]}, {LOSS: [torch.tensor(other)]}, 0.0)
    assert found is not None
    assert suggestion(found, 2).startswith(suggested)


def starts_as_under_torchrun(world, factor=1.0):
    """Begins and ends like a script for torchrun, and returns nothing that a wrong gradient changes."""
    assert (os.environ["RANK"], os.environ["WORLD_SIZE"]) == (str(world.rank), str(world.size))
    assert os.environ["LOCAL_RANK"] == str(world.rank)
    assert "MASTER_PORT" in os.environ
    dist.init_process_group("gloo", rank=world.rank, world_size=world.size)
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(3, 1).double())
    steps = torch.optim.AdamW(model.parameters(), lr=0.01, eps=0.0)
    for step in range(2):
        inputs, targets = data(step)
        mine = slice(world.rank, ROWS, world.size)
        steps.zero_grad()
        ((model(inputs[mine]) - targets[mine]).square().mean() * (factor if world.size > 1 else 1.0)).backward()
        steps.step()
    dist.destroy_process_group()
    assert dist.is_initialized()
    return {}


def gradient_halved_under_adam(world):
    return starts_as_under_torchrun(world, 0.5)


def takes_another_rank(world):
    dist.init_process_group("gloo", rank=0, world_size=world.size + 1)
    return {}


def test_torchruns_variables_are_set_and_the_world_is_adopted():
    before = os.environ.get("WORLD_SIZE")
    check_training(starts_as_under_torchrun, world_sizes=(1, 2))
    assert os.environ.get("WORLD_SIZE") == before
    with pytest.raises(InvalidArgument, match="init_process_group: expected world_size=2, as torchrun says .* got 3"):
        check_training(takes_another_rank, world_sizes=(2,))


def test_gradients_are_compared_without_being_returned_and_both_worlds_are_shown_step_by_step():
    with pytest.raises(TrainingDiffers) as caught:
        check_training(gradient_halved_under_adam, world_sizes=(1, 2))
    text = str(caught.value)
    assert re.search(r"gradient of weight at step 0 is off by .*exactly 1/2", text), text
    *table, references = text.splitlines()[1:]
    assert references.endswith("one process that runs the rows of each rank separately, and averages: differs, too")
    table = [line.split() for line in table]
    assert table[0][:4] == ["step", "loss", "(1", "rank)"]
    assert [row[0] for row in table[1:]] == ["0", "1"]
    assert float(table[1][3]) == pytest.approx(2 * float(table[1][4]), rel=1e-4)


def fsdp2_boundary_off_by_one(world):
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 1)).double()
    if world.size > 1:
        fully_shard(model, mesh=world.mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        inputs, targets = data(step)
        optimizer.zero_grad()
        for part in range(PARTS):
            if world.size > 1:
                model.set_requires_gradient_sync(part == PARTS)  # the last one is PARTS - 1
            rows = slice(part * ROWS // PARTS + world.rank, (part + 1) * ROWS // PARTS, world.size)
            ((model(inputs[rows]) - targets[rows]).square().mean() / PARTS).backward()
        optimizer.step()
    with torch.no_grad():
        return {"output": model(data(9)[0])}


def test_a_boundary_of_fsdp2_is_told_as_one():
    with pytest.raises(
        TrainingDiffers, match="Cause: the no_sync boundary is off by one. At step 0 all 2 backward passes"
    ):
        check_training(fsdp2_boundary_off_by_one, world_sizes=(1, 2))


def reduces_by_hand(world, weight):
    """Every rank's gradients of each micro-batch are multiplied by a weight, and averaged by hand at the end."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        inputs, targets = data(step)
        optimizer.zero_grad()
        gathered = [torch.zeros_like(p) for p in model.parameters()]
        for part in range(PARTS):
            rows = slice(part * ROWS // PARTS + world.rank, (part + 1) * ROWS // PARTS, world.size)
            ((model(inputs[rows]) - targets[rows]).square().mean() / PARTS).backward()
            for whole, parameter in zip(gathered, model.parameters()):
                whole += parameter.grad * (weight(world.rank, part) if world.size > 1 else 1.0)
            optimizer.zero_grad()
        for whole, parameter in zip(gathered, model.parameters()):
            dist.all_reduce(whole)
            parameter.grad = whole / world.size
        optimizer.step()
    return {name: p.detach() for name, p in model.named_parameters()}


def lacks_a_micro_batch(world):
    return reduces_by_hand(world, lambda rank, part: 0.0 if (rank, part) == (1, 0) else 1.0)


def counts_a_rank_twice(world):
    return reduces_by_hand(world, lambda rank, part: 2.0 if rank == 2 else 1.0)


def rotates(world):
    return reduces_by_hand(world, lambda rank, part: 1.0 + 0.37 * rank * (part + 0.1))


@pytest.mark.parametrize(
    ("loop", "size", "said"),
    [
        (
            lacks_a_micro_batch,
            2,
            "the gradient of 0.weight (and of 3 more) lacks backward pass 1 of rank 1, at step 0.",
        ),
        (
            counts_a_rank_twice,
            3,
            "the gradient of 0.weight (and of 3 more) counts the inputs of rank 2 twice, at step 0.",
        ),
    ],
)
def test_the_term_of_a_gradient_that_is_wrong_is_named(loop, size, said):
    with pytest.raises(TrainingDiffers) as caught:
        check_training(loop, world_sizes=(1, size))
    assert f"Cause: {said}" in str(caught.value)


def test_of_weights_that_are_no_fractions_no_term_is_named():
    with pytest.raises(TrainingDiffers) as caught:
        check_training(rotates, world_sizes=(1, 2))
    assert "Cause" not in str(caught.value)
