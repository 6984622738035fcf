"""What roundings may do to a loop: right loops in every dtype pass on every world size, and mistakes in the same loops do not."""

from __future__ import annotations

import functools
import re

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.parallel import DistributedDataParallel

from fsdp_testing import check_training
from fsdp_testing.base.compat import each_operation
from fsdp_testing.train.comparison import Decided, beyond_roundings
from fsdp_testing.train.disturbance import disturbed
from fsdp_testing.train.function import TrainingDiffers, TrainingPartlyUndecided, TrainingUndecided
from fsdp_testing.train.quantities import Kind, Quantity

ROWS, STEPS = 6, 2
A, COARSE, RIGHT = (Quantity(Kind.RETURNED, name) for name in ("a", "coarse", "right"))
OPTIMIZERS = {
    "sgd": functools.partial(torch.optim.SGD, lr=0.05),
    "momentum": functools.partial(torch.optim.SGD, lr=0.05, momentum=0.9),
    "adamw": functools.partial(torch.optim.AdamW, lr=1e-3),
}
DTYPES = {"autocast": torch.float32, "bfloat16": torch.bfloat16, "float32": torch.float32, "float64": torch.float64}


class Attention(nn.Module):
    """A block whose key bias has a gradient of zero but for roundings, which AdamW makes a step of full length."""

    def __init__(self):
        super().__init__()
        self.inside, self.norm = nn.Linear(6, 8), nn.LayerNorm(8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.outside = nn.Linear(8, 3)

    def forward(self, x):
        x = self.inside(x)
        y = self.norm(x)
        return self.outside(x + self.attention(y, y, y, need_weights=False)[0])


MODELS = {
    "mlp": lambda: nn.Sequential(nn.Linear(6, 32), nn.GELU(), nn.Linear(32, 3)),
    "deep": lambda: nn.Sequential(*[nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(4)], nn.Linear(6, 3)),
    "attention": Attention,
}


def train(world, model, optimizer, numbers, mistake):
    torch.manual_seed(0)
    plain = MODELS[model]().to(DTYPES[numbers])
    parallel = DistributedDataParallel(plain) if world.size > 1 and mistake != "unreduced" else plain
    stepping = OPTIMIZERS[optimizer](plain.parameters())
    losses, norms = [], []
    for step in range(STEPS):
        draw = torch.Generator().manual_seed(step)
        inputs = torch.randn(ROWS, 4, 6, generator=draw)[world.rank :: world.size].to(DTYPES[numbers])
        targets = torch.randn(ROWS, 4, 3, generator=draw)[world.rank :: world.size].to(DTYPES[numbers])
        stepping.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=numbers == "autocast"):
            loss = nn.functional.mse_loss(parallel(inputs).to(DTYPES[numbers]), targets)
        factor = {"twice": 1 / world.size, "slightly": 1 + (world.size - 1) / 256}.get(mistake, 1)
        (loss * factor).backward()
        norms.append(nn.utils.clip_grad_norm_(plain.parameters(), 1e9))
        loss = loss.detach()
        dist.all_reduce(loss)
        losses.append(loss / world.size)
        stepping.step()
    return {"loss": losses, "norm": norms, **{name: p.detach() for name, p in plain.named_parameters()}}


def loop_of(model, optimizer, numbers, mistake="none"):
    """Return a loop that ranks find by its name in this file: the name holds its settings."""
    name = f"{model}__{optimizer}__{numbers}__{mistake}"
    if name not in globals():
        globals()[name] = __getattr__(name)
    return globals()[name]


def __getattr__(name):
    if name.count("__") != 3 or name.startswith("_"):
        raise AttributeError(name)
    model, optimizer, numbers, mistake = name.split("__")

    def loop(world):
        return train(world, model, optimizer, numbers, mistake)

    loop.__name__ = loop.__qualname__ = name
    return loop


@pytest.mark.parametrize(
    ("model", "optimizer", "numbers", "sizes"),
    [
        ("mlp", "sgd", "autocast", (1, 2)),
        ("mlp", "adamw", "autocast", (1, 3)),
        ("deep", "momentum", "autocast", (1, 2)),
        ("mlp", "momentum", "bfloat16", (1, 2)),
        ("attention", "adamw", "float64", (1, 2)),
        ("deep", "sgd", "float32", (1, 2, 3)),
        ("mlp", "adamw", "float32", (1, 2, 3)),
    ],
)
def test_a_right_loop_passes_in_every_dtype(model, optimizer, numbers, sizes):
    check_training(loop_of(model, optimizer, numbers), world_sizes=sizes)


