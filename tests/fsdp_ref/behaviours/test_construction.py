"""What construction accepts, refuses and leaves behind."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import fsdp_ref
from fsdp_ref import CPUOffload, MixedPrecision
from fsdp_ref import FullyShardedDataParallel as FSDP

CPU = torch.device("cpu")


@pytest.mark.world(2)
@pytest.mark.covers("CTOR-01", "CTOR-02")
@pytest.mark.parametrize("device_id", [None, CPU, "cpu"])
def test_cpu_is_a_compute_device(lab, device_id):
    model = lab.shard(lab.make(), device_id=device_id)
    assert model.compute_device == CPU
    assert model(lab.batch()).device == CPU


@pytest.mark.world(2)
@pytest.mark.covers("CTOR-02")
@pytest.mark.skipif(torch.cuda.is_available(), reason="an index means the accelerator, and here is one")
def test_an_index_without_an_accelerator_is_refused(lab):
    with pytest.raises(RuntimeError):
        lab.shard(lab.make(), device_id=0)


@pytest.mark.world(2)
def test_units_are_moved_and_sharded_one_by_one(lab, path, monkeypatch):
    """A device needs room for one unit's full parameters beside the shards, not for the whole model."""
    from fsdp_ref.build import attach

    done = []

    def noted(name, function):
        def call(*args, **kwargs):
            done.append(name)
            return function(*args, **kwargs)

        return call

    monkeypatch.setattr(attach, "move_states", noted("move", attach.move_states))
    monkeypatch.setattr(attach, "FlatHandle", noted("shard", attach.FlatHandle))
    lab.shard(lab.make(), path, policy={lab.Block}, device_id="cpu")
    assert done == ["move", "shard"] * 4


@pytest.mark.world(2)
@pytest.mark.covers("CTOR-03", "AC-05", "OBJ-01", "OBJ-02")
def test_the_wrapped_module_and_what_falls_through_to_it(lab):
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    inner = lab.make(lambda: nn.Sequential(nn.Linear(3, 3), nn.ReLU()))
    inner.label = "mine"
    model = FSDP(inner)
    assert model._fsdp_wrapped_module is inner
    assert model.module is inner
    assert model[1] is inner[1]
    assert model.label == "mine"
    with pytest.raises(AttributeError, match="absent"):
        _ = model.absent
    text = str(model)
    assert text.startswith("FullyShardedDataParallel(\n  (_fsdp_wrapped_module): Sequential(")
    checkpointed = lab.make(lambda: nn.Linear(3, 3))
    assert FSDP(checkpoint_wrapper(checkpointed)).module is checkpointed


@pytest.mark.world(2)
@pytest.mark.covers("CTOR-04", "FLAT-21")
def test_a_module_without_parameters(lab, path):
    model = lab.shard(nn.ReLU(), path)
    assert list(model.parameters()) == []
    x = lab.batch()
    assert torch.equal(model(x), x.relu())
    if path != "composable":
        assert model._flat_param is None
    assert lab.units(model)[0].handle.empty


@pytest.mark.world(2)
@pytest.mark.covers("CTOR-05", "B079")
def test_scalar_parameters_train(lab, path):
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin = nn.Linear(3, 2)
            self.alpha = nn.Parameter(torch.tensor(0.5))

        def forward(self, x):
            return self.lin(x) * self.alpha

    model = lab.parity(Scaled, path)
    with lab.full(model):
        shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    assert shapes["alpha"] == ()


@pytest.mark.world(2)
@pytest.mark.covers("CTOR-06", "CTOR-07", "CTOR-08", "B079", "B143", "B144")
def test_parameters_that_cannot_share_a_flat_one_are_named(lab, path):
    model = lab.make(lambda: nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
    model[1].half()
    with pytest.raises(ValueError, match="Must flatten tensors with uniform dtype") as info:
        lab.shard(model, path)
    assert "1.weight" in str(info.value)
    integer = nn.Linear(2, 2)
    integer.weight = nn.Parameter(torch.ones(2, 2, dtype=torch.int64), requires_grad=False)
    with pytest.raises(ValueError, match="Cannot flatten integer dtype tensors"):
        lab.shard(nn.Sequential(integer), path)
    mixed = lab.make(lambda: nn.Linear(2, 2))
    mixed.weight.requires_grad_(False)
    if path == "flat":
        with pytest.raises(ValueError, match="Must flatten tensors with uniform `requires_grad`"):
            lab.shard(mixed, path)
    else:
        lab.shard(mixed, path)
        assert not mixed.weight.requires_grad
        assert mixed.bias.requires_grad


@pytest.mark.world(2)
@pytest.mark.covers("B143")
def test_each_unit_may_have_its_own_dtype(lab):
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)

        def forward(self, x):
            return self.b(self.a(x).to(self.b.weight.dtype))

    model = lab.make(Two)
    model.b.to(torch.float32).requires_grad_(False)
    reference = copy.deepcopy(model)
    model = lab.shard(model, policy={nn.Linear})
    lab.loss(model, lab.batch()).backward()
    lab.reference_step(reference, lab.batches())
    lab.assert_grads(model, reference, rtol=1e-5, atol=1e-6)


