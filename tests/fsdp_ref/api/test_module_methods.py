"""The newer arguments of ``fully_shard`` and the methods of modules, each beside torch's own FSDP2."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch import nn
from torch.distributed import fsdp as torchs
from torch.distributed.device_mesh import init_device_mesh

import fsdp_ref
from fsdp_ref import ShardingStrategy, unshard_params
from fsdp_ref.annotations import units_in
from fsdp_ref.api.module_methods import METHODS
from fsdp_ref.errors import ConfigError, ConfigTypeError, FsdpValueError, UnsupportedError
from fsdp_ref.runtime.events import UnitEventKind, observe

# Two ranks divide by two, which is exact; by another factor both round, in another order: 2 roundings of 2 ** -53 each.
CLOSE = {"rtol": 4 * 2.0**-53, "atol": 0.0}


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(4, 5), nn.Linear(5, 4)

    def forward(self, x):
        return x + self.down(self.up(x).tanh())


def net(dtype=torch.float64):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), Block(), Block(), Block(), nn.Linear(4, 1)).to(dtype)


class Subject:
    """A model that one of the two libraries sharded, each block a unit and the root around them."""

    def __init__(self, library, rank, dtype=torch.float64, **options):
        self.rank = rank
        self.ours = library is fsdp_ref
        self.model = net(dtype)
        self.dtype = dtype
        for block in self.model[1:4]:
            library.fully_shard(block, **options)
        library.fully_shard(self.model, **options)
        self.blocks = list(self.model[1:4])
        self.units = [self.model, *self.blocks]
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.5, momentum=0.5)

    def loss(self, step):
        x = torch.linspace(-1, 1, 6, dtype=self.dtype).reshape(2, 3) * (self.rank + 1) + step
        return self.model(x).square().mean()

    def backward(self, step):
        self.loss(step).backward()

    def step(self):
        self.optimizer.step()
        self.optimizer.zero_grad()

    def values(self):
        """Full parameters and full gradients."""
        if not self.ours:
            whole = [
                (p.full_tensor(), None if p.grad is None else p.grad.full_tensor()) for p in self.model.parameters()
            ]
            return [value.detach() for pair in whole for value in pair if value is not None]
        with unshard_params(self.model, with_grads=True):
            whole = [(p, p.grad) for p in self.model.parameters()]
            return [value.detach().clone() for pair in whole for value in pair if value is not None]


def trains(subject):
    for step in range(3):
        subject.backward(step)
        subject.step()
    subject.backward(4)


def accumulates(subject):
    for step in range(2):
        subject.model.set_requires_gradient_sync(False)
        subject.backward(2 * step)
        subject.model.set_requires_gradient_sync(True)
        subject.backward(2 * step + 1)
        subject.step()
    subject.backward(4)


def accumulates_in_one_unit(subject):
    subject.blocks[1].set_requires_gradient_sync(False, recurse=False)
    subject.backward(0)
    subject.blocks[1].set_requires_gradient_sync(True, recurse=False)
    subject.backward(1)


def gathers_ahead(subject):
    first, second, third = subject.blocks
    first.set_modules_to_forward_prefetch([second, third])
    third.set_modules_to_backward_prefetch([second, first])
    trains(subject)


def gathers_by_hand(subject):
    for step in range(2):
        subject.blocks[0].unshard()
        waits = [block.unshard(async_op=True) for block in subject.blocks[1:]]
        waits[0].wait()
        subject.backward(step)
        subject.step()
        subject.blocks[2].unshard()
        subject.blocks[2].reshard()
    subject.backward(4)


def divides_by_another_number(subject):
    for unit in subject.units:
        unit.set_gradient_divide_factor(3.0)
    subject.blocks[0].set_reduce_scatter_divide_factor(5.0)
    subject.blocks[1].set_gradient_divide_factor(1.0)
    subject.blocks[2].set_gradient_divide_factor(0.25)
    subject.backward(0)


def waits_later(subject):
    subject.model.set_is_last_backward(False)
    subject.backward(0)
    subject.model.set_is_last_backward(True)
    subject.backward(1)


def keeps_after_backward(subject):
    for step in range(2):
        subject.model.set_reshard_after_backward(False)
        subject.backward(2 * step)
        subject.model.set_reshard_after_backward(True)
        subject.backward(2 * step + 1)
        subject.step()
    subject.backward(4)


def changes_what_is_kept_after_forward(subject):
    subject.model.set_reshard_after_forward(False)
    trains(subject)
    subject.model.set_reshard_after_forward(True)
    trains(subject)


def leaves_all_reduce_alone(subject):
    subject.model.set_requires_all_reduce(False)
    subject.model.set_requires_all_reduce(True)
    trains(subject)


def together(world, program, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # torch's older name of the divide factor
        subjects = [Subject(library, world.rank, **options) for library in (fsdp_ref, torchs)]
        for subject in subjects:
            program(subject)
    return [subject.values() for subject in subjects]


@pytest.mark.world(2)
@pytest.mark.parametrize(
    "program",
    [
        trains,
        accumulates,
        accumulates_in_one_unit,
        gathers_ahead,
        gathers_by_hand,
        waits_later,
        keeps_after_backward,
        changes_what_is_kept_after_forward,
        leaves_all_reduce_alone,
        divides_by_another_number,
    ],
)
def test_methods_do_what_torchs_do(world, program):
    ours, theirs = together(world, program)
    assert len(ours) == len(theirs) == 2 * 16
    torch.testing.assert_close(ours, theirs, **CLOSE)


@pytest.mark.world(2)
@pytest.mark.parametrize("kept", [None, True, False])
def test_a_mesh_and_what_is_kept_after_forward(world, kept):
    ours, theirs = together(world, trains, mesh=init_device_mesh("cpu", (2,)), reshard_after_forward=kept)
    torch.testing.assert_close(ours, theirs, **CLOSE)


@pytest.mark.world(4)
@pytest.mark.parametrize("kept", [True, False])
def test_a_mesh_of_two_axes_is_hybrid(world, mesh_of, kept):
    plain = net()
    inputs = [torch.linspace(-1, 1, 6, dtype=torch.float64).reshape(2, 3) * (rank + 1) for rank in range(4)]
    terms = [torch.autograd.grad(plain(x).square().mean() / 4, list(plain.parameters())) for x in inputs]
    with mesh_of(2, 2) as mesh:
        subject = Subject(fsdp_ref, world.rank, mesh=mesh, reshard_after_forward=kept)
        subject.backward(0)
        assert units_in(subject.model)[0].config.hybrid
        grads = subject.values()[1::2]
        # Two sums of four terms, in any order: three additions round each.
        for grad, of_ranks in zip(grads, zip(*terms, strict=True), strict=True):
            assert bool(((grad - sum(of_ranks)).abs() <= 6 * 2.0**-53 * sum(map(torch.abs, of_ranks))).all())


@pytest.mark.world(2)
@pytest.mark.parametrize("library", [fsdp_ref, torchs])
def test_policies_of_both_libraries(world, library):
    policy = library.MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    subjects = [Subject(each, world.rank, torch.float32, mp_policy=policy) for each in (fsdp_ref, torchs)]
    for subject in subjects:
        trains(subject)
    mine, others = (subject.values() for subject in subjects)
    assert all(torch.equal(one, other) for one, other in zip(mine, others, strict=True))
    model = fsdp_ref.fully_shard(net(torch.float32), mp_policy=library.MixedPrecisionPolicy(torch.bfloat16))
    assert model(torch.ones(1, 3)).dtype == torch.bfloat16
    policy = library.MixedPrecisionPolicy(torch.bfloat16, output_dtype=torch.float32)
    assert fsdp_ref.fully_shard(net(torch.float32), mp_policy=policy)(torch.ones(1, 3)).dtype == torch.float32
    policy = library.MixedPrecisionPolicy(torch.bfloat16, cast_forward_inputs=False)
    with pytest.raises(RuntimeError, match="dtype"):
        fsdp_ref.fully_shard(net(torch.float32), mp_policy=policy)(torch.ones(1, 3))
    offload = library.CPUOffloadPolicy(pin_memory=False)
    model = fsdp_ref.fully_shard(net(), offload_policy=offload)
    assert units_in(model)[0].config.offload
    assert not units_in(fsdp_ref.fully_shard(net(), offload_policy=library.OffloadPolicy()))[0].config.offload


@pytest.mark.world(2)
def test_ignored_parameters_stay_as_they_are(world):
    model = net()
    ignored = set(model[1].up.parameters())
    fsdp_ref.fully_shard(model, ignored_params=ignored)
    assert model[1].up.weight in ignored
    assert model[1].up.weight.shape == (5, 4)
    assert model[1].down.weight.dim() == 1


@pytest.mark.world(2)
def test_a_gather_by_hand_does_not_decide_which_unit_is_the_root(world):
    subject = Subject(fsdp_ref, world.rank)
    subject.blocks[0].unshard()
    subject.backward(0)
    assert [unit.is_root for unit in units_in(subject.model)] == [True, False, False, False]


@pytest.mark.world(2)
def test_units_are_gathered_where_users_say(world):
    subject = Subject(fsdp_ref, world.rank)
    subject.backward(0)
    first, second, third = subject.blocks
    first.set_modules_to_forward_prefetch([second, third])
    order = []
    with observe(lambda event: order.append((event.kind.name, event.unit))):
        subject.loss(1)
    ended = order.index((UnitEventKind.POST_FORWARD.name, "1"))
    assert {("GATHER", "2"), ("GATHER", "3")} <= set(order[:ended])


@pytest.mark.world(2)
def test_what_is_kept_after_backward_is_not_gathered_again_before_a_step(world):
    subject = Subject(fsdp_ref, world.rank)
    subject.model.set_reshard_after_backward(False)
    subject.backward(0)
    for stepped in (False, True):
        gathers = []
        if stepped:
            subject.step()
        with observe(lambda event, gathers=gathers: gathers.append(event.kind)):
            subject.loss(1)
        assert (UnitEventKind.GATHER in gathers) == stepped


@pytest.mark.world(2)
def test_a_copy_has_methods_of_its_own(world):
    model = fsdp_ref.fully_shard(net())
    twin = copy.deepcopy(model)
    twin.set_requires_gradient_sync(False)
    assert [units_in(each)[0].sync_gradients for each in (model, twin)] == [True, False]
    assert all(callable(getattr(twin, method.__name__)) for method in METHODS)


@pytest.mark.world(2)
def test_a_class_keeps_its_own_method(world):
    class Own(nn.Linear):
        def reshard(self):
            return "mine"

    assert fsdp_ref.fully_shard(Own(2, 2)).reshard() == "mine"


@pytest.mark.world(2)
def test_what_is_refused(world):
    model = fsdp_ref.fully_shard(net())
    with pytest.raises(ConfigError, match="got mesh and device_mesh, reshard_after_forward and strategy"):
        fsdp_ref.fully_shard(
            net(),
            mesh=world.mesh,
            device_mesh=world.mesh,
            strategy=ShardingStrategy.FULL_SHARD,
            reshard_after_forward=True,
        )
    with pytest.raises(UnsupportedError, match="expected True, False or None, got 2"):
        fsdp_ref.fully_shard(net(), reshard_after_forward=2)
    with pytest.raises(ConfigTypeError, match="offload_policy: expected a CPUOffloadPolicy"):
        fsdp_ref.fully_shard(net(), offload_policy=True)
    with pytest.raises(ConfigTypeError, match="mp_policy: expected a MixedPrecisionPolicy"):
        fsdp_ref.fully_shard(net(), mp_policy=torch.float16)
    with pytest.raises(FsdpValueError, match="expected a positive number, got 0"):
        model.set_gradient_divide_factor(0)
    with pytest.raises(FsdpValueError, match="expected True or False, got 2"):
        model.set_reshard_after_forward(2)
    with pytest.raises(ConfigTypeError, match="expected a module that fully_shard was applied to, got Linear"):
        model.set_modules_to_forward_prefetch([nn.Linear(1, 1)])


@pytest.mark.world(4)
def test_leaving_out_the_reduction_over_replicas_alone_is_refused(world, mesh_of):
    with mesh_of(2, 2) as mesh:
        model = fsdp_ref.fully_shard(net(), mesh=mesh)
        model.set_requires_all_reduce(True)
        with pytest.raises(UnsupportedError, match="hybrid ones.*set_requires_gradient_sync"):
            model.set_requires_all_reduce(False)