@pytest.mark.parametrize(
    ("model", "optimizer", "numbers", "mistake", "message"),
    [
        (
            "mlp",
            "sgd",
            "autocast",
            "twice",
            r"norm at step \d .*divided by the number of ranks once too often.*At step 0 .*exactly 1/2",
        ),
        (
            "mlp",
            "sgd",
            "autocast",
            "slightly",
            "This shows in float32; roundings of low precision hide it",
        ),
        ("mlp", "momentum", "bfloat16", "twice", "norm at step 0 .*exactly 1/2"),
        ("deep", "adamw", "float32", "twice", "norm at step 0 .*exactly 1/2"),
        ("mlp", "adamw", "autocast", "unreduced", "rank 1 .*gradients are not reduced"),
    ],
)
def test_a_mistake_in_the_same_loop_does_not(model, optimizer, numbers, mistake, message):
    with pytest.raises(TrainingDiffers) as caught:
        check_training(loop_of(model, optimizer, numbers, mistake), world_sizes=(1, 2))
    assert re.search(message, str(caught.value)), str(caught.value)


def amplifies(world):
    """A sum over ranks rounds in the order of ranks; 60 steps of a chaotic map make that roundings of full size."""
    numbers = torch.linspace(0.01, 0.03, 12)[world.rank :: world.size].sum()
    dist.all_reduce(numbers)
    chaos = numbers.repeat(4)
    for _ in range(60):
        chaos = 3.99 * chaos * (1 - chaos)
    return {"chaos": chaos}


def amplifies_a_part(world):
    return {"weight": torch.cat([amplifies(world)["chaos"], torch.linspace(0, 1, 5)])}


def amplifies_one_of_two(world):
    return {**amplifies(world), "weight": torch.linspace(0, 1, 5)}


def test_numbers_that_roundings_alone_move_are_named_and_the_rest_is_judged():
    with pytest.warns(TrainingPartlyUndecided, match=r"4 of 9 numbers of weight, .* no verdict; the rest agrees"):
        check_training(amplifies_a_part, world_sizes=(1, 2))


def test_a_quantity_of_which_nothing_is_decided_is_no_pass_whatever_stands_beside_it():
    with pytest.raises(TrainingUndecided, match=r"4 of 4 numbers of chaos, .* Roundings decide most of chaos"):
        check_training(amplifies_one_of_two, world_sizes=(1, 2))


def test_where_roundings_decide_everything_there_is_no_verdict():
    with pytest.raises(TrainingUndecided, match=r"rounding alone moves .* chaos, off by .* the loop cannot be judged"):
        check_training(amplifies, world_sizes=(1, 2))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_a_disturbance_is_one_or_two_units_in_the_last_place(dtype):
    numbers = torch.linspace(-3, 3, 64).to(dtype)
    with disturbed(1):
        moved, copied, counted, place = numbers * 1, numbers.clone(), torch.arange(3) + 1, numbers.clone().add_(0)
        whole = torch.zeros(8, dtype=dtype) + 0
    for changed in (moved, place):
        distance = (changed.double() - numbers.double()).abs() / (torch.finfo(dtype).eps * numbers.double().abs())
        assert 0 < distance.max() <= 2
        assert 0.2 < (distance == 0).double().mean() < 0.5
    assert torch.equal(copied, numbers)
    assert counted.tolist() == [1, 2, 3]
    assert not whole.any()


def test_a_disturbance_reaches_backward_and_leaves_the_generator_of_the_program():
    weight = torch.ones(16, requires_grad=True)
    before = torch.get_rng_state()
    with disturbed(1):
        (weight.sin() * 3).sum().backward()
    assert not torch.equal(weight.grad, torch.ones(16).cos() * 3)
    assert torch.equal(torch.get_rng_state(), before)
    with disturbed(2):
        (weight.sin() * 3).sum().backward()
    assert len(set(weight.grad.tolist())) > 2


def test_shapes_that_dtensor_asks_of_fakes_are_no_operations():
    """Seen with FSDP2 in a process that had sharded nothing before: DTensor computes the shape of a first result with fakes."""
    seen = []
    with each_operation(lambda name, inputs, results: seen.append(name)):
        with FakeTensorMode() as fakes:
            assert fakes.from_tensor(torch.ones(2, 3)).detach().t().shape == (3, 2)
        seen.clear()
        torch.ones(2).neg()
    assert seen == ["aten.ones.default", "aten.neg.default"]


def test_a_number_that_stays_where_it_is_by_chance_beside_others_is_no_bound():
    reference, other = {A: [torch.tensor([1.0, 1.0])]}, {A: [torch.tensor([1.01, 1.0])]}

    def pairs(seed):  # the first number moves in the third run only
        moved = torch.tensor([1.01 if seed == 3 else 1.0, 1.001])
        return [(reference, {A: [moved]})]

    assert beyond_roundings(reference, other, 4096, pairs, Decided()) is None

    def squares(
        seed,
    ):  # the first two runs move the number to its negative, whose square is the same but for its own rounding
        return [(reference, {A: [torch.tensor([1.01 if seed == 3 else 1.0000001, 1.001])]})]

    assert beyond_roundings(reference, other, 4096, squares, Decided()) is None
    never = beyond_roundings(
        reference, other, 4096, lambda _: [(reference, {A: [torch.tensor([1.0, 1.001])]})], Decided()
    )
    assert "off by 0.01" in str(never)
    exact = beyond_roundings(
        reference, other, 4096, lambda seed: [(reference, reference)] if seed == 1 else 1 / 0, Decided()
    )
    assert "off by 0.01" in str(exact)  # nothing is rounded there: one run says so


