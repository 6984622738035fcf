"""Hybrid groups, offloading, freezing, tied parameters, replaced parameters, checkpointing, hooks on parameters."""

from __future__ import annotations

import contextlib

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from fsdp_ref import CPUOffload, FullyShardedDataParallel
from fsdp_ref.annotations import units_under
from fsdp_ref.runtime.events import observe
from fsdp_ref.wrap import ModuleWrapPolicy


def units(model):
    return [unit for _, _, unit in units_under(model)]


@pytest.mark.covers("HYB-03", "HYB-05", "HYB-07", "HYB-11", "HYB-12", "B024", "B025", "B050", "B114", "B168")
@pytest.mark.parametrize("shape", [(4, 1), (2, 2), (1, 4)])
@pytest.mark.parametrize("strategy", ["HYBRID_SHARD", "_HYBRID_SHARD_ZERO2"])
@pytest.mark.world(4)
def test_hybrid_sharding_averages_over_all_ranks(trial, world, strategy, shape):
    mesh = dist.device_mesh.init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
    for api in ("flat", "composable"):
        case = trial(api, strategy, device_mesh=mesh)
        case.train(2)
        case.zero_grad()
        for index in range(3):
            xs = case.inputs(index)
            case.plain_loss(xs).backward()
            with case.no_sync(index < 2):
                case.loss(xs).backward()
        case.step()
        case.compare()
    for group in {mesh.get_group(axis) for axis in ("replicate", "shard")} - {dist.group.WORLD}:
        dist.destroy_process_group(group)


@pytest.mark.covers("OFF-02", "OFF-06", "ACC-03", "B029", "B031")
@pytest.mark.parametrize("schedule", ["s", "ss", "nns", "sns"])
@pytest.mark.world(2)
def test_offloading_on_cpu_changes_nothing(trial, api, strategy, schedule):
    case = trial(api, strategy, cpu_offload=CPUOffload(offload_params=True))
    for step in range(2):
        case.zero_grad()
        for index, kind in enumerate(schedule):
            xs = case.inputs(10 * step + index)
            case.plain_loss(xs).backward()
            with case.no_sync(kind == "n"):
                case.loss(xs).backward()
        case.step()
        case.compare()


@pytest.mark.covers("FRZ-01", "FRZ-02", "FRZ-03", "FRZ-05", "FRZ-07", "FRZ-08", "B039", "B040", "B041", "B142", "B162")
@pytest.mark.world(2)
def test_freezing_and_thawing(trial, api, strategy):
    case = trial(api, strategy)
    block = case.blocks()[1]
    unit = next(unit for unit in units(case.model) if unit.module is block)

    def freeze(frozen: bool) -> None:
        for param in case.plain.blocks[1].parameters():
            param.requires_grad_(not frozen)
        shown = unit.handle.originals.params if case.api != "flat" else [unit.handle.flat_param]
        for param in shown:
            param.requires_grad_(not frozen)

    for step, frozen in enumerate([True, False, True, True, False]):
        freeze(frozen)
        case.zero_grad()
        case.both_backward(step)
        case.step()
        case.compare()
        assert all(not each.handle.unsharded for each in units(case.model))
        if frozen:
            assert all(param.grad is None for param in unit.handle.originals.params)


@pytest.mark.covers("FRZ-06", "ORIG-05", "ORIG-22", "CTOR-07")
@pytest.mark.parametrize("api", ["orig", "composable"])
@pytest.mark.world(2)
def test_frozen_biases_inside_a_unit(trial, api, strategy):
    case = trial(api, strategy)
    for model in (case.plain, case.model):
        for name, param in model.named_parameters():
            if name.endswith("bias"):
                param.requires_grad_(False)
    case.train(3)
    for name, param in case.model.named_parameters():
        if name.endswith("bias"):
            assert param.grad is None


