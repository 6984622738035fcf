"""The gradient that is stepped is that of the backward passes: a mistake that every world size makes alike fails."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from fsdp_testing import check_training
from fsdp_testing.errors import InvalidArgument
from fsdp_testing.train import control
from fsdp_testing.train.function import TrainingDiffers
from fsdp_testing.train.script import Launch, examine

SCRIPTS = Path(__file__).parent

ROWS, STEPS, PARTS = 12, 3, 3


def rows_of(world, step, part):
    draw = torch.Generator().manual_seed(10 * step + part)
    inputs, targets = torch.randn(ROWS, 3, generator=draw), torch.randn(ROWS, 1, generator=draw)
    return (tensor.double()[world.rank :: world.size] for tensor in (inputs, targets))


def model_of(world):
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1)).double()
    return plain, DistributedDataParallel(plain) if world.size > 1 else plain


def loss_of(model, rows):
    inputs, targets = rows
    return (model(inputs) - targets).square().mean() / PARTS


def weights(plain):
    return {name: p.detach() for name, p in plain.named_parameters()}


def accumulates(world, clear=None, before_step=lambda optimizer: None, decay=0.0, clip=torch.inf, wrapped=True):
    """DDP over micro-batches; `clear` says before which of them gradients are cleared; `clip` each is clipped to."""
    plain, model = model_of(world)
    model = model if wrapped else plain
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1, weight_decay=decay)
    for step in range(STEPS):
        for part in range(PARTS):
            if part in ((0,) if clear is None else clear):
                optimizer.zero_grad()
            loss_of(model, rows_of(world, step, part)).backward()
            if clip < torch.inf:
                nn.utils.clip_grad_norm_(plain.parameters(), clip)
        before_step(optimizer)
        optimizer.step()
    return weights(plain)


def clips_each_micro_batch(world):
    return accumulates(world, clip=0.05)


def seldom_clips_each_micro_batch(world):
    return accumulates(world, clip=100.0)


def clips_each_micro_batch_and_clears_it(world):
    return accumulates(world, clear=range(PARTS), clip=0.05)


def clips_each_micro_batch_and_never_clears(world):
    return accumulates(world, clear=(), clip=0.05)


def clips_each_micro_batch_by_the_norm_of_a_rank(world):
    def reduce(optimizer):
        for parameter in optimizer.param_groups[0]["params"]:
            if world.size > 1:
                dist.all_reduce(parameter.grad)
                parameter.grad /= world.size

    return accumulates(world, clip=0.05, before_step=reduce, wrapped=False)


def clips_micro_batches_that_it_adds_up(world):
    """The clipped gradient of each micro-batch is taken away, and their sum is stepped."""
    plain, model = model_of(world)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for step in range(STEPS):
        sums = [torch.zeros_like(p) for p in plain.parameters()]
        for part in range(PARTS):
            loss_of(model, rows_of(world, step, part)).backward()
            nn.utils.clip_grad_norm_(plain.parameters(), 0.05)
            for buffer, parameter in zip(sums, plain.parameters()):
                buffer += parameter.grad
            optimizer.zero_grad()
        for buffer, parameter in zip(sums, plain.parameters()):
            parameter.grad = buffer
        optimizer.step()
        optimizer.zero_grad()
    return weights(plain)


def clears_before_each_micro_batch(world):
    return accumulates(world, clear=range(PARTS))


def never_clears(world):
    return accumulates(world, clear=())


def never_clears_and_clips(world):
    def clip(optimizer):
        nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], 0.05)

    return accumulates(world, clear=(), before_step=clip)


def clears_before_the_step(world):
    return accumulates(world, before_step=lambda optimizer: optimizer.zero_grad(set_to_none=False), decay=0.1)


def engine(world, share=lambda part: 1.0, ranks=lambda rank: 1.0):
    """An engine of its own: it takes the gradient of each micro-batch away, sums up, and averages over ranks at the end."""
    plain, _ = model_of(world)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for step in range(STEPS):
        sums = [torch.zeros_like(p) for p in plain.parameters()]
        for part in range(PARTS):
            loss_of(plain, rows_of(world, step, part)).backward()
            for buffer, parameter in zip(sums, plain.parameters()):
                buffer += parameter.grad * share(part) * ranks(world.rank)
                parameter.grad = None
        for buffer, parameter in zip(sums, plain.parameters()):
            if world.size > 1:
                dist.all_reduce(buffer)
            parameter.grad = buffer / world.size
        optimizer.step()
        optimizer.zero_grad()
    return weights(plain)


def drops_the_last_micro_batch(world):
    return engine(world, lambda part: float(part < PARTS - 1))


def counts_the_first_micro_batch_twice(world):
    return engine(world, lambda part: 2.0 if part == 0 else 1.0)


def divides_all_but_the_last_micro_batch(world):
    return engine(world, lambda part: 1.0 if part == PARTS - 1 else 1.0 / PARTS)


def scales(world, *, unscales):
    plain, model = model_of(world)
    optimizer = torch.optim.Adam(plain.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for step in range(STEPS):
        optimizer.zero_grad()
        scaler.scale(loss_of(model, rows_of(world, step, 0))).backward()
        if unscales:
            scaler.step(optimizer)
            scaler.update()
        else:
            optimizer.step()
    return weights(plain)


def forgets_to_unscale(world):
    return scales(world, unscales=False)


@pytest.mark.parametrize(
    ("loop", "message"),
    [
        (clears_before_each_micro_batch, r"lacks backward pass 1 and backward pass 2, at step 0: .*zero_grad"),
        (never_clears, "still contains the gradient of the step before"),
        (never_clears_and_clips, "still contains the gradient of the step before"),
        (clips_each_micro_batch_and_clears_it, "lacks backward pass 1 and backward pass 2, at step 0: .*zero_grad"),
        (clips_each_micro_batch_and_never_clears, "still contains the gradient of the step before"),
        (clears_before_the_step, "lacks every backward pass"),
        (drops_the_last_micro_batch, "lacks backward pass 3"),
        (counts_the_first_micro_batch_twice, "counts backward pass 1 twice"),
        (divides_all_but_the_last_micro_batch, "counts backward pass 1 and backward pass 2 1/3 times"),
        (forgets_to_unscale, r"1024 times .*not unscaled"),
    ],
)
def test_a_mistake_that_every_world_size_makes_alike_fails(loop, message):
    with pytest.raises(TrainingDiffers, match=message):
        check_training(loop, world_sizes=(1, 2))


def ascends_first(world):
    """Sharpness-aware: a first gradient moves the weights, and is cleared."""
    plain, model = model_of(world)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for step in range(STEPS):
        loss_of(model, rows_of(world, step, 0)).backward()
        moves = [0.05 * p.grad for p in plain.parameters()]
        for sign in (1, -1):
            for parameter, move in zip(plain.parameters(), moves):
                parameter.data.add_(move, alpha=sign)
            if sign == 1:
                optimizer.zero_grad()
                loss_of(model, rows_of(world, step, 0)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return weights(plain)


def trains_two_players(world):
    """The generator's backward gives the discriminator gradients, too, which are cleared before its own."""
    torch.manual_seed(0)
    players = [nn.Linear(3, 3).double(), nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()]
    first, second = (DistributedDataParallel(p) if world.size > 1 else p for p in players)
    optimizer = torch.optim.Adam([p for player in players for p in player.parameters()], lr=0.01)
    for step in range(STEPS):
        inputs, _ = rows_of(world, step, 0)
        (-second(first(inputs)).square().mean()).backward()
        players[1].zero_grad()
        for part in range(2):
            second(rows_of(world, step, part).__next__()).square().mean().backward()
        for parameter in players[0].parameters():
            parameter.grad *= 0.5
        optimizer.step()
        optimizer.zero_grad()
    return {
        f"{number} {name}": p.detach() for number, player in enumerate(players) for name, p in player.named_parameters()
    }


