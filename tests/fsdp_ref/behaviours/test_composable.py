"""fully_shard and replicate on a user's own module, and the two paths side by side."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from fsdp_ref import MixedPrecision, ShardingStrategy
from fsdp_ref.composable import _get_registry, fully_shard, replicate
from fsdp_ref.naming import clean_tensor_name
from fsdp_ref.wrap import CustomPolicy, ModuleWrapPolicy, always_wrap_policy

S = ShardingStrategy


POLICIES = ["none", "units", "sequentials", "both", "linears", "custom"]


def policies(lab, name):
    return {
        "none": None,
        "units": ModuleWrapPolicy({lab.Unit}),
        "sequentials": ModuleWrapPolicy({nn.Sequential}),
        "both": ModuleWrapPolicy({lab.Unit, nn.Sequential}),
        "linears": ModuleWrapPolicy({nn.Linear}),
        "custom": CustomPolicy(lambda m: isinstance(m, lab.Unit)),
    }[name]


def described(lab, model):
    return [
        (unit.name, [clean_tensor_name(fqn) for fqn in unit.handle.fqns], unit.handle.layout.numel)
        for unit in lab.units(model)
        if not unit.handle.empty
    ]


@pytest.mark.world(2)
@pytest.mark.covers("COMP-04", "COMP-06", "COMP-10", "COMP-08", "TRAV-02", "B009", "B015", "B017")
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("strategy", [S.FULL_SHARD, S.SHARD_GRAD_OP], ids=lambda s: s.name)
def test_both_paths_have_the_same_units_and_do_the_same_in_the_same_order(lab, policy, strategy):
    wrapped = lab.shard(lab.make(lab.Deep), "wrapper", policy=policies(lab, policy), sharding_strategy=strategy)
    composed = lab.shard(lab.make(lab.Deep), "composable", policy=policies(lab, policy), sharding_strategy=strategy)
    assert_alike(lab, wrapped, composed)


def assert_alike(lab, wrapped, composed):
    logs = []
    for model in (wrapped, composed):
        with lab.events() as events, lab.collectives() as calls:
            for step in range(3):
                lab.loss(model, lab.batch(step)).backward()
                torch.optim.SGD(model.parameters(), lr=0.1).step()
        held = {unit.name: tuple(unit.handle.fqns) for unit in lab.units(model) if not unit.handle.empty}
        assert all(event.fqns == held.get(event.unit, ()) for event in events)
        steps = [(e.kind, e.unit, e.fqns, e.prefetch, e.freed) for e in events]
        logs.append((steps, [(c.op, c.tensor.numel(), c.unit) for c in calls]))
    assert described(lab, wrapped) == described(lab, composed)
    assert logs[0] == logs[1]
    assert len(logs[0][0]) >= 3 * 2 * len(described(lab, wrapped))
    a, b = lab.params(wrapped), lab.params(composed)
    assert all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.world(2)
@pytest.mark.covers("COMP-04", "COMP-07", "COMP-08", "B011", "B017")
def test_both_paths_nested_by_hand(lab):
    composed, wrapped = lab.make(lab.Deep), lab.make(lab.Deep)
    for module in (composed.u1.seq, composed.u2.seq[1], composed.u2, composed):
        fully_shard(module)
    wrapped.u1.seq = lab.shard(wrapped.u1.seq)
    wrapped.u2.seq[1] = lab.shard(wrapped.u2.seq[1])
    wrapped.u2 = lab.shard(wrapped.u2)
    assert_alike(lab, lab.shard(wrapped), composed)


@pytest.mark.world(2)
@pytest.mark.covers("COMP-04", "COMP-08", "REP-01", "TRAV-03", "B010")
@pytest.mark.parametrize("policy", ["none", "units", "linears"])
def test_both_paths_around_replicated_subtrees(lab, policy):
    models = [lab.make(lab.Deep), lab.make(lab.Deep)]
    for model in models:
        replicate(model.u1)
        replicate(model.u2.seq[1])
    wrapped = lab.shard(models[0], "wrapper", policy=policies(lab, policy))
    composed = lab.shard(models[1], "composable", policy=policies(lab, policy))
    assert_alike(lab, wrapped, composed)
    names = {f"{unit}.{fqn}" for unit, fqns, _ in described(lab, composed) for fqn in fqns}
    assert not any("u1" in name or "seq.1" in name for name in names)


@pytest.mark.filterwarnings("ignore:The `NO_SHARD` sharding strategy:FutureWarning")
@pytest.mark.world(2)
@pytest.mark.covers("COMP-09", "COMP-11")
@pytest.mark.parametrize("strategy", [S.FULL_SHARD, S.SHARD_GRAD_OP, S.NO_SHARD], ids=lambda s: s.name)
def test_five_adam_steps(lab, strategy):
    lab.parity(lab.Deep, "composable", policy=policies(lab, "units"), strategy=strategy, steps=5)


@pytest.mark.world(2)
@pytest.mark.covers("COMP-01", "COMP-16", "COMP-02", "CON-02", "CON-04")
def test_the_module_stays_itself(lab):
    plain = lab.make(lab.Deep)
    names = [name for name, _ in plain.named_parameters()]
    modules = [(name, type(module)) for name, module in plain.named_modules()]
    state_keys = list(plain.state_dict())
    assert _get_registry(plain) is None
    assert fully_shard.state(plain) is None
    assert fully_shard(plain, policy=policies(lab, "units")) is plain
    for _ in range(2):
        assert [name for name, _ in plain.named_parameters()] == names
        assert [(name, type(module)) for name, module in plain.named_modules()] == modules
        assert list(plain.state_dict()) == state_keys
        lab.loss(plain, lab.batch()).backward()
    assert list(_get_registry(plain)) == ["fully_shard"]
    assert fully_shard.state(plain).unit is lab.units(plain)[0]
    with pytest.raises(AssertionError, match="fully_shard has already been applied to the following module"):
        fully_shard(plain)
    for policy in (always_wrap_policy, 3):
        with pytest.raises(ValueError, match="Expects an `_FSDPPolicy`"):
            fully_shard(lab.make(lab.Deep), policy=policy)


@pytest.mark.world(2)
@pytest.mark.covers("COMP-07", "B011", "COMP-08")
def test_manual_nesting_shares_one_root(lab):
    reference = lab.make(lab.Deep)
    model = copy.deepcopy(reference)
    for sub in (model.u2.seq[1], model.u2, model.u1):
        fully_shard(sub)
    fully_shard(model)
    by_policy = lab.shard(copy.deepcopy(reference), "composable", policy=policies(lab, "units"))
    logs = []
    for each in (model, by_policy):
        with lab.events() as events:
            lab.loss(each, lab.batch()).backward()
        logs.append([(e.kind, e.unit, e.fqns, e.prefetch, e.freed) for e in events])
    assert described(lab, model) == described(lab, by_policy)
    assert logs[0] == logs[1]
    roots = {unit.root for unit in lab.units(model)}
    assert len(roots) == 1
    (root,) = roots
    assert root.units == lab.units(model)
    assert len({unit.handle.streams for unit in root.units}) == 1
    lab.reference_step(reference, lab.batches())
    lab.assert_grads(model, reference)


@pytest.mark.world(2)
@pytest.mark.covers("COMP-07", "WRAP-07")
def test_by_hand_and_by_policy_in_one_tree(lab):
    reference = lab.make(lab.Deep)
    model = copy.deepcopy(reference)
    fully_shard(model.u1, strategy=S.SHARD_GRAD_OP)
    fully_shard(model, policy=policies(lab, "units"))
    strategies = {unit.module: unit.config.strategy for unit in lab.units(model)}
    assert strategies[model.u1] is S.SHARD_GRAD_OP
    assert strategies[model.u2] is S.FULL_SHARD
    assert len(strategies) == 4
    lab.loss(model, lab.batch()).backward()
    lab.reference_step(reference, lab.batches())
    lab.assert_grads(model, reference)
    ambiguous = lab.make(lab.Deep)
    fully_shard(ambiguous.u2)
    with pytest.raises(ValueError, match=r"u2\.seq\.1 \(chosen by the policy, inside the unit u2\)"):
        fully_shard(ambiguous, policy=policies(lab, "units"))


@pytest.mark.world(2)
@pytest.mark.covers("COMP-05", "COMP-19", "MP-12", "WRAP-15")
def test_every_module_and_buffer_follows_its_nearest_unit(lab):
    model = lab.make(lab.Deep, dtype=torch.float32)
    model.u1.register_buffer("mine", torch.ones(1))
    model.register_buffer("top", torch.ones(1))
    fully_shard(model.u1, mixed_precision=MixedPrecision(buffer_dtype=torch.bfloat16))
    fully_shard(model, policy=policies(lab, "units"), mixed_precision=MixedPrecision(buffer_dtype=torch.float16))
    model(lab.batch().float())
    assert (model.u1.mine.dtype, model.top.dtype) == (torch.bfloat16, torch.float16)
    covered = [module for unit in lab.units(model) for module in unit.modules]
    assert len(covered) == len(set(covered))
    assert set(covered) == set(model.modules())


@pytest.mark.world(2)
@pytest.mark.covers("COMP-11", "MP-15")
@pytest.mark.filterwarnings("ignore:The `NO_SHARD` sharding strategy:FutureWarning")
def test_a_sharded_child_under_a_replicated_root(lab):
    reference = lab.make(lab.Deep)
    model = copy.deepcopy(reference)
    fully_shard(model.u1)
    fully_shard(model, strategy=S.NO_SHARD)
    with lab.collectives() as seen:
        lab.loss(model, lab.batch()).backward()
    assert {call.unit for call in seen if call.op == "all_gather"} == {"u1"}
    lab.reference_step(reference, lab.batches())
    lab.assert_grads(model, reference)
    assert model.l1.weight.shape == (4, 3)


@pytest.mark.world(2)
@pytest.mark.covers("COMP-18", "B020")
def test_hooks_of_users_see_full_parameters(lab):
    seen = []
    model = lab.make(lab.Deep)
    model.u1.register_forward_pre_hook(lambda m, args: seen.append(("pre", m.l1.weight.dim())))
    fully_shard(model, policy=policies(lab, "units"))
    model.u1.register_forward_hook(lambda m, args, out: seen.append(("post early", m.l1.weight.dim())) or None)
    model.u1.register_forward_pre_hook(lambda m, args, kwargs: seen.append(("kw", m.l1.weight.dim())), with_kwargs=True)
    lab.loss(model, lab.batch()).backward()
    assert ("pre", 2) in seen
    assert ("kw", 2) in seen