@pytest.mark.world(2)
@pytest.mark.covers("CTOR-09", "CTOR-10", "CPU-03", "FLAT-15", "FLAT-22")
def test_a_handle_by_itself(lab):
    from fsdp_ref.flat_param import FlatParameter, FlatParamHandle

    module = lab.make(lambda: nn.Linear(3, 2))

    def handle(params, of=module, orig=True):
        return FlatParamHandle(
            params, of, CPU, fsdp_ref.ShardingStrategy.FULL_SHARD, False, None, None, False, lab.world.group, orig
        )

    with pytest.raises(ValueError, match="empty"):
        handle([])
    with pytest.raises(ValueError, match="`params` were not found"):
        handle([nn.Parameter(torch.zeros(2))])
    with pytest.raises(ValueError, match="Cannot flatten a `FlatParameter`"):
        handle([FlatParameter(torch.zeros(4))])
    made = handle(list(module.parameters()))
    assert "weight" in repr(made)
    assert isinstance(made.flat_param, FlatParameter)
    assert type(made.flat_param) is nn.Parameter
    assert not isinstance(nn.Parameter(torch.zeros(1)), FlatParameter)


@pytest.mark.world(2)
@pytest.mark.covers("CTOR-16")
@pytest.mark.parametrize("container", [nn.ModuleList([nn.Linear(2, 2)]), nn.ModuleDict({"a": nn.Linear(2, 2)})])
def test_containers_without_forward_are_remarked_on(lab, container):
    with pytest.warns(UserWarning, match="forward"):
        FSDP(container)


@pytest.mark.world(2)
@pytest.mark.covers("CTOR-19")
def test_a_group_or_a_mesh(lab):
    with pytest.raises(ValueError, match="Cannot pass both process_group and device_mesh"):
        FSDP(lab.make(), process_group=lab.world.group, device_mesh=lab.world.mesh)
    assert FSDP(lab.make(), device_mesh=lab.world.mesh).process_group is lab.world.mesh.get_group()


@pytest.mark.world(2)
@pytest.mark.covers("CTOR-20", "FLAT-16")
def test_wrapping_a_wrapper(lab):
    reference = lab.make()
    model = FSDP(FSDP(copy.deepcopy(reference), use_orig_params=True), use_orig_params=True)
    assert [unit.handle.empty for unit in lab.units(model)] == [True, False]
    lab.loss(model, lab.batch()).backward()
    lab.reference_step(reference, lab.batches())
    lab.assert_grads(model, reference)


@pytest.mark.world(2)
@pytest.mark.covers("CTOR-21", "B012")
@pytest.mark.parametrize("option", ["use_orig_params", "limit_all_gathers"])
def test_settings_of_the_whole_tree_must_agree(lab, option):
    base = {"use_orig_params": True, "limit_all_gathers": True}
    model = lab.make()
    model.blocks[0] = FSDP(model.blocks[0], **{**base, option: False})
    model = FSDP(model, **base)
    with pytest.raises(ValueError, match="Expects one homogeneous value for"):
        model(lab.batch())


@pytest.mark.world(2)
@pytest.mark.covers("CTOR-22", "FLAT-16", "FLAT-18", "FLAT-21", "B015")
def test_without_original_parameters_only_flat_ones_are_left(lab):
    plain = lab.make()
    total = sum(p.numel() for p in plain.parameters())
    model = lab.shard(plain, "flat", policy={lab.Block})
    names = [name for name, _ in model.named_parameters()]
    assert names[0] == "_fsdp_wrapped_module._flat_param"
    assert names[1:] == [f"_fsdp_wrapped_module.blocks.{i}._fsdp_wrapped_module._flat_param" for i in range(3)]
    layouts = [unit.handle.layout for unit in lab.units(model)]
    assert sum(layout.params_numel for layout in layouts) == total == sum(layout.numel for layout in layouts)
    assert model.params == [lab.units(model)[0].handle.flat_param]


@pytest.mark.world(2)
@pytest.mark.covers("CTOR-24", "ORIG-01")
def test_an_optimizer_made_before_sharding(lab, orig_path):
    reference = lab.make()
    model = copy.deepcopy(reference)
    before = dict(model.named_parameters())
    optim = torch.optim.Adam(model.parameters(), lr=0.1)
    reference_optim = torch.optim.Adam(reference.parameters(), lr=0.1)
    model = lab.shard(model, orig_path, policy={lab.Block})
    for step in range(3):
        lab.loss(model, lab.batch(step)).backward()
        optim.step()
        optim.zero_grad()
        lab.reference_step(reference, lab.batches(step), optim=reference_optim)
    lab.assert_params(model, reference)
    assert {id(p) for p in model.parameters()} == {id(p) for p in before.values()}


