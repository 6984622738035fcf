"""fully_shard and replicate on a user's own module, and the two paths side by side."""

from __future__ import annotations

import copy
from contextlib import ExitStack

import pytest
import torch
from torch import nn

from fsdp_ref import FullyShardedDataParallel as FSDP
from fsdp_ref import MixedPrecision, ShardingStrategy
from fsdp_ref.annotations import unit_of
from fsdp_ref.composable import _get_registry, fully_shard, replicate
from fsdp_ref.naming import clean_tensor_name
from fsdp_ref.traversal import (
    _get_fsdp_handles,
    _get_fsdp_root_states,
    _get_fsdp_states,
    _get_fsdp_states_with_modules,
    _get_param_to_fqns,
    _is_fsdp_flattened,
)
from fsdp_ref.wrap import CustomPolicy, ModuleWrapPolicy, always_wrap_policy

S = ShardingStrategy


class Unit(nn.Module):
    def __init__(self):
        super().__init__()
        self.l1 = nn.Linear(4, 4)
        self.seq = nn.Sequential(nn.ReLU(), nn.Linear(4, 4), nn.ReLU())
        self.l2 = nn.Linear(4, 4)

    def forward(self, x):
        return self.l2(self.seq(self.l1(x)))


class Deep(nn.Module):
    """Units in units: l1, u1, u2 with sub-units, l2."""

    def __init__(self):
        super().__init__()
        self.l1 = nn.Linear(3, 4)
        self.u1, self.u2 = Unit(), Unit()
        self.u2.seq[1] = Unit()
        self.l2 = nn.Linear(4, 1)

    def forward(self, x):
        return self.l2(self.u2(self.u1(self.l1(x))))


POLICIES = {
    "none": None,
    "units": ModuleWrapPolicy({Unit}),
    "sequentials": ModuleWrapPolicy({nn.Sequential}),
    "both": ModuleWrapPolicy({Unit, nn.Sequential}),
    "linears": ModuleWrapPolicy({nn.Linear}),
    "custom": CustomPolicy(lambda m: isinstance(m, Unit)),
}


def described(lab, model):
    return [
        (unit.name, [clean_tensor_name(fqn) for fqn in unit.handle.fqns], unit.handle.layout.numel)
        for unit in lab.units(model)
        if unit.handle is not None
    ]


@pytest.mark.world(2)
@pytest.mark.covers("COMP-04", "COMP-06", "COMP-10", "COMP-08", "TRAV-02", "B009", "B015", "B017")
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("strategy", [S.FULL_SHARD, S.SHARD_GRAD_OP], ids=lambda s: s.name)
def test_both_paths_have_the_same_units_and_do_the_same_in_the_same_order(lab, policy, strategy):
    wrapped = lab.shard(lab.make(Deep), "wrapper", policy=POLICIES[policy], sharding_strategy=strategy)
    composed = lab.shard(lab.make(Deep), "composable", policy=POLICIES[policy], sharding_strategy=strategy)
    assert_alike(lab, wrapped, composed)


def assert_alike(lab, wrapped, composed):
    logs = []
    for model in (wrapped, composed):
        with lab.events() as events, lab.collectives() as calls:
            for step in range(3):
                lab.loss(model, lab.batch(step)).backward()
                torch.optim.SGD(model.parameters(), lr=0.1).step()
        steps = [(e.kind, e.unit, e.fqns, e.prefetch, e.freed) for e in events]
        logs.append((steps, [(c.op, c.tensor.numel(), c.label) for c in calls]))
    assert described(lab, wrapped) == described(lab, composed)
    assert logs[0] == logs[1]
    assert len(logs[0][0]) >= 3 * 2 * len(described(lab, wrapped))
    a, b = lab.params(wrapped), lab.params(composed)
    assert all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.world(2)