class Tied(nn.Module):
    """Tied inside one unit, and across two units below their common ancestor."""

    def __init__(self, block: type[nn.Module]) -> None:
        super().__init__()
        self.a = block(6)
        self.b = block(6)
        self.inp = nn.Linear(6, 6, bias=False)
        self.out = nn.Linear(6, 6, bias=False)
        self.out.weight = self.inp.weight
        self.b.up.weight = self.a.up.weight

    def forward(self, x):
        return self.out(self.b(self.a(self.inp(x))))


@pytest.mark.covers("SHR-01", "SHR-02", "SHR-03", "SHR-06", "B081", "B082", "B139", "B140")
@pytest.mark.world([2, 3])
def test_tied_parameters_stay_one(trial, api, strategy):
    case = trial(api, strategy, model=lambda: Tied(trial.__globals__["Block"]))
    case.train(3)
    with FullyShardedDataParallel.summon_full_params(case.model):
        inner = case.inner()
        a, b = (case.blocks()[index] for index in (0, 1))
        assert inner.inp.weight is inner.out.weight
        assert a.up.weight is b.up.weight
        torch.testing.assert_close(a.up.weight.detach(), case.plain.a.up.weight.detach())


@pytest.mark.covers("ORIG-07", "ORIG-08", "ORIG-09", "B037")
@pytest.mark.parametrize("api", ["orig", "composable"])
@pytest.mark.world(2)
def test_the_none_mask(trial, api):
    case = trial(api, "FULL_SHARD", model=lambda: nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 4)))
    case.both_backward(0)
    params = dict(case.model.named_parameters())
    first = next(p for n, p in params.items() if n.endswith("0.bias"))
    handle = units(case.model)[0].handle
    first.grad = None
    case.plain[0].bias.grad = None
    case.model(case.inputs(1)[case.world.rank])
    assert first.grad is None
    assert handle.grads.reduced_S is not None
    case.both_backward(2)
    case.step()
    case.compare()
    case.zero_grad()
    assert handle.grads.reduced_S is not None
    case.model(case.inputs(1)[case.world.rank])
    assert handle.grads.reduced_S is None


@pytest.mark.covers("ORIG-10", "ORIG-12", "B090", "B152")
@pytest.mark.parametrize("moment", ["start", "after a forward", "after a step"])
@pytest.mark.world(2)
def test_replaced_parameters_and_gradients_are_taken_over(trial, api, strategy, moment):
    case = trial(api, strategy)
    if moment == "after a forward":
        case.model(case.inputs(0)[case.world.rank])
    if moment == "after a step":
        case.train(1)
    for param in case.plain.parameters():
        param.data = param.data * 2
    for param in case.model.parameters():
        param.data = param.data * 2
    if case.api == "orig":
        for unit in units(case.model):
            for managed, param in zip(unit.handle.originals.managed, unit.handle.originals.params, strict=True):
                for site in managed.sites:
                    setattr(site.module, site.name, param)
    case.zero_grad()
    case.both_backward(3)
    for model in (case.plain, case.model):
        for param in model.parameters():
            if param.grad is not None:
                param.grad = param.grad * 3
    case.step()
    case.both_backward(4)
    case.step()
    case.compare()