def spares_the_last_layer(world):
    return accumulates(
        world, before_step=lambda optimizer: setattr(optimizer.param_groups[0]["params"][-1], "grad", None)
    )


def warms_up(world):
    plain, model = model_of(world)
    loss_of(model, rows_of(world, 0, 0)).backward()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, rows_of(world, step, 1)).backward()
        optimizer.step()
    return weights(plain)


def clips_by_hand(world):
    def clip(optimizer):
        gradients = [p.grad for p in optimizer.param_groups[0]["params"]]
        norm = sum(float(g.square().sum()) for g in gradients) ** 0.5
        torch._foreach_mul_(gradients, 0.1 / norm)

    return accumulates(world, before_step=clip)


def adds_decay_by_hand(world):
    def decay(optimizer):
        for parameter in optimizer.param_groups[0]["params"]:
            parameter.grad += 0.01 * parameter.detach()

    return accumulates(world, before_step=decay)


def unscales(world):
    return scales(world, unscales=True)


def takes_an_engine(world):
    return engine(world)


def searches_a_line(world):
    plain, model = model_of(world)
    optimizer = torch.optim.LBFGS(plain.parameters(), lr=0.1, max_iter=2)
    for step in range(STEPS):

        def closure(step=step):
            optimizer.zero_grad()
            loss = loss_of(model, rows_of(world, step, 0))
            loss.backward()
            if world.size > 1:
                loss = loss.detach().clone()
                dist.all_reduce(loss)
                loss /= world.size
            return loss

        optimizer.step(closure)
    return weights(plain)


