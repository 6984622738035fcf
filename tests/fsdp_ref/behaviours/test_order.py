"""In which order units gather and free, on both paths."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fsdp_ref import BackwardPrefetch, ShardingStrategy
from fsdp_ref.runtime.events import UnitEventKind

S = ShardingStrategy
PRE, POST = BackwardPrefetch.BACKWARD_PRE, BackwardPrefetch.BACKWARD_POST


class Root(nn.Module):
    """A layer of the root's own, then three units a, b, c; numbered 0 to 3 below."""

    def __init__(self):
        super().__init__()
        self.inp = nn.Linear(3, 3)
        self.a, self.b, self.c = Unit(), Unit(), Unit()

    def forward(self, x):
        return self.c(self.b(self.a(self.inp(x))))


class Unit(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(3, 3)

    def forward(self, x):
        return torch.tanh(self.lin(x))


def numbers(lab, model):
    return {unit.name: index for index, unit in enumerate(lab.units(model))}


def trace(lab, model, events):
    """Events as U3 (unshard call), R1 (reshard), R0k (reshard that keeps the storage)."""
    number = numbers(lab, model)
    out = []
    for event in events:
        if event.kind.name == "UNSHARD":
            out.append(f"U{number[event.unit]}")
        elif event.kind.name == "RESHARD":
            out.append(f"R{number[event.unit]}" + ("" if event.freed else "k"))
    return " ".join(out)


def iteration(lab, model, step=0, batch=None):
    with lab.events() as forward:
        output = model(lab.batch(step) if batch is None else batch)
    with lab.events() as backward:
        output.square().mean().backward()
    return trace(lab, model, forward), trace(lab, model, backward)


@pytest.mark.world(2)
@pytest.mark.covers("ORD-01", "ORD-02", "ORD-03", "COMP-08", "B017", "B044")
@pytest.mark.parametrize(
    ("prefetch", "backward"),
    [
        (None, "U3 U0 R3 U2 R2 U1 R1 R0"),
        (PRE, "U3 U2 U0 R3 U1 R2 R1 R0"),
        (POST, "U3 U0 R3 U2 R2 U1 R1 R0"),
    ],
    ids=["none", "pre", "post"],
)
@pytest.mark.parametrize("path", ["wrapper", "flat"])
def test_full_shard(lab, path, prefetch, backward):
    model = lab.shard(lab.make(Root), path, policy={Unit}, backward_prefetch=prefetch)
    for step in range(2):
        assert iteration(lab, model, step) == ("U0 U1 R1 U2 R2 U3 R3 R0k", backward)


@pytest.mark.world(2)
@pytest.mark.covers("ORD-02", "COMP-03", "COMP-08", "B009", "B017")
def test_the_composable_path_does_the_same(lab):
    model = lab.shard(lab.make(Root), "composable", policy={Unit})
    for step in range(2):
        assert iteration(lab, model, step) == ("U0 U1 R1 U2 R2 U3 R3 R0k", "U3 U2 U0 R3 U1 R2 R1 R0")
    config = lab.units(model)[0].config
    assert (config.backward_prefetch, config.forward_prefetch, config.limit_all_gathers) == (PRE, False, True)
    assert config.use_orig_params


@pytest.mark.world(2)
@pytest.mark.covers("ORD-04", "ORD-05", "ORD-09", "ORD-15")
@pytest.mark.parametrize("warm_up", [False, True])
def test_forward_prefetch_starts_with_the_second_iteration(lab, path, warm_up):
    model = lab.shard(lab.make(Root), path, policy={Unit}, forward_prefetch=True)
    if warm_up:
        with torch.no_grad():
            model(lab.batch())
    else:
        assert iteration(lab, model)[0] == "U0 U1 R1 U2 R2 U3 R3 R0k"
    for step in (1, 2):
        forward, backward = iteration(lab, model, step)
        assert forward == "U0 U1 U2 R1 U3 R2 R3 R0k"
        assert sorted(backward.split()) == sorted("U3 U0 U2 R3 U1 R2 R1 R0".split())


@pytest.mark.filterwarnings("ignore:The `NO_SHARD` sharding strategy:FutureWarning")
@pytest.mark.world(2)
@pytest.mark.covers("ORD-06")
def test_other_strategies_keep_the_call_order(lab, path):
    model = lab.shard(lab.make(Root), path, policy={Unit}, sharding_strategy=S.SHARD_GRAD_OP)
    forward, backward = iteration(lab, model)
    assert forward == "U0 U1 R1k U2 R2k U3 R3k R0k"
    assert sorted(backward.split()) == sorted("U3 U2 U0 R3 U1 R2 R1 R0".split())
    model = lab.shard(lab.make(Root), path, policy={Unit}, sharding_strategy=S.NO_SHARD)
    forward, backward = iteration(lab, model)
    assert forward == "U0 U1 R1k U2 R2k U3 R3k R0k"
    assert all(step.endswith("k") for step in backward.split() if step[0] == "R")


@pytest.mark.world(2)
@pytest.mark.covers("ORD-07")
def test_whose_backward_begins_first_depends_on_whose_output_it_is(lab, path):
    class Multiplies(Root):
        def forward(self, x):
            return super().forward(x) * 2.0

    for root, first in ((Root, ["c", ""]), (Multiplies, ["", "c"])):
        model = lab.shard(lab.make(root), path, policy={Unit})
        with lab.events() as seen:
            model(lab.batch()).square().mean().backward()
        begun = [event.unit for event in seen if event.kind.name == "PRE_BACKWARD"]
        assert begun[:2] == first


@pytest.mark.world(2)
@pytest.mark.covers("ORD-10", "ORD-08")
@pytest.mark.parametrize("prefetch", [PRE, POST], ids=["pre", "post"])
def test_what_is_prefetched_over_a_deep_stack(lab, prefetch):
    model = lab.shard(lab.make(lambda: lab.Net(blocks=6)), policy={lab.Block}, backward_prefetch=prefetch)
    output = model(lab.batch())
    with lab.events() as seen:
        output.square().mean().backward()
    ahead = [event.unit for event in seen if event.kind.name == "UNSHARD" and event.prefetch]
    asked = [event.unit for event in seen if event.kind.name == "UNSHARD"]
    assert ahead == [f"blocks.{i}" for i in ((5, 4, 3, 2, 1, 0) if prefetch is PRE else (4, 3, 2, 1, 0))]
    assert len(asked) == len(set(asked)), "nothing is asked for twice"


@pytest.mark.world(2)
@pytest.mark.covers("ORD-16")
def test_prefetch_under_no_grad_still_tracks(lab, path):
    reference = lab.make(Root)
    model = lab.shard(copy.deepcopy(reference), path, policy={Unit}, forward_prefetch=True)
    with torch.no_grad():
        model(lab.batch())
    model(lab.batch()).square().mean().backward()
    model.zero_grad()
    with torch.no_grad():
        model(lab.batch())
    model(lab.batch()).square().mean().backward()
    for batch in lab.batches():
        (reference(batch).square().mean() / lab.world.size).backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    torch.optim.SGD(reference.parameters(), lr=0.1).step()
    lab.assert_params(model, reference)


class Swaps(Root):
    """Runs b before a when asked to."""

    swap = False

    def forward(self, x):
        first, second = (self.b, self.a) if self.swap else (self.a, self.b)
        return self.c(second(first(self.inp(x))))


@pytest.mark.world(2)
@pytest.mark.covers("ORD-04", "ORD-08")
def test_forward_prefetch_follows_the_first_iteration_for_good(lab, path):
    """Also after later iterations ran in another order: what is gathered ahead is no guess from the latest one."""
    plain = lab.make(Swaps)
    model = lab.shard(plain, path, policy={Unit}, forward_prefetch=True)
    ahead = []
    for step in range(3):
        plain.swap = step > 0
        with lab.events() as events:
            loss = model(lab.batch(step)).sum()
        ahead.append([event.unit for event in events if event.prefetch and event.kind is UnitEventKind.UNSHARD])
        loss.backward()
    assert ahead == [[], ["a"], ["a"]]


@pytest.fixture
def detail(monkeypatch):
    before = dist.get_debug_level()
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    yield
    dist.set_debug_level(before)


@pytest.mark.world(2)
@pytest.mark.covers("ORD-12", "ORD-11", "B045")
def test_ranks_that_start_in_different_orders_all_hear_of_it(lab, path, detail):
    model = lab.make(Swaps)
    model.swap = lab.world.rank == 1
    model = lab.shard(model, path, policy={Unit})
    with pytest.raises(RuntimeError, match="^(Forward order differs across ranks)") as info:
        model(lab.batch())
    assert "a.lin.weight" in str(info.value)
    assert "b.lin.weight" in str(info.value)


@pytest.mark.world(2)
@pytest.mark.covers("ORD-13", "ORD-14", "ORD-11")
def test_a_later_deviation_warns_once_where_it_happens(lab, detail):
    import warnings

    plain = lab.make(Swaps)
    # Equal sizes keep the gathers matched although the order differs, so that only the warning is at stake.
    model = lab.shard(plain, policy={Unit})
    for step in range(2):
        model(lab.batch(step)).sum().backward()
    texts = []
    for step in range(3):
        plain.swap = True
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            if step == 0:
                model.eval()
                with torch.no_grad():
                    model(lab.batch(step))
                model.train()
            else:
                model(lab.batch(step)).sum().backward()
        texts.append([str(w.message) for w in caught if "Forward order differs" in str(w.message)])
    assert [len(found) for found in texts] == [0, 1, 0]
    assert f"from that of the first iteration on rank {lab.world.rank}. Collectives are unchecked" in texts[1][0]
