"""When units gather and free where forwards take another way, give inputs back or change them; traces are in behaviours."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from fsdp_ref import FullyShardedDataParallel, ShardingStrategy, fully_shard
from fsdp_ref.annotations import units_under
from fsdp_ref.runtime.events import UnitEventKind, observe
from fsdp_ref.wrap import ModuleWrapPolicy


class Unit(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 4)

    def forward(self, x):
        return torch.relu(self.lin(x))


class Tracer:
    """Writes U, R and R(k) with the unit's number, as the literature does."""

    def __init__(self, model) -> None:
        self.numbers = {unit.name: index for index, (_, _, unit) in enumerate(units_under(model))}
        self.events: list[str] = []

    def event(self, event) -> None:
        # A unit's number is known by its parameters: names exist only once a root does.
        if event.kind is UnitEventKind.UNSHARD:
            self.events.append(f"U{self.number(event)}")
        if event.kind is UnitEventKind.RESHARD:
            self.events.append(f"R{self.number(event)}{'' if event.freed else '(k)'}")

    def number(self, event) -> int:
        return ["", "a", "b", "c"].index(event.unit)

    def take(self) -> str:
        events, self.events = " ".join(self.events), []
        return events


def trace(model, watch_collectives, iterations=3):
    tracer, result = Tracer(model), []
    with observe(tracer.event), watch_collectives() as calls:
        for _ in range(iterations):
            loss = model(torch.randn(2, 4)).sum()
            forward = tracer.take()
            loss.backward()
            result.append((forward, tracer.take()))
    return result, [f"{call.op} {call.unit}" for call in calls]


class Again(nn.Module):
    """Calls its units in the order asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = Unit(), Unit(), Unit()

    def forward(self, x, names):
        for name in names:
            x = getattr(self, name)(x)
        return x


@pytest.mark.parametrize("explicit", [False, True])
@pytest.mark.parametrize("api", ["orig", "composable"])
@pytest.mark.world(2)
def test_a_pass_that_went_another_way_gathers_nothing_ahead(world, api, explicit, watch_collectives):
    """Its third unit is the one that came third before; what followed then does not follow now."""
    model, policy = Again(), ModuleWrapPolicy({Unit})
    if api == "composable":
        model = fully_shard(model, policy=policy, forward_prefetch=explicit)
    else:
        model = FullyShardedDataParallel(
            model, auto_wrap_policy=policy, use_orig_params=True, forward_prefetch=explicit
        )
    x = torch.randn(2, 4)
    model(x, "abca").sum().backward()
    model(x, "abca").sum().backward()
    with watch_collectives() as calls:
        model(x, "bac").sum()
    assert [call.unit for call in calls if call.op == "all_gather"] == ["b", "a", "c"]


class GivesBack(Unit):
    """Returns what it took beside what it made of it."""

    def forward(self, x):
        return x, super().forward(x)


class Sums(nn.Module):
    def __init__(self, *, frozen: bool) -> None:
        super().__init__()
        self.inp = nn.Linear(4, 4)
        self.a = GivesBack()
        self.a.requires_grad_(not frozen)

    def forward(self, x):
        taken, made = self.a(self.inp(x))
        return taken + made


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP"])
@pytest.mark.parametrize("api", ["orig", "composable"])
@pytest.mark.world(2)
def test_an_input_given_back_gathers_nothing(world, api, strategy, frozen, watch_collectives):
    torch.manual_seed(0)
    options = {"policy": ModuleWrapPolicy({Unit})}
    if api == "composable":
        model = fully_shard(Sums(frozen=frozen), strategy=ShardingStrategy[strategy], **options)
    else:
        model = FullyShardedDataParallel(
            Sums(frozen=frozen),
            auto_wrap_policy=options["policy"],
            sharding_strategy=ShardingStrategy[strategy],
            use_orig_params=True,
        )
    for _, backward in trace(model, watch_collectives)[0]:
        events = backward.split()
        assert events.count("U1") == 1, backward
        assert events[-1] == "R0" and events.index("R1") < len(events) - 1, backward


class ChangesItsInput(nn.Module):
    """Returns what it took, and it is another tensor by then: its gradient comes before the unit's backward."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.ones(4))

    def forward(self, x):
        return x.add_(self.shift)  # saves nothing that backward could ask for


class Changed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inp = nn.Linear(4, 4)
        self.a = ChangesItsInput()

    def forward(self, x):
        return self.a(self.inp(x))


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP"])
@pytest.mark.world(2)
def test_an_input_changed_in_place_begins_the_backward(world, strategy):
    torch.manual_seed(0)
    plain = Changed().double()
    sharded = FullyShardedDataParallel(
        copy.deepcopy(plain),
        auto_wrap_policy=ModuleWrapPolicy({ChangesItsInput}),
        sharding_strategy=ShardingStrategy[strategy],
        use_orig_params=True,
    )
    x = torch.randn(2, 4, dtype=torch.float64)
    kinds: list[UnitEventKind] = []
    for model in (plain, sharded):
        with observe(lambda event: kinds.append(event.kind) if event.unit == "a" else None):
            model(x.clone()).sum().backward()
    assert kinds.count(UnitEventKind.PRE_BACKWARD) == 1
    with FullyShardedDataParallel.summon_full_params(sharded, with_grads=True):
        for (name, param), (_, expected) in zip(sharded.named_parameters(), plain.named_parameters()):
            torch.testing.assert_close(param.grad, expected.grad, rtol=1e-13, atol=1e-14, msg=name)


class HandsOnLeaves(nn.Module):
    """Returns the very prompt that it took, one that it keeps, and what it made of both."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 4)
        self.kept = [torch.ones(4, dtype=torch.float64, requires_grad=True)]

    def forward(self, prompt):
        return prompt, self.kept[0], self.lin(prompt + self.kept[0])


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP"])
@pytest.mark.world(2)
def test_leaves_handed_on_collect_no_hooks(world, strategy):
    torch.manual_seed(0)
    prompt = torch.randn(2, 4, dtype=torch.float64)
    plain = HandsOnLeaves().double()
    sharded = FullyShardedDataParallel(
        copy.deepcopy(plain), sharding_strategy=ShardingStrategy[strategy], use_orig_params=True
    )
    gradients = []
    for model in (plain, sharded):
        leaves = prompt.clone().requires_grad_(), model.kept[0] if model is plain else model.module.kept[0]
        for _ in range(3):
            sum(part.sum() for part in model(leaves[0])).backward()
        gradients.append([leaf.grad for leaf in leaves])
        assert all(not leaf._backward_hooks for leaf in leaves)
    torch.testing.assert_close(gradients[1], gradients[0])
    with FullyShardedDataParallel.summon_full_params(sharded, with_grads=True):
        torch.testing.assert_close(sharded.module.lin.weight.grad, plain.lin.weight.grad)