@pytest.mark.covers("COMP-04", "COMP-07", "COMP-08", "B011", "B017")
def test_both_paths_nested_by_hand(lab):
    composed, wrapped = lab.make(Deep), lab.make(Deep)
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
    models = [lab.make(Deep), lab.make(Deep)]
    for model in models:
        replicate(model.u1)
        replicate(model.u2.seq[1])
    wrapped = lab.shard(models[0], "wrapper", policy=POLICIES[policy])
    composed = lab.shard(models[1], "composable", policy=POLICIES[policy])
    assert_alike(lab, wrapped, composed)
    names = {f"{unit}.{fqn}" for unit, fqns, _ in described(lab, composed) for fqn in fqns}
    assert not any("u1" in name or "seq.1" in name for name in names)


@pytest.mark.filterwarnings("ignore:The `NO_SHARD` sharding strategy:FutureWarning")
@pytest.mark.world(2)
@pytest.mark.covers("COMP-09", "COMP-11")
@pytest.mark.parametrize("strategy", [S.FULL_SHARD, S.SHARD_GRAD_OP, S.NO_SHARD], ids=lambda s: s.name)
def test_five_adam_steps(lab, strategy):
    lab.parity(Deep, "composable", policy=POLICIES["units"], strategy=strategy, steps=5)


@pytest.mark.world(2)
@pytest.mark.covers("COMP-01", "COMP-16", "COMP-02", "CON-02", "CON-04")
def test_the_module_stays_itself(lab):
    plain = lab.make(Deep)
    names = [name for name, _ in plain.named_parameters()]
    modules = [(name, type(module)) for name, module in plain.named_modules()]
    state_keys = list(plain.state_dict())
    assert _get_registry(plain) is None
    assert fully_shard.state(plain) is None
    assert fully_shard(plain, policy=POLICIES["units"]) is plain
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
            fully_shard(lab.make(Deep), policy=policy)


@pytest.mark.world(2)
@pytest.mark.covers("COMP-07", "B011", "COMP-08")
def test_manual_nesting_shares_one_root(lab):
    reference = lab.make(Deep)
    model = copy.deepcopy(reference)
    for sub in (model.u2.seq[1], model.u2, model.u1):
        fully_shard(sub)
    fully_shard(model)
    by_policy = lab.shard(copy.deepcopy(reference), "composable", policy=POLICIES["units"])
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
    reference = lab.make(Deep)
    model = copy.deepcopy(reference)
    fully_shard(model.u1, strategy=S.SHARD_GRAD_OP)
    fully_shard(model, policy=POLICIES["units"])
    strategies = {unit.module: unit.config.strategy for unit in lab.units(model)}
    assert strategies[model.u1] is S.SHARD_GRAD_OP
    assert strategies[model.u2] is S.FULL_SHARD
    assert len(strategies) == 4
    lab.loss(model, lab.batch()).backward()
    lab.reference_step(reference, lab.batches())
    lab.assert_grads(model, reference)
    ambiguous = lab.make(Deep)
    fully_shard(ambiguous.u2)
    with pytest.raises(ValueError, match=r"u2\.seq\.1 \(chosen by the policy, inside the unit u2\)"):
        fully_shard(ambiguous, policy=POLICIES["units"])


@pytest.mark.world(2)
@pytest.mark.covers("COMP-05", "COMP-19", "MP-12", "WRAP-15")
def test_every_module_and_buffer_follows_its_nearest_unit(lab):
    model = lab.make(Deep, dtype=torch.float32)
    model.u1.register_buffer("mine", torch.ones(1))
    model.register_buffer("top", torch.ones(1))
    fully_shard(model.u1, mixed_precision=MixedPrecision(buffer_dtype=torch.bfloat16))
    fully_shard(model, policy=POLICIES["units"], mixed_precision=MixedPrecision(buffer_dtype=torch.float16))
    model(lab.batch().float())
    assert (model.u1.mine.dtype, model.top.dtype) == (torch.bfloat16, torch.float16)
    covered = [module for unit in lab.units(model) for module in unit.modules]
    assert len(covered) == len(set(covered))
    assert set(covered) == set(model.modules())


