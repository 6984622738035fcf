"""A sharded model trains as one process does on all ranks' data, whatever the schedule of its passes."""

from __future__ import annotations

import pytest
import torch
from torch import nn


class Boom(Exception):
    """Raised by a test inside user code."""


@pytest.mark.covers("STRAT-01", "STRAT-08", "HYB-12")
@pytest.mark.world([2, 3])
def test_steps_match(trial, api, strategy):
    trial(api, strategy).train(4)


@pytest.mark.covers("ACC-03", "ACC-06", "ACC-07", "B002", "RED-04", "RED-07")
@pytest.mark.parametrize("schedule", ["ns", "nns", "sns", "ss", "nsns", "snns"])
@pytest.mark.world(2)
def test_accumulation_equals_one_large_batch(trial, api, strategy, schedule):
    """``n`` is a backward inside no_sync, ``s`` one outside."""
    case = trial(api, strategy)
    for step in range(2):
        case.zero_grad()
        for index, kind in enumerate(schedule):
            xs = case.inputs(10 * step + index)
            case.plain_loss(xs).backward()
            with case.no_sync(kind == "n"):
                case.loss(xs).backward()
        case.step()
        case.compare()


@pytest.mark.covers("B026", "B135", "B159", "RUN-01")
@pytest.mark.parametrize("order", ["first", "second", "together"])
@pytest.mark.world(2)
def test_several_forwards_before_backward(trial, api, strategy, order):
    case = trial(api, strategy)
    for step in range(3):
        case.zero_grad()
        one, two = case.inputs(step), case.inputs(100 + step)
        (case.plain_loss(one) + case.plain_loss(two, lambda y: y.pow(3).mean())).backward()
        a, b = case.loss(one), case.loss(two, lambda y: y.pow(3).mean())
        for loss in {"first": [a, b], "second": [b, a], "together": [a + b]}[order]:
            loss.backward()
        case.step()
        case.compare()


@pytest.mark.covers("RUN-02", "B026")
@pytest.mark.world(2)
def test_a_retained_graph_runs_backward_twice(trial, api, strategy):
    case = trial(api, strategy)
    xs = case.inputs(1)
    (2 * case.plain_loss(xs)).backward()
    loss = case.loss(xs)
    loss.backward(retain_graph=True)
    loss.backward()
    case.step()
    case.compare()


@pytest.mark.covers("RUN-03", "RUN-09", "B042", "ORIG-19")
@pytest.mark.world(2)
def test_dropped_forwards_and_evaluation_in_between(trial, api, strategy):
    case = trial(api, strategy)
    for step in range(3):
        xs, other = case.inputs(step), case.inputs(50 + step)
        mine = other[case.world.rank]
        case.model(mine)
        with torch.no_grad():
            torch.testing.assert_close(case.model(mine), case.plain(mine), rtol=1e-12, atol=1e-12)
        case.model.eval()
        case.model(mine)
        case.model.train()
        case.zero_grad(set_to_none=step % 2 == 0)
        case.plain_loss(xs).backward()
        case.loss(xs).backward()
        case.model(mine)
        case.step()
        torch.testing.assert_close(case.model(mine), case.plain(mine), rtol=1e-12, atol=1e-12)
        case.compare()


@pytest.mark.covers("RUN-11")
@pytest.mark.world(2)
def test_a_user_exception_leaves_the_model_usable(trial, api, strategy):
    case = trial(api, strategy)

    def boom(*_):
        raise Boom

    def in_forward():
        hook = case.blocks()[1].up.register_forward_hook(boom)
        with pytest.raises(Boom):
            case.model(case.inputs(9)[case.world.rank])
        hook.remove()

    def in_backward():
        hook = case.blocks()[1].up.register_forward_hook(lambda module, args, out: out.register_hook(boom) and None)
        with pytest.raises(Boom):
            case.loss(case.inputs(9)).backward()
        hook.remove()

    def in_no_sync():
        with pytest.raises(Boom), case.no_sync():
            raise Boom

    for fail in (in_forward, in_backward, in_no_sync):
        fail()
        case.train(1)


class Awkward(nn.Module):
    """Blocks called repeatedly, one call without gradients, scalars, an empty and an unused parameter, containers."""

    def __init__(self, block: type[nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([block(6), block(6)])
        self.tail = nn.Linear(6, 3)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.empty = nn.Parameter(torch.empty(0))
        self.unused = nn.Parameter(torch.ones(3))
        self.cache = torch.empty(0)

    def forward(self, x):
        x = self.blocks[0](x)
        x = self.blocks[1](x)
        x = self.blocks[0](x)
        self.cache = x
        with torch.no_grad():
            x = x + self.blocks[1](x)
        return {"y": [self.tail(x) * self.scale], "nothing": None}


@pytest.mark.covers("B036", "FRZ-04", "FRZ-10", "B079", "ORIG-09", "IO-02", "IO-04", "ACC-03")
@pytest.mark.world([2, 3])
def test_repeated_calls_scalars_and_unused_parameters(trial, api, strategy):
    case = trial(api, strategy, model=lambda: Awkward(trial.__globals__["Block"]))
    for step in range(3):
        case.zero_grad()
        case.both_backward(step, lambda out: out["y"][0].pow(2).mean())
        for param in case.plain.parameters():
            # A parameter that shares its flat parameter with a used one gets zeros and not None.
            param.grad = torch.zeros_like(param) if param.grad is None else param.grad
        case.step()
        case.compare()


@pytest.mark.covers("B048", "B131")
@pytest.mark.world(2)
def test_a_loss_from_a_cached_intermediate(trial, api, strategy):
    case = trial(api, strategy, model=lambda: Awkward(trial.__globals__["Block"]))
    for step in range(2):
        case.zero_grad()
        xs = case.inputs(step)
        for x in xs:
            case.plain(x)
            (case.plain.cache.pow(2).mean() / case.world.size).backward()
        case.model(xs[case.world.rank])
        case.inner().cache.pow(2).mean().backward()
        case.step()
        case.compare()


class ViewBlock(nn.Linear):
    """Returns a view, which callers change in place."""

    def __init__(self) -> None:
        super().__init__(6, 6)

    def forward(self, x):
        return super().forward(torch.tanh(x)).view(-1, 6)


class InPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(ViewBlock() for _ in range(3))

    def forward(self, x):
        for block in self.blocks:
            y = block(x)
            y += x
            x = y
        return x


@pytest.mark.covers("B047", "B132")
@pytest.mark.world(2)
def test_a_view_output_changed_in_place(trial, api, strategy):
    from fsdp_ref.wrap import ModuleWrapPolicy

    trial(api, strategy, model=InPlace, policy=ModuleWrapPolicy({ViewBlock})).train(2)


@pytest.mark.covers("B137", "RED-05")
@pytest.mark.world(2)
def test_second_order_gradients(trial, strategy):
    """A penalty on input gradients is right; gradients of parameter gradients are refused."""
    case = trial("orig", strategy)
    xs = case.inputs(0)

    def penalty(model, x):
        x = x.clone().requires_grad_()
        (grad,) = torch.autograd.grad(model(x).pow(3).sum(), x, create_graph=True)
        return grad.pow(2).mean()

    (sum(penalty(case.plain, x) for x in xs) / case.world.size).backward()
    penalty(case.model, xs[case.world.rank]).backward()
    case.step()
    case.compare()
    with pytest.raises(RuntimeError, match="FSDP does not support gradients of gradients"):
        case.loss(xs).backward(create_graph=True)
    case.zero_grad()
    case.train(1)