@pytest.mark.parametrize(
    "loop",
    [
        accumulates,
        ascends_first,
        trains_two_players,
        spares_the_last_layer,
        warms_up,
        clips_by_hand,
        adds_decay_by_hand,
        unscales,
        takes_an_engine,
        searches_a_line,
        clips_each_micro_batch,
        seldom_clips_each_micro_batch,
        clips_micro_batches_that_it_adds_up,
    ],
)
def test_a_right_loop_is_not_accused(loop):
    check_training(loop, world_sizes=(1, 2))


def test_micro_batches_that_each_rank_clips_by_its_own_norm_fail():
    with pytest.raises(TrainingDiffers, match="gradients are clipped on a local norm"):
        check_training(clips_each_micro_batch_by_the_norm_of_a_rank, world_sizes=(1, 2))


def measures(world, clear=(0, 1)):
    """A first backward pass is for the size of its gradient alone."""
    sizes = []

    def read(optimizer):
        sizes.append(sum(p.grad.square().sum() for p in optimizer.param_groups[0]["params"]))

    return accumulates(world, clear=clear, before_step=read)


def measures_and_drops(world):
    return engine(world, lambda part: float(part < PARTS - 1))


def test_gradients_that_are_measured_and_cleared_are_accepted_by_name():
    with pytest.raises(TrainingDiffers, match="lacks backward pass 1, .*`--accept measured-gradients` leaves it out"):
        check_training(measures, world_sizes=(1, 2))
    check_training(measures, world_sizes=(1, 2), accept=["measured-gradients"])


@pytest.mark.parametrize(
    ("loop", "message"),
    [
        (measures_and_drops, "lacks backward pass 3"),
        (never_clears, "gradient of the step before"),
        (clears_before_the_step, "lacks every backward pass"),
    ],
)
def test_other_mistakes_fail_though_measured_gradients_are_accepted(loop, message):
    with pytest.raises(TrainingDiffers, match=message):
        check_training(loop, world_sizes=(2,), accept=["measured-gradients"])


@pytest.mark.parametrize(("off", "wrong"), [(1.0, False), (1 - 1e-3, False), (0.5, True)])
def test_roundings_of_an_engine_in_low_precision_are_no_wrong_division(off, wrong):
    """A factor of 0.999, fitted to gradients in bfloat16, failed what is right."""
    terms = [[{"weight": torch.full((4,), 1.0 + rank)}] for rank in range(2)]
    got = {"weight": torch.full((4,), 1.5 * off)}
    sample = SimpleNamespace(scale=1.0, engine=True, unscales=False)
    step = control._Step(0, 1, got, terms, {"weight": 0.02}, sample, ())
    assert bool(control._wrong(step, 2, None)[0]) is wrong


def test_an_unknown_name_is_refused():
    with pytest.raises(InvalidArgument, match="expected some of .*measured-gradients, got 'measured'"):
        check_training(measures, accept=["measured"])


def test_one_world_is_enough_to_see_a_micro_batch_that_is_lost():
    with pytest.raises(TrainingDiffers, match="lacks backward pass 3"):
        check_training(drops_the_last_micro_batch, world_sizes=(1,))


def test_what_was_compared_with_autograd_is_listed_with_the_verdict(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    launch = Launch(str(SCRIPTS / "with_ddp.py"), ("--accumulate", "2"), steps=2, isolation="warm")
    (judgement,) = examine(launch, (2,)).judgements
    words = "the stepped gradient is the mean over ranks of the sum of 2 backward passes (at step 0)"
    assert any(words in line for line in judgement.compared), str(judgement)
