"""Parameters that change between a forward and its backward: refused exactly where one process refuses.

Autograd refuses a backward that needs a value which was changed in place after it was saved. Sharded parameters are
gathered anew for backward, so that the gradient would be that of no weights at all, without a word.
"""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from fsdp_ref import ShardingStrategy
from fsdp_ref.errors import ParametersChangedError

S = ShardingStrategy
pytestmark = pytest.mark.filterwarnings("ignore:The `NO_SHARD` sharding strategy:FutureWarning")
strategies = pytest.mark.parametrize("strategy", [S.FULL_SHARD, S.SHARD_GRAD_OP, S.NO_SHARD], ids=lambda s: s.name)


def edit(model, names=("weight",)):
    """Scale what users see of the named parameters, in place."""
    with torch.no_grad():
        for name, param in model.named_parameters():
            if name.endswith((*names, "_flat_param")):
                param.mul_(1.5)


def refused(model, run):
    """Run, and return what was refused and whether the wording is ours."""
    try:
        run(model)
    except RuntimeError as error:
        return "inplace" in str(error).replace("-", ""), isinstance(error, ParametersChangedError)
    return False, False


def step_between(lab):
    def run(model, batches=None):
        first, second = batches or (lab.batch(0), lab.batch(1))
        one, two = lab.loss(model, first), lab.loss(model, second)
        one.backward()
        torch.optim.SGD(model.parameters(), lr=0.1).step()
        two.backward()

    return run


def edit_between(lab):
    def run(model):
        loss = lab.loss(model, lab.batch())
        edit(model)
        loss.backward()

    return run


def retained(lab):
    def run(model):
        loss = lab.loss(model, lab.batch())
        loss.backward(retain_graph=True)
        torch.optim.SGD(model.parameters(), lr=0.1).step()
        loss.backward()

    return run


def other_order(lab):
    def run(model):
        one, two = lab.loss(model, lab.batch(0)), lab.loss(model, lab.batch(1))
        two.backward()
        torch.optim.SGD(model.parameters(), lr=0.1).step()
        one.backward()

    return run


@pytest.mark.world([2, 3])
@strategies
@pytest.mark.parametrize("changes", [step_between, edit_between, retained, other_order])
def test_what_one_process_refuses_is_refused_on_every_rank(lab, path, strategy, changes):
    reference = lab.make()
    assert refused(copy.deepcopy(reference), changes(lab)) == (True, False)
    model = lab.shard(copy.deepcopy(reference), path, policy={lab.Block}, sharding_strategy=strategy)
    with pytest.raises(ParametersChangedError) as info:
        changes(lab)(model)
    message = str(info.value)
    assert "weight" in message
    assert "before" in message  # what to do
    # The model goes on.
    model.zero_grad()
    lab.loss(model, lab.batch()).backward()


@pytest.mark.world(2)
@strategies
@pytest.mark.parametrize("options", [{}, {"rank0_only": True}], ids=["all ranks", "rank 0"])
@pytest.mark.parametrize("how", ["in place", "replaced"])
def test_an_edit_inside_a_summon(lab, path, strategy, options, how):
    model = lab.shard(lab.make(), path, policy={lab.Block}, sharding_strategy=strategy)
    loss = lab.loss(model, lab.batch())
    with lab.full(model, **options), torch.no_grad():
        if not options or lab.world.rank == 0:
            for _, param in model.named_parameters():
                if how == "in place":
                    param.mul_(1.5)
                else:
                    param.data = param.data * 1.5
    # One process that assigns .data goes on with the old memory, if autograd saved a view of it. Here it is gone.
    with pytest.raises(ParametersChangedError):
        loss.backward()


@pytest.mark.world(2)
@strategies
@pytest.mark.parametrize("options", [{}, {"rank0_only": True}, {"writeback": False}], ids=str)
def test_looking_at_full_parameters_is_no_edit(lab, path, strategy, options):
    reference = lab.make()
    model = lab.shard(copy.deepcopy(reference), path, policy={lab.Block}, sharding_strategy=strategy)
    loss = lab.loss(model, lab.batch())
    with lab.full(model, **options):
        sum(param.detach().sum() for param in model.parameters())
    loss.backward()
    lab.reference_step(reference, lab.batches())
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    torch.optim.SGD(reference.parameters(), lr=0.1).step()
    lab.assert_params(model, reference)