class Scaled(nn.Module):
    """A unit with a scalar that one rank holds alone."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 6)
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x):
        return self.up(x) * self.scale


@pytest.mark.world([2, 3])
def test_data_assigned_to_a_unit_that_stays_gathered_is_noticed_by_ranks_that_hold_none_of_it(trial):
    case = trial("orig", "SHARD_GRAD_OP", lambda: nn.Sequential(Scaled(), Scaled()), policy=ModuleWrapPolicy({Scaled}))
    xs = case.inputs(0)
    case.plain_loss(xs).backward()
    with case.no_sync(True):
        case.loss(xs).backward()
    for model in (case.plain, case.model):
        for name, param in model.named_parameters():
            if name.endswith("scale"):
                param.data = param.data * 2
    case.both_backward(1)
    case.step()
    case.compare()


@pytest.mark.covers("ORIG-10", "ORIG-11", "ORIG-13", "ORIG-14")
@pytest.mark.world(2)
def test_replacements_that_cannot_be_taken_over_are_refused(trial):
    case = trial("orig", "SHARD_GRAD_OP")
    block = case.blocks()[0]
    unit = next(unit for unit in units(case.model) if unit.module is block)
    loss = case.loss(case.inputs(0))
    block.up.weight.data = block.up.weight.data.clone()
    with pytest.raises(AssertionError, match="FSDP does not support changing the parameters between forward and back"):
        loss.backward()
    assert block.up.weight.data_ptr() == unit.handle.shard_S.data_ptr() or not block.up.weight.numel()
    case.train(1)  # what was refused is gone
    new = nn.Parameter(torch.zeros_like(block.up.bias))
    block.up.bias = new
    with torch.no_grad():
        case.plain.blocks[0].up.bias.zero_()
        case.model(case.inputs(0)[case.world.rank])
    assert unit.handle.originals.params[1] is new
    case.compare()
    block.up.weight.data = torch.zeros(1000)
    with pytest.raises(RuntimeError, match="Cannot writeback when the parameter shape changes"):
        case.model(case.inputs(0)[case.world.rank])


@pytest.mark.covers("ORIG-14")
@pytest.mark.world(2)
def test_changing_what_is_tied_is_refused(trial):
    case = trial("orig", "FULL_SHARD", model=lambda: Tied(trial.__globals__["Block"]))
    case.train(1)
    case.inner().out.weight = nn.Parameter(case.inner().inp.weight.detach().clone())
    with pytest.raises(NotImplementedError, match="Changing shared parameters is not supported yet"):
        case.model(case.inputs(0)[case.world.rank])


class Checkpointed(nn.Module):
    def __init__(self, block: type[nn.Module], *, inside: bool, reentrant: bool) -> None:
        super().__init__()
        self.inp = nn.Linear(6, 6)
        self.blocks = nn.ModuleList(block(6) for _ in range(3))
        self.inside = inside
        self.reentrant = reentrant
        if inside:
            for each in self.blocks:
                each.forward = self._around(each)

    def _around(self, block):
        original = type(block).forward

        def half(x):
            return checkpoint(lambda y: torch.relu(block.up(y)), x, use_reentrant=self.reentrant)

        def forward(x):
            if not torch.is_grad_enabled():
                return original(block, x)
            return x + checkpoint(block.down, half(x), use_reentrant=self.reentrant)

        return forward

    def forward(self, x):
        x = self.inp(x)
        for index, block in enumerate(self.blocks):
            x = block(x) if self.inside else checkpoint(block, x, use_reentrant=self.reentrant)
            if index == 1 and not self.inside:
                x = checkpoint(self.blocks[0], x, use_reentrant=self.reentrant)
        return x


@pytest.mark.covers("AC-01", "AC-02", "AC-03", "B018", "B020", "B034", "B035", "ORIG-17")
@pytest.mark.parametrize("inside", [False, True], ids=["outside", "inside"])
@pytest.mark.parametrize("reentrant", [False, True], ids=["saved", "reentrant"])
@pytest.mark.world(2)
def test_activation_checkpointing(trial, world, api, strategy, inside, reentrant):
    if inside:
        # A bound forward does not survive deepcopy: make both models afresh.
        case = trial(api, strategy, model=lambda: nn.Linear(6, 6))
        torch.manual_seed(0)
        case.plain = Checkpointed(trial.__globals__["Block"], inside=True, reentrant=reentrant).double()
        torch.manual_seed(0)
        fresh = Checkpointed(trial.__globals__["Block"], inside=True, reentrant=reentrant).double()
        case.model = case.shard(fresh, strategy)
        case.plain_optimizer = torch.optim.SGD(case.plain.parameters(), lr=0.1)
        case.optimizer = torch.optim.SGD(case.model.parameters(), lr=0.1)
    else:
        case = trial(
            api,
            strategy,
            model=lambda: Checkpointed(trial.__globals__["Block"], inside=False, reentrant=reentrant),
        )
    case.train(3)
    assert all(not unit.handle.unsharded for unit in units(case.model))


@pytest.mark.covers("B049", "B151", "RUN-13")
@pytest.mark.parametrize("api", ["orig", "composable"])
@pytest.mark.world(2)
def test_hooks_on_original_parameters_run(trial, api, strategy):
    case = trial(api, strategy)
    seen: list[str] = []
    for model in (case.plain, case.model):
        for name, param in model.named_parameters():
            if name.endswith("up.weight"):
                param.register_hook(lambda grad: grad * 2)
            param.register_post_accumulate_grad_hook(lambda p, name=name: seen.append(name))
    case.train(2)
    assert any("_fsdp" in name for name in seen) or api == "composable"


@pytest.mark.covers("RUN-13")
@pytest.mark.world(2)
def test_an_optimizer_in_backward(trial):
    case = trial("orig", "FULL_SHARD")
    for param in case.model.parameters():
        param._in_backward_optimizers = [torch.optim.SGD([param], lr=0.1)]
    plain = torch.optim.SGD(case.plain.parameters(), lr=0.1)
    for step in range(2):
        plain.zero_grad()
        case.both_backward(step)
        plain.step()
        assert all(param.grad is None for param in case.model.parameters())
        case.compare()


@pytest.mark.covers("STRAT-02", "STRAT-03", "STRAT-10", "B019", "LIM-03")
@pytest.mark.world(2)
def test_at_most_two_full_units_beside_the_root(trial, full_bytes):
    case = trial("orig", "FULL_SHARD", model=lambda: trial.__globals__["Net"](blocks=6))
    case.train(2)
    sizes = [unit.handle.buffer(torch.float64).nbytes for unit in units(case.model)]
    case.zero_grad()
    alive = []
    with observe(lambda event: alive.append(full_bytes(case.model))):
        case.loss(case.inputs(5)).backward()
    assert max(sizes[1:]) < max(alive) <= sizes[0] + 2 * max(sizes[1:])
    assert full_bytes(case.model) == 0


@pytest.mark.covers("ORIG-15")
@pytest.mark.world(2)
def test_inside_forward_parameters_have_their_shapes(trial, api, strategy):
    case = trial(api, strategy)
    shapes = {name: tuple(param.shape) for name, param in case.plain.named_parameters() if name.startswith("blocks.1")}
    seen = {}
    block = case.blocks()[1]
    hook = block.up.register_forward_hook(lambda *_: seen.update(weight=tuple(block.up.weight.shape)))
    case.train(1)
    hook.remove()
    assert seen["weight"] == shapes["blocks.1.up.weight"]


@pytest.mark.covers("RUN-08")
@pytest.mark.world(2)
def test_a_raw_submodule_of_a_sharded_unit_fails(trial, api):
    case = trial(api, "FULL_SHARD")
    case.train(1)
    with pytest.raises(RuntimeError):
        case.blocks()[0].up(case.inputs(0)[case.world.rank])
    with contextlib.suppress(RuntimeError):
        case.inner().out(case.inputs(0)[case.world.rank])
    case.train(1)


@pytest.mark.covers("COMP-07", "B011", "B016")
@pytest.mark.world(2)
def test_manual_and_automatic_composition_mix(trial, world):
    from fsdp_ref import fully_shard

    block = trial.__globals__["Block"]
    case = trial("composable", "FULL_SHARD", policy=None)
    torch.manual_seed(0)
    model = trial.__globals__["Net"]().double()
    fully_shard(model.blocks[1])
    fully_shard(model, policy=ModuleWrapPolicy({block}))
    case.model = model
    case.optimizer = torch.optim.SGD(model.parameters(), **case.options)
    case.train(2)
    assert [unit.name for unit in units(model)] == ["", "blocks.0", "blocks.1", "blocks.2"]
    assert len({id(unit.root) for unit in units(model)}) == 1