@pytest.mark.world(2)
@pytest.mark.covers("COMP-11", "MP-15")
@pytest.mark.filterwarnings("ignore:The `NO_SHARD` sharding strategy:FutureWarning")
def test_a_sharded_child_under_a_replicated_root(lab):
    reference = lab.make(Deep)
    model = copy.deepcopy(reference)
    fully_shard(model.u1)
    fully_shard(model, strategy=S.NO_SHARD)
    with lab.collectives() as seen:
        lab.loss(model, lab.batch()).backward()
    assert {call.label.split(":")[0] for call in seen if call.op == "all_gather"} == {"u1"}
    lab.reference_step(reference, lab.batches())
    lab.assert_grads(model, reference)
    assert model.l1.weight.shape == (4, 3)


@pytest.mark.world(2)
@pytest.mark.covers("COMP-18", "B020")
def test_hooks_of_users_see_full_parameters(lab):
    seen = []
    model = lab.make(Deep)
    model.u1.register_forward_pre_hook(lambda m, args: seen.append(("pre", m.l1.weight.dim())))
    fully_shard(model, policy=POLICIES["units"])
    model.u1.register_forward_hook(lambda m, args, out: seen.append(("post early", m.l1.weight.dim())) or None)
    model.u1.register_forward_pre_hook(lambda m, args, kwargs: seen.append(("kw", m.l1.weight.dim())), with_kwargs=True)
    lab.loss(model, lab.batch()).backward()
    assert ("pre", 2) in seen
    assert ("kw", 2) in seen


@pytest.mark.world(2)
@pytest.mark.covers("TRAV-01", "TRAV-02", "TRAV-04", "TRAV-05", "TRAV-06")
def test_looking_into_a_tree(lab, path):
    reference = lab.make(Deep)
    model = lab.shard(copy.deepcopy(reference), path, policy=POLICIES["units"])
    states, holders = _get_fsdp_states_with_modules(model)
    assert states == _get_fsdp_states(model) == lab.units(model)
    assert [unit.handle for unit in states] == _get_fsdp_handles(model)
    assert holders == FSDP.fsdp_modules(model)
    order = {module: index for index, module in enumerate(model.modules())}
    assert [order[holder] for holder in holders] == sorted(order[holder] for holder in holders)
    assert _get_fsdp_root_states(model) == [states[0]]
    names = [fqn for fqns in _get_param_to_fqns(model).values() for fqn in fqns]
    assert sorted(names) == sorted(name for name, _ in reference.named_parameters())
    assert all(_is_fsdp_flattened(p) for p in model.parameters())


# ------------------------------------------------------------------------------------------------------- replicate


def unwrapped_step(lab, reference, step):
    lab.reference_step(reference, lab.batches(step))


MIXES = {
    "1fm,1r": lambda m: (fully_shard(m.u1), replicate(m.u2)),
    "1r,1fm": lambda m: (replicate(m.u1), fully_shard(m.u2)),
    "1r,1fa": lambda m: (replicate(m.u1), fully_shard(m.u2, policy=POLICIES["linears"])),
    "1r1fm,1fm": lambda m: (fully_shard(m.u1.seq), replicate(m.u1), fully_shard(m.u2)),
    "1r1fa,1fm": lambda m: (fully_shard(m.u1.seq, policy=POLICIES["linears"]), replicate(m.u1), fully_shard(m.u2)),
    "1fm1fm,1r1r,1fm": lambda m: (
        fully_shard(m.u1.seq),
        fully_shard(m.u1),
        replicate(m.u2.l1),
        replicate(m.u2.seq),
        fully_shard(m.u2.l2),
    ),
}