class NeedsNoWeight(nn.Module):
    """Backward reads neither the first weight (its input is data) nor any bias."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, x):
        return self.second(torch.tanh(self.first(x)))


@pytest.mark.world([2, 3])
@strategies
@pytest.mark.parametrize("names", [("bias",), ("first.weight",), ("bias", "first.weight")], ids=str)
def test_an_edit_that_backward_does_not_need_is_kept(lab, orig_path, strategy, names):
    """As in one process: the gradient is right, and the edited value stays."""
    reference = lab.make(NeedsNoWeight)
    model = lab.shard(copy.deepcopy(reference), orig_path, sharding_strategy=strategy)

    def run(m, batches):
        losses = [lab.loss(m, batch) for batch in batches]
        edit(m, names)
        (sum(losses) / len(losses)).backward()
        optim.step()

    optim = torch.optim.SGD(model.parameters(), lr=0.1)
    run(model, [lab.batch()])
    optim = torch.optim.SGD(reference.parameters(), lr=0.1)
    run(reference, lab.batches())
    lab.assert_params(model, reference)


@pytest.mark.world([2, 3])
@strategies
def test_a_step_of_parameters_that_backward_does_not_need(lab, orig_path, strategy):
    reference = lab.make(NeedsNoWeight)
    model = lab.shard(copy.deepcopy(reference), orig_path, sharding_strategy=strategy)

    def run(m, first, second):
        biases = [param for name, param in m.named_parameters() if name.endswith("bias")]
        one = sum(lab.loss(m, batch) for batch in first) / len(first)
        two = sum(lab.loss(m, batch) for batch in second) / len(second)
        one.backward()
        torch.optim.SGD(biases, lr=0.1).step()
        two.backward()
        torch.optim.SGD(m.parameters(), lr=0.1).step()

    run(model, [lab.batch(0)], [lab.batch(1)])
    run(reference, lab.batches(0), lab.batches(1))
    lab.assert_params(model, reference)


@pytest.mark.world(2)
@strategies
def test_checkpointed_forwards_compute_with_the_edited_values(lab, orig_path, strategy):
    """Nothing was saved, so one process computes again with what is there, and says nothing."""
    from torch.utils.checkpoint import checkpoint

    class Again(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin = nn.Linear(3, 3)

        def forward(self, x):
            return checkpoint(self.lin, x, use_reentrant=False)

    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = Again(), Again()

        def forward(self, x):
            return self.b(self.a(x))

    reference = lab.make(Two)
    model = lab.shard(copy.deepcopy(reference), orig_path, policy={Again}, sharding_strategy=strategy)

    def run(m, batches):
        loss = sum(lab.loss(m, batch) for batch in batches) / len(batches)
        edit(m)
        loss.backward()
        torch.optim.SGD(m.parameters(), lr=0.1).step()

    run(model, [lab.batch()])
    run(reference, lab.batches())
    lab.assert_params(model, reference)


@pytest.mark.world(2)
@strategies
def test_ignored_parameters_keep_the_check_of_autograd(lab, orig_path, strategy):
    class Scales(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(3))

        def forward(self, x):
            return x * self.scale

    class Whole(nn.Module):
        def __init__(self):
            super().__init__()
            self.inp, self.scales, self.out = nn.Linear(3, 3), Scales(), nn.Linear(3, 1)

        def forward(self, x):
            return self.out(self.scales(self.inp(x)))

    plain = lab.make(Whole)
    model = lab.shard(plain, orig_path, sharding_strategy=strategy, ignored_modules=[plain.scales])
    loss = lab.loss(model, lab.batch())
    with torch.no_grad():
        plain.scales.scale.mul_(2.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.world(2)
@strategies
def test_legal_orders_stay_legal(lab, path, strategy):
    """Accumulation, several forwards, evaluation in between, steps after the last backward."""
    reference = lab.make()
    model = lab.shard(copy.deepcopy(reference), path, policy={lab.Block}, sharding_strategy=strategy)
    ours, plain = (torch.optim.Adam(m.parameters(), lr=0.05) for m in (model, reference))
    for step in range(3):
        one, two = lab.loss(model, lab.batch(step)), lab.loss(model, lab.batch(step + 10))
        two.backward()
        one.backward()
        with torch.no_grad():
            model(lab.batch())
        lab.loss(model, lab.batch(step + 20)).backward()
        ours.step()
        ours.zero_grad()
        for batch in (*lab.batches(step), *lab.batches(step + 10), *lab.batches(step + 20)):
            (lab.loss(reference, batch) / lab.world.size).backward()
        plain.step()
        plain.zero_grad()
        lab.assert_params(model, reference)


@pytest.mark.world(2)
@pytest.mark.parametrize("strategy", [S.FULL_SHARD, S.SHARD_GRAD_OP], ids=lambda s: s.name)
def test_an_edit_between_micro_batches_reaches_the_next_forward(lab, orig_path, strategy):
    """What an accumulation left gathered is out of date by then."""
    from fsdp_ref.composable import no_sync

    reference = lab.make()
    model = lab.shard(copy.deepcopy(reference), orig_path, policy={lab.Block}, sharding_strategy=strategy)
    with no_sync(model):
        lab.loss(model, lab.batch(0)).backward()
    edit(model)
    lab.loss(model, lab.batch(1)).backward()
    lab.reference_step(reference, lab.batches(0))
    edit(reference)
    lab.reference_step(reference, lab.batches(1))
    lab.assert_grads(model, reference)