def test_quantities_of_another_shape_in_the_world_are_a_difference_and_no_bound():
    rates, fewer = {RIGHT: [torch.tensor([0.1, 0.2])]}, {RIGHT: [torch.tensor([0.1])]}
    reference, other = {A: [torch.tensor([1.0])], **rates}, {A: [torch.tensor([1.01])], **fewer}

    def pairs(seed):
        return [(reference, {A: [torch.tensor([1.1])], **rates}), (other, {A: [torch.tensor([1.2])], **fewer})]

    difference = beyond_roundings(reference, other, 4096, pairs, Decided())
    assert str(difference) == f"{RIGHT} is torch.float32[1], expected torch.float32[2]"


def test_a_matrix_of_garbage_is_not_outvoted_by_one_that_is_right():
    draw = torch.Generator().manual_seed(0)
    garbage = [torch.randn(4, 4, generator=draw).bfloat16() for _ in range(4)]
    right = torch.randn(4, 5, generator=draw)

    def quantities(number):
        return {COARSE: [garbage[number]], RIGHT: [right]}

    decided = Decided()
    pairs = [(quantities(0), quantities(2)), (quantities(1), quantities(3))]
    assert beyond_roundings(quantities(0), quantities(1), 8, lambda _: pairs, decided) is None
    assert decided.unknown == [COARSE]
    assert not decided.enough
    decided.excused.add(COARSE)
    assert decided.enough


def test_most_numbers_of_one_step_may_be_undecided_where_those_of_all_steps_are_not():
    right, left, other = (torch.tensor(numbers) for numbers in ([1.0, 2.0, 3.0], [1.0, 2.0, 3.0], [1.5, 2.5, 3.0]))
    reference, run = {A: [right, right, left]}, {A: [right, right, other]}
    decided = Decided()
    moved = {A: [right, right, left + 0.2]}
    assert beyond_roundings(reference, run, 8, lambda _: [(reference, moved)], decided) is None
    assert decided.enough and decided.mostly == {(A, 2)}
    decided.excuse_zeros(A)
    assert A not in decided.excused, "they are not zero"


def test_what_roundings_move_by_more_than_it_is_may_be_zero():
    reference, run, moved = ({A: [torch.tensor([number])], RIGHT: [torch.ones(1)]} for number in (1e-8, -1e-8, 5e-8))
    decided = Decided()
    assert beyond_roundings(reference, run, 8, lambda _: [(reference, moved)], decided) is None
    assert decided.unknown == [A] and decided.open
    decided.excuse_zeros(A)
    assert decided.enough and not decided.open


def test_a_weight_is_decided_by_how_far_it_was_moved():
    start, reference = torch.full((3,), 1.0), torch.full((3,), 1.0 + 2e-6)
    other = torch.full((3,), 1.0 + 4e-6)
    moved = {A: [reference + 1e-6]}
    for known, undecided in (({A: [start]}, [A]), (None, [])):
        decided = Decided()
        beyond = beyond_roundings(
            {A: [reference]}, {A: [other]}, 8, lambda _: [({A: [reference]}, moved)], decided, known
        )
        assert (beyond, decided.unknown) == (None, undecided)


def test_a_cast_is_disturbed_by_value_so_that_casting_twice_gives_the_same():
    numbers = torch.linspace(0.1, 1.0, 3001)
    with disturbed(1):
        whole, again, part = (each.bfloat16() for each in (numbers, numbers, numbers[1000:]))
    with disturbed(2):
        other = numbers.bfloat16()
    assert torch.equal(whole, again)
    assert torch.equal(whole[1000:], part)
    exact, moved = numbers.bfloat16().double(), whole.double()
    signs = (moved - exact).sign()
    assert all(0.2 < (signs == sign).double().mean() < 0.47 for sign in (-1, 0, 1))
    assert not torch.equal(whole, other)
    assert (whole != other).double().mean() > 0.5


def test_numbers_of_sparse_gradients_are_disturbed():
    table = torch.ones(5, 3, requires_grad=True)

    def gradient():
        table.grad = None
        nn.functional.embedding(torch.tensor([1, 1, 4]), table, sparse=True).mul(0.1).sum().backward()
        dense = table.grad.coalesce().to_dense()
        return dense.add(table.grad)

    exact = gradient()
    with disturbed(1):
        moved = gradient()
    assert not torch.equal(exact, moved)
    torch.testing.assert_close(exact, moved, rtol=1e-6, atol=0)