@pytest.mark.world(2)
@pytest.mark.covers("REP-01", "REP-02", "REP-04", "B010")
@pytest.mark.parametrize("mix", MIXES)
def test_replicated_and_sharded_parts_train_like_one_process(lab, mix):
    reference = lab.make(Deep)
    model = copy.deepcopy(reference)
    MIXES[mix](model)
    covered = {id(p) for m in (model.u1, model.u2) for p in m.parameters()}
    rest = [(n, p) for n, p in model.named_parameters() if id(p) not in covered]
    optim = torch.optim.Adam(model.parameters(), lr=0.05)
    reference_optim = torch.optim.Adam(reference.parameters(), lr=0.05)
    for step in range(3):
        lab.loss(model, lab.batch(step)).backward()
        for _, p in rest:  # what nobody manages, as DistributedDataParallel around it would do
            torch.distributed.all_reduce(p.grad)
            p.grad.div_(lab.world.size)
        optim.step()
        optim.zero_grad()
        lab.reference_step(reference, lab.batches(step), optim=reference_optim)
        # What lies in a replicated subtree is not reached from above it.
        with ExitStack() as stack:
            for module in model.modules():
                if unit_of(module) is not None:
                    stack.enter_context(lab.full(module, recurse=False, writeback=False))
            for name, p in model.named_parameters():
                torch.testing.assert_close(p.detach(), reference.get_parameter(name).detach(), **lab.CLOSE, msg=name)


@pytest.mark.world(2)
@pytest.mark.covers("REP-01", "TRAV-03", "B010", "IGN-01")
def test_a_replicated_subtree_inside_a_sharded_module(lab):
    reference = lab.make(Deep)
    model = copy.deepcopy(reference)
    fully_shard(model.u2.seq[1])
    replicate(model.u2)
    fully_shard(model, policy=POLICIES["units"])
    assert [unit.name or "root" for unit in lab.units(model)] == ["root", "root"] or len(lab.units(model)) == 2
    held = {fqn for unit in lab.units(model) for fqn in unit.handle.fqns}
    assert not any("u2" in fqn for fqn in held)
    with lab.collectives() as seen:
        lab.loss(model, lab.batch()).backward()
    lab.reference_step(reference, lab.batches())
    for name, p in model.u2.named_parameters():
        if "seq.1" not in name:
            torch.testing.assert_close(p.grad, reference.u2.get_parameter(name).grad, **lab.CLOSE, msg=name)
    assert sum(call.op == "all_reduce" for call in seen) == 1
    with lab.full(model):
        names = {name for name, _ in model.named_parameters()}
    assert names == {name for name, _ in reference.named_parameters()}


@pytest.mark.world(2)
@pytest.mark.covers("REP-02")
def test_names_of_what_is_replicated(lab):
    model = lab.make(Deep)
    fully_shard(model.u1)
    replicate(model, ignored_modules=[model.l2])
    replica = replicate.state(model).replica
    model(lab.batch())
    want = [name for name, _ in lab.make(Deep).named_parameters() if name.split(".")[0] not in ("u1", "l2")]
    assert replica.param_names == want


@pytest.mark.world(2)
@pytest.mark.covers("REP-03", "CON-02")
def test_both_on_one_module(lab):
    for first, second in ((replicate, fully_shard), (fully_shard, replicate)):
        module = lab.make(Deep)
        first(module)
        with pytest.raises((AssertionError, RuntimeError), match="Cannot apply .*replicate"):
            second(module)
        lab.loss(module, lab.batch()).backward()
    module = lab.make(Deep)
    replicate(module)
    with pytest.raises(AssertionError, match="replicate has already been applied"):
        replicate(module)


@pytest.mark.world(2)
@pytest.mark.covers("REP-05")
def test_devices_and_options_of_replicate(lab):
    module = lab.make(Deep)
    replicate(module, device_id=torch.device("cpu"), find_unused_parameters=True, bucket_cap_mb=1)
    assert replicate.state(module).replica.device_ids is None
    with pytest.raises(RuntimeError, match="Expected device_id to be int or torch.device"):
        replicate(lab.make(Deep), device_id=[torch.device("cpu")])
    with pytest.raises(TypeError, match="no_such_option"):
        replicate(lab.make(Deep), no_such_option=1)
    with pytest.raises(NotImplementedError, match="mixed_precision"):
        replicate(lab.make(Deep), mixed_precision=object())
    empty = replicate(nn.ReLU())
    with pytest.raises(ValueError, match="parameters of its own"):
        empty(lab.batch())