@pytest.mark.world(2)
@pytest.mark.covers("CTOR-25")
def test_edits_of_the_shard_before_the_first_forward_count(lab, path):
    reference = lab.make()
    model = lab.shard(copy.deepcopy(reference), path, policy={lab.Block})
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(2)
        for p in reference.parameters():
            p.mul_(2)
    torch.testing.assert_close(model(lab.batch()), reference(lab.batch()), **lab.CLOSE)


@pytest.mark.world(2)
@pytest.mark.covers("CTOR-26", "ORIG-18", "B078")
@pytest.mark.parametrize("when", ["before", "after"])
def test_the_dtype_may_change_around_the_first_forward(lab, path, when):
    reference = lab.make(dtype=torch.float32)
    model = lab.shard(copy.deepcopy(reference), path, policy={lab.Block})
    if when == "after":
        lab.loss(model, lab.batch().float()).backward()
        model.zero_grad()
    model.double()
    reference.double()
    assert all(p.dtype == torch.float64 for p in model.parameters())
    lab.loss(model, lab.batch()).backward()
    lab.reference_step(reference, lab.batches())
    if path != "flat":
        lab.assert_grads(model, reference)
    optim = torch.optim.SGD(model.parameters(), lr=0.1)
    optim.step()
    torch.optim.SGD(reference.parameters(), lr=0.1).step()
    lab.assert_params(model, reference)


@pytest.mark.world(2)
@pytest.mark.covers("CTOR-26")
def test_unspecified_dtypes_follow_and_specified_ones_stay(lab):
    policy = MixedPrecision(reduce_dtype=torch.float32)
    model = lab.shard(lab.make(dtype=torch.float32), mixed_precision=policy).half()
    model(lab.batch().half())
    precision = lab.units(model)[0].handle.precision
    assert (precision.original, precision.compute, precision.reduce) == (torch.float16, torch.float16, torch.float32)


@pytest.mark.world(2)
@pytest.mark.covers("WRAP-15")
def test_nested_units_take_the_roots_options(lab):
    policy = MixedPrecision(reduce_dtype=torch.bfloat16)
    model = lab.shard(
        lab.make(),
        policy={lab.Block},
        mixed_precision=policy,
        forward_prefetch=True,
        cpu_offload=CPUOffload(True),
        limit_all_gathers=False,
        backward_prefetch=None,
    )
    for unit in lab.units(model):
        config = unit.config
        assert config.mixed_precision == policy
        assert config.forward_prefetch
        assert config.cpu_offload.offload_params
        assert not config.limit_all_gathers
        assert config.backward_prefetch is None
        assert config.use_orig_params


@pytest.mark.world(2)
@pytest.mark.covers("WRAP-02", "WRAP-09")
def test_a_policy_overrides_one_modules_options_and_wraps_every_place_of_a_shared_module(lab):
    from fsdp_ref.wrap import CustomPolicy

    model = lab.make()
    model.blocks.append(model.blocks[0])
    reference = copy.deepcopy(model)
    special = model.blocks[1]
    policy = CustomPolicy(
        lambda m: (
            {"sharding_strategy": fsdp_ref.ShardingStrategy.SHARD_GRAD_OP} if m is special else isinstance(m, lab.Block)
        )
    )
    model = lab.shard(model, policy=policy)
    wrapped = [type(block).__name__ for block in model.module.blocks]
    assert wrapped == ["FullyShardedDataParallel"] * 4
    assert model.module.blocks[3] is model.module.blocks[0]
    strategies = [unit.config.strategy.name for unit in lab.units(model)]
    assert strategies == ["FULL_SHARD", "FULL_SHARD", "SHARD_GRAD_OP", "FULL_SHARD"]
    lab.loss(model, lab.batch()).backward()
    lab.reference_step(reference, lab.batches())
    lab.assert_grads(model, reference)


@pytest.mark.world(2)
@pytest.mark.covers("WRAP-07", "B011")
def test_by_hand_and_by_policy(lab):
    model = lab.make()
    model.blocks[0] = FSDP(model.blocks[0], use_orig_params=True)
    with pytest.raises(ValueError, match=r"modules to not already have FSDP applied but found blocks\.0"):
        lab.shard(model, policy={lab.Block})


@pytest.mark.world(2)
@pytest.mark.covers("CTOR-06", "COMP-16")
def test_a_refused_application_leaves_the_module_usable(lab, path):
    model = lab.make(lambda: nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)))
    model[1].float()
    with pytest.raises(ValueError, match="uniform dtype"):
        lab.shard(model, path)
    model.double()
    reference = copy.deepcopy(model)
    lab.loss(lab.shard(model, path), lab.batch()).backward()
    assert len(list(reference.parameters())) == 4
