"""What an exception leaves open when torch runs no hook after it, and what runs inside something else."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch import nn

from fsdp_ref import compat
from fsdp_ref.annotations import units_under
from fsdp_ref.states import UnitState
from fsdp_ref.wrap import ModuleWrapPolicy


def units(model):
    return [unit for _, _, unit in units_under(model)]


@contextlib.contextmanager
def raising(module, error):
    """Let the forward of ``module`` end with ``error``."""

    def interrupt(*_):
        raise error

    hook = module.register_forward_pre_hook(interrupt)
    try:
        yield
    finally:
        hook.remove()


@pytest.mark.world(2)
def test_training_goes_on_after_ctrl_c_in_forward(trial, api, strategy):
    case = trial(api, strategy)
    case.train(1)
    for where in (case.blocks()[1].up, case.inner().out):
        with raising(where, KeyboardInterrupt()), pytest.raises(KeyboardInterrupt):
            case.loss(case.inputs(0))
        case.train(2, seed=3)
        assert compat.saved_tensor_hooks() is None
        assert not any(unit.root.calls for unit in units(case.model))


@pytest.mark.world(2)
def test_after_ctrl_c_in_forward_parameters_can_be_summoned_saved_and_clipped(trial, api):
    case = trial(api, "FULL_SHARD")
    with raising(case.blocks()[1].up, KeyboardInterrupt()), pytest.raises(KeyboardInterrupt):
        case.loss(case.inputs(0))
    case.compare()
    with raising(case.blocks()[1].up, KeyboardInterrupt()), pytest.raises(KeyboardInterrupt):
        case.loss(case.inputs(0))
    state = case.model.state_dict()
    assert {name: value.shape for name, value in state.items()} == {
        name: value.shape for name, value in case.plain.state_dict().items()
    }
    with case.no_sync():
        case.both_backward(0)


@pytest.mark.world(2)
def test_ctrl_c_in_a_forward_that_is_run_again(trial, api):
    from torch.utils.checkpoint import checkpoint

    case = trial(api, "FULL_SHARD")
    block = case.blocks()[1]
    case.train(1)
    x = case.inputs(0)[0].requires_grad_()
    loss = checkpoint(lambda x: case.model(x), x, use_reentrant=False).sum()
    with raising(block.down, KeyboardInterrupt()), pytest.raises(KeyboardInterrupt):
        loss.backward()
    case.train(2)


@pytest.mark.world(2)
def test_a_state_that_could_not_be_collected_leaves_nothing_summoned(trial, api):
    case = trial(api, "FULL_SHARD")
    case.train(1)

    def refuse(*_):
        raise ValueError("no state")

    for place in (case.blocks()[1], case.inner()):
        hook = place.register_state_dict_post_hook(refuse)
        for _ in range(2):
            with pytest.raises(ValueError, match="no state"):
                case.model.state_dict()
        hook.remove()
        case.train(2)
        with pytest.raises(RuntimeError):
            case.model.load_state_dict({})
        case.model.load_state_dict(case.model.state_dict())
        case.compare()


class Forces(nn.Module):
    """Differentiates inside its forward, between parameters of its own."""

    def __init__(self, block):
        super().__init__()
        self.inp = nn.Linear(6, 6)
        self.blocks = nn.ModuleList([block(6)])
        self.out = nn.Linear(6, 3)

    def forward(self, x):
        x = self.inp(x).detach().requires_grad_()
        energy = self.blocks[0](x).sum()
        (force,) = torch.autograd.grad(energy, x)
        return self.out(x + force)


@pytest.mark.world(2)
def test_a_backward_inside_a_forward_leaves_its_parameters(trial, api, strategy):
    case = trial(api, strategy, lambda: Forces(trial.__globals__["Block"]))
    case.train(2)


@pytest.mark.world(2)
def test_an_early_gather_takes_the_parameters_of_now(trial, strategy):
    case = trial("orig", strategy)
    case.train(1)
    case.loss(case.inputs(0))  # no backward: what is gathered stays
    for optimizer in (case.plain_optimizer, case.optimizer):
        for group in optimizer.param_groups:
            for param in group["params"]:
                param.grad = torch.ones_like(param)
    case.step()
    case.model._unshard()
    case.train(1)


@pytest.mark.world(2)
def test_a_graph_is_inspected_without_a_trace(trial, api):
    case = trial(api, "FULL_SHARD")
    case.train(1)
    out = case.model(case.inputs(0)[0])
    node = out.grad_fn
    while not any(name.startswith("_saved_mat2") for name in dir(node)):
        node = node.next_functions[-2][0] if len(node.next_functions) > 1 else node.next_functions[0][0]
    kept = node._saved_mat2
    assert kept.shape in {(6, 3), (3, 6)}
    assert [unit.state for unit in units(case.model)[1:]] == [UnitState.SHARDED] * 3
    out.sum().backward()


@pytest.mark.world(2)
def test_a_global_hook_that_raises_before_ours_leaves_open_calls_alone(trial):
    """A unit that calls itself: torch runs the hook after forward for a call whose hook before it never ran."""

    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin = nn.Linear(6, 6)
            self.inner = True

        def forward(self, x):
            if not self.inner:
                return self.lin(x)
            self.inner = False
            try:
                return self(x)
            except ValueError:
                return self.lin(x)  # full parameters are still there
            finally:
                self.inner = True

    def refuse(module, args):
        if isinstance(module, Twice) and not module.inner:
            raise ValueError("refused")

    t = trial("composable", "FULL_SHARD", lambda: nn.Sequential(Twice()), policy=ModuleWrapPolicy({Twice}))
    handle = torch.nn.modules.module.register_module_forward_pre_hook(refuse)
    try:
        t.train(2)
    finally:
        handle.remove()
    assert {unit.state for unit in units(t.model)} <= {UnitState.SHARDED, UnitState.UNSHARDED}