@pytest.mark.world([2, 3])
@pytest.mark.covers("REP-04", "B159", "B160", "B161", "B163", "B164", "B167")
@pytest.mark.parametrize("schedule", ["s", "ns", "nns", "ss", "FFbb", "inside-outside", "retain"])
def test_replicate_under_every_schedule(lab, schedule):
    reference = lab.make(Deep)
    model = replicate(copy.deepcopy(reference), static_graph=True, gradient_as_bucket_view=True)
    replica = replicate.state(model).replica
    if schedule == "FFbb":
        losses = [lab.loss(model, lab.batch(step)) for step in range(2)]
        for loss in losses:
            loss.backward()
        steps = [0, 1]
    elif schedule == "inside-outside":
        with replica.no_sync():
            loss = lab.loss(model, lab.batch(0))
        loss.backward()
        steps = [0]
    elif schedule == "retain":
        loss = lab.loss(model, lab.batch(0))
        loss.backward(retain_graph=True)
        loss.backward()
        steps = [0, 0]
    else:
        for step, kind in enumerate(schedule):
            if kind == "n":
                with replica.no_sync(), lab.collectives() as seen:
                    lab.loss(model, lab.batch(step)).backward()
                assert not any(call.op == "all_reduce" for call in seen)
            else:
                lab.loss(model, lab.batch(step)).backward()
        steps = list(range(len(schedule)))
    for step in steps:
        lab.reference_step(reference, lab.batches(step))
    for (name, p), q in zip(model.named_parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, **lab.CLOSE, msg=name)


@pytest.mark.world(2)
@pytest.mark.covers("B162", "B164", "B037", "REP-04")
def test_replicate_with_changing_use_and_thawing(lab):
    class Routed(nn.Module):
        def __init__(self):
            super().__init__()
            self.paths = nn.ModuleList(nn.Linear(3, 3) for _ in range(3))
            self.paths[2].requires_grad_(False)

        def forward(self, x, which):
            return sum(self.paths[i](x) for i in which)

    reference = lab.make(Routed)
    model = replicate(copy.deepcopy(reference))
    uses = {0: [(0,), (1,), (0, 1), (0, 2)], 1: [(1,), (1,), (0,), (2, 1)]}
    for step in range(4):
        if step == 3:
            model.paths[2].requires_grad_(True)
            reference.paths[2].requires_grad_(True)
        model(lab.batch(step), uses[lab.world.rank][step]).square().mean().backward()
        for rank, batch in enumerate(lab.batches(step)):
            (reference(batch, uses[rank][step]).square().mean() / lab.world.size).backward()
        for (name, p), q in zip(model.named_parameters(), reference.parameters(), strict=True):
            assert (p.grad is None) == (q.grad is None), name
            if q.grad is not None:
                torch.testing.assert_close(p.grad, q.grad, **lab.CLOSE, msg=name)


@pytest.mark.world(2)
@pytest.mark.covers("REP-04")
def test_replicas_start_equal_and_buffers_follow_rank_zero(lab):
    model = lab.make(lambda: lab.Block(3), seed=lab.world.rank)
    model.scale.fill_(float(lab.world.rank + 1))
    replicate(model)
    model(lab.batch())
    for p in model.parameters():
        lab.world.assert_equal_across_ranks(p)
    assert float(model.scale) == 1.0
    model.scale.fill_(float(lab.world.rank + 5))
    model(lab.batch())
    assert float(model.scale) == 5.0


@pytest.mark.world(2)
@pytest.mark.covers("REP-04")
@pytest.mark.parametrize("bucket_cap_mb", [1e-5, 25])
def test_buckets_of_any_size_and_mixed_dtypes(lab, bucket_cap_mb):
    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)
            self.none = nn.Parameter(torch.empty(0))

        def forward(self, x):
            return self.b(self.a(x).float()).double() + self.none.sum()

    reference = lab.make(Mixed)
    reference.b.float()
    model = replicate(copy.deepcopy(reference), bucket_cap_mb=bucket_cap_mb)
    lab.loss(model, lab.batch()).backward()
    lab.reference_step(reference, lab.batches())
    for (name, p), q in zip(model.named_parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-5, atol=1e-7, msg=name)
