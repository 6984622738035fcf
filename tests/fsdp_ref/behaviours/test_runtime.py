"""Forward and backward in every order a program may run them."""

from __future__ import annotations

import copy
from collections import Counter, OrderedDict, namedtuple
from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from fsdp_ref import FullyShardedDataParallel as FSDP
from fsdp_ref import ShardingStrategy
from fsdp_ref.states import HandleTrainingState, TrainingState

S = ShardingStrategy
strategies = pytest.mark.parametrize("strategy", [S.FULL_SHARD, S.SHARD_GRAD_OP], ids=lambda s: s.name)


def step_both(model, reference):
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    torch.optim.SGD(reference.parameters(), lr=0.1).step()


def idle(lab, model):
    units = lab.units(model)
    assert {unit.training_state for unit in units} == {TrainingState.IDLE}
    assert {unit.phase for unit in units} == {HandleTrainingState.IDLE}
    assert not any(unit.handle.unsharded for unit in units if unit.handle)


@pytest.mark.world(2)
@pytest.mark.covers("RUN-01", "B026", "B135", "B159")
@pytest.mark.parametrize("schedule", ["FFbb", "FFbB", "FFFbbb", "FbFb", "FFb"])
@strategies
def test_forwards_and_backwards_interleaved(lab, path, strategy, schedule):
    """F: forward; b: backward of the oldest; B: backward of the newest."""
    reference = lab.make()
    model = lab.shard(copy.deepcopy(reference), path, policy={lab.Block}, sharding_strategy=strategy)
    waiting, done, step = [], [], 0
    for kind in schedule:
        if kind == "F":
            waiting.append((step, lab.loss(model, lab.batch(step))))
            step += 1
        else:
            which, loss = waiting.pop(0 if kind == "b" else -1)
            loss.backward()
            done.append(which)
    for which in done:
        lab.reference_step(reference, lab.batches(which))
    step_both(model, reference)
    lab.assert_params(model, reference)


@pytest.mark.world(2)
@pytest.mark.covers("RUN-02", "B026", "B159")
@strategies
def test_a_second_backward_through_one_graph(lab, path, strategy):
    reference = lab.make()
    model = lab.shard(copy.deepcopy(reference), path, policy={lab.Block}, sharding_strategy=strategy)
    loss = lab.loss(model, lab.batch())
    loss.backward(retain_graph=True)
    loss.backward()
    for _ in range(2):
        lab.reference_step(reference, lab.batches())
    step_both(model, reference)
    lab.assert_params(model, reference)


@pytest.mark.world(2)
@pytest.mark.covers("RUN-03", "B042", "RUN-09")
@pytest.mark.parametrize("between", ["forward", "eval", "no_grad", "inference_mode", "nothing"])
@pytest.mark.parametrize("forward_prefetch", [False, True])
@strategies
def test_a_forward_without_backward_does_no_harm(lab, path, strategy, between, forward_prefetch):
    reference = lab.make()
    model = lab.shard(
        copy.deepcopy(reference),
        path,
        policy={lab.Block},
        sharding_strategy=strategy,
        forward_prefetch=forward_prefetch,
    )
    optim = torch.optim.SGD(model.parameters(), lr=0.1)
    reference_optim = torch.optim.SGD(reference.parameters(), lr=0.1)
    for step in range(3):
        if between == "forward":
            model(lab.batch(step + 10))
        elif between == "eval":
            model.eval()
            got = model(lab.batch(step))
            torch.testing.assert_close(got, reference(lab.batch(step)), **lab.CLOSE)
            model.train()
        elif between in ("no_grad", "inference_mode"):
            with getattr(torch, between)():
                for _ in range(2):
                    got = model(lab.batch(step))
                torch.testing.assert_close(got.clone(), reference(lab.batch(step)).clone(), **lab.CLOSE)
        lab.loss(model, lab.batch(step)).backward()
        optim.step()
        optim.zero_grad()
        lab.reference_step(reference, lab.batches(step), optim=reference_optim)
        lab.assert_params(model, reference)


@pytest.mark.world(2)
@pytest.mark.covers("RUN-04", "RUN-05", "RUN-06")
def test_hooks_per_output_and_entries_per_backward(lab, path):
    class Many(nn.Module):
        def __init__(self):
            super().__init__()
            self.block = lab.Block(3)

        def forward(self, x):
            y = self.block(x)
            return y, y * 2, [y * 3, "text"]

    model = lab.shard(lab.make(Many), path, policy={lab.Block})
    a, b, (c, _) = model(lab.batch())
    assert all(len(t._backward_hooks) == 1 for t in (b, c))
    assert len(a._backward_hooks) == 2, "the block's output is also the root's"
    with lab.events() as seen:
        (a.sum() + b.sum() + c.sum()).backward()
    counts = Counter((event.unit, event.kind.name) for event in seen)
    assert counts["", "PRE_BACKWARD"] == 1
    assert counts["block", "PRE_BACKWARD"] == 1
    assert counts["block", "POST_BACKWARD"] == counts["block", "REDUCE"] == 1
    idle(lab, model)


@pytest.mark.world(2)
@pytest.mark.covers("RUN-08", "B161")
def test_a_part_of_a_unit_run_by_itself_fails_or_is_right(lab, path):
    model = lab.shard(lab.make(), path)
    inner = model if path == "composable" else model.module
    with pytest.raises(RuntimeError):
        inner.blocks[0](lab.batch(shape=(2, 4)))
    lab.loss(model, lab.batch()).backward()
    if path != "composable":
        with pytest.raises(RuntimeError):
            inner(lab.batch())


@pytest.mark.world(2)
@pytest.mark.covers("RUN-10", "ACC-01")
def test_operations_in_a_wrong_state_name_the_right_ones(lab):
    model = lab.shard(lab.make())
    model._assert_state(TrainingState.IDLE)
    with pytest.raises(ValueError, match="expected to be in states"):
        model._assert_state([TrainingState.FORWARD_BACKWARD])


class Boom(nn.Module):
    """Fails where it is told to."""

    def __init__(self):
        super().__init__()
        self.inp, self.inner = nn.Linear(3, 3), Inner()

    def forward(self, x):
        return self.inner(self.inp(x)).tanh()


class Inner(nn.Module):
    where = None

    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(3, 3)

    def forward(self, x):
        y = self.lin(x)
        if self.where == "forward":
            raise ValueError("boom")
        if self.where == "backward" and y.requires_grad:

            def boom(grad):
                raise ValueError("boom")

            y.register_hook(boom)
        return y


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.world(2)
@pytest.mark.covers("RUN-11")
@pytest.mark.parametrize("where", ["forward", "backward"])
@strategies
def test_an_exception_of_the_user_leaves_the_model_usable(lab, path, where, strategy):
    reference = lab.make(Boom)
    plain = copy.deepcopy(reference)
    model = lab.shard(plain, path, policy={Inner}, sharding_strategy=strategy)
    for step in range(2):
        Inner.where = where
        with pytest.raises(ValueError, match="boom"):
            model(lab.batch()).sum().backward()
        Inner.where = None
        for p in lab.units(model)[0].module.parameters():
            p.grad = None
        model.zero_grad()
        lab.loss(model, lab.batch(step)).backward()
        lab.reference_step(reference, lab.batches(step))
        step_both(model, reference)
        model.zero_grad()
        reference.zero_grad()
        lab.assert_params(model, reference)
        idle(lab, model)


@pytest.mark.world(2)
@pytest.mark.covers("RUN-11", "ACC-04")
def test_an_exception_inside_no_sync(lab):
    reference = lab.make(Boom)
    model = lab.shard(copy.deepcopy(reference), policy={Inner})
    Inner.where = "forward"
    try:
        with pytest.raises(ValueError, match="boom"), model.no_sync():
            model(lab.batch())
    finally:
        Inner.where = None
    lab.loss(model, lab.batch()).backward()
    lab.reference_step(reference, lab.batches())
    lab.assert_grads(model, reference)


@pytest.mark.world(2)
@pytest.mark.covers("B047", "B132")
@strategies
def test_an_output_that_is_a_view_and_is_changed_in_place(lab, path, strategy):
    class Views(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin = nn.Linear(3, 4)

        def forward(self, x):
            return self.lin(x).view(-1)

    class Changes(nn.Module):
        def __init__(self):
            super().__init__()
            self.views, self.out = Views(), nn.Linear(4, 1)

        def forward(self, x):
            y = self.views(x)
            y += 1.0
            return self.out(y.view(-1, 4))

    lab.parity(Changes, path, policy={Views}, sharding_strategy=strategy)


@pytest.mark.world(2)
@pytest.mark.covers("B048", "B131", "RUN-07")
@strategies
def test_a_loss_that_bypasses_the_outputs(lab, path, strategy):
    class Keeps(nn.Module):
        def __init__(self):
            super().__init__()
            self.inp, self.out = nn.Linear(3, 4), nn.Linear(4, 4)
            self.kept = []

        def forward(self, x):
            y = self.inp(x)
            self.kept.append(y.tanh())
            return self.out(y)

    def loss(model, x):
        inner = model if hasattr(model, "kept") and not isinstance(model, FSDP) else model.module
        model(x)
        return inner.kept.pop().square().mean()

    lab.parity(Keeps, path, policy={nn.Linear}, sharding_strategy=strategy, loss=loss)


@pytest.mark.world(2)
@pytest.mark.covers("B123", "B134", "STRAT-06")
def test_backward_through_pieces(lab, path):
    reference = lab.make()
    model = copy.deepcopy(reference)
    first, second = model.blocks[0], model.blocks[1]
    stages = [lab.shard(first, path), lab.shard(second, path)]
    x = lab.batch(shape=(2, 4)).requires_grad_()
    middle = stages[0](x)
    cut = middle.detach().requires_grad_()
    loss = stages[1](cut).square().mean()
    (grad,) = torch.autograd.grad(loss, [cut], retain_graph=True)
    loss.backward()
    middle.backward(grad)
    for rank in range(lab.world.size):
        batch = lab.batch(rank=rank, shape=(2, 4))
        (reference.blocks[1](reference.blocks[0](batch)).square().mean() / lab.world.size).backward()
    for stage, block in zip(stages, reference.blocks, strict=False):
        if path != "flat":
            lab.assert_grads(stage, block)
        torch.optim.SGD(stage.parameters(), lr=0.1).step()
        torch.optim.SGD(block.parameters(), lr=0.1).step()
        lab.assert_params(stage, block)


@pytest.mark.world(2)
@pytest.mark.covers("B137", "RED-05")
def test_gradients_of_inputs_may_be_differentiated_or_are_refused(lab, path):
    model = lab.shard(lab.make(), path, policy={lab.Block})
    reference = lab.make()
    x = lab.batch().requires_grad_()
    try:
        (grad,) = torch.autograd.grad(model(x).sum(), [x], create_graph=True)
        grad.square().sum().backward()
    except RuntimeError as error:
        assert "gradients of gradients" in str(error) or "create_graph" in str(error)
    else:
        for rank in range(lab.world.size):
            y = lab.batch(rank=rank).requires_grad_()
            (grad,) = torch.autograd.grad(reference(y).sum(), [y], create_graph=True)
            (grad.square().sum() / lab.world.size).backward()
        if path != "flat":
            for name, value in lab.grads(model).items():
                want = reference.get_parameter(name).grad
                if want is None:
                    assert value is None or not value.any()
                else:
                    torch.testing.assert_close(value, want, **lab.CLOSE)


@pytest.mark.world(2)
@pytest.mark.covers("B138")
def test_forward_mode_derivatives_are_right_or_refused(lab, path):
    from torch.autograd import forward_ad

    model, reference = lab.shard(lab.make(), path, policy={lab.Block}), lab.make()
    x, tangent = lab.batch(), lab.batch(step=1)

    def derivative(m):
        with forward_ad.dual_level():
            return forward_ad.unpack_dual(m(forward_ad.make_dual(x, tangent))).tangent

    try:
        got = derivative(model)
    except (RuntimeError, NotImplementedError):
        pass
    else:
        torch.testing.assert_close(got, derivative(reference), **lab.CLOSE)
    lab.loss(model, lab.batch()).backward()
    idle(lab, model)


@pytest.mark.world(2)
@pytest.mark.covers("B121", "B122", "LIM-07")
def test_reductions_in_flight_are_bounded(lab, path):
    from fsdp_ref.runtime.events import observe

    model = lab.shard(lab.make(lambda: lab.Net(blocks=8)), path, policy={lab.Block})
    loss = lab.loss(model, lab.batch())
    root = lab.units(model)[0].root
    most = 0

    def count(_):
        nonlocal most
        most = max(most, len(root.sync._open))

    with observe(count):
        loss.backward()
    assert 1 <= most <= 2
    assert len(root.sync._open) == 0


@pytest.mark.world(2)
@pytest.mark.covers("B022", "B076")
def test_a_module_swapped_between_construction_and_use(lab):
    model = lab.shard(lab.make(), policy={lab.Block})
    replacement = lab.make(lambda: lab.Block(4), seed=5)
    model.module.blocks[1] = replacement
    reference = lab.make()
    reference.blocks[1] = copy.deepcopy(replacement)
    torch.testing.assert_close(model(lab.batch()), reference(lab.batch()), **lab.CLOSE)
    lab.loss(model, lab.batch()).backward()
    lab.reference_step(reference, [lab.batch()])
    # The new block is nobody's: plain, local, but neither lost nor wrong.
    torch.testing.assert_close(replacement.lin1.weight.grad, reference.blocks[1].lin1.weight.grad, **lab.CLOSE)


@pytest.mark.world(2)
@pytest.mark.covers("B022")
def test_a_unit_added_after_the_first_forward_is_not_silently_unmanaged(lab):
    model = lab.shard(lab.make(), policy={lab.Block})
    lab.loss(model, lab.batch()).backward()
    model.zero_grad()
    extra = lab.shard(lab.make(lambda: lab.Block(4), seed=3))
    model.module.blocks.append(extra)
    reference = lab.make()
    reference.blocks.append(lab.make(lambda: lab.Block(4), seed=3))
    try:
        lab.loss(model, lab.batch()).backward()
    except (AssertionError, RuntimeError, ValueError):
        return
    lab.reference_step(reference, lab.batches())
    lab.assert_grads(model, reference)


@pytest.mark.world(2)
@pytest.mark.covers("B013", "B014")
def test_units_called_with_keywords_or_nothing(lab, path):
    class Source(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.ones(3))

        def forward(self):
            return self.w * 2

    class Uses(nn.Module):
        def __init__(self):
            super().__init__()
            self.source, self.block = Source(), lab.Block(3)

        def forward(self, x):
            return self.block(x=x + self.source())

    lab.parity(Uses, path, policy={Source, lab.Block})


@pytest.mark.world(2)
@pytest.mark.covers("B016")
def test_a_childs_parameter_used_by_its_parent_after_the_child_returned(lab, path):
    class Parent(nn.Module):
        def __init__(self):
            super().__init__()
            self.block = lab.Block(3)

        def forward(self, x):
            y = self.block(x)
            return y @ self.block.lin1.weight.t()

    model = lab.parity(Parent, path, policy={Parent})
    assert [len(unit.handle.fqns) for unit in lab.units(model)] == [4]


# ---------------------------------------------------------------------------------------------- inputs and outputs

Pair = namedtuple("Pair", ["first", "second"])


@dataclass
class Data:
    value: torch.Tensor
    note: str = "note"


@dataclass(frozen=True)
class Frozen:
    value: torch.Tensor


class Custom:
    """An object that nobody knows how to look into."""

    def __init__(self, value):
        self.value = value


CONTAINERS = {
    "tensor": (lambda y: y, lambda o: o),
    "list": (lambda y: [y, 1, None], lambda o: o[0]),
    "dict": (lambda y: {"y": y, "n": {"z": y * 2}}, lambda o: o["y"] + o["n"]["z"]),
    "tuple": (lambda y: (y, (y, "s")), lambda o: o[0] + o[1][0]),
    "namedtuple": (lambda y: Pair(y, y * 2), lambda o: o.first + o.second),
    "dataclass": (lambda y: Data(y), lambda o: o.value),
    "frozen dataclass": (lambda y: Frozen(y), lambda o: o.value),
    "ordered dict": (lambda y: OrderedDict(a=y), lambda o: o["a"]),
    "set": (lambda y: {y}, lambda o: next(iter(o))),
    "object": (lambda y: Custom(y), lambda o: o.value),
}


class Contained(nn.Module):
    kind = "tensor"

    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(3, 3)

    def forward(self, x):
        return CONTAINERS[self.kind][0](self.lin(x).tanh())


@pytest.mark.world(2)
@pytest.mark.covers("IO-02", "IO-03", "IO-04", "B075", "B133")
@pytest.mark.parametrize("kind", CONTAINERS)
@strategies
def test_outputs_in_containers(lab, path, kind, strategy):
    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.inp, self.inner = nn.Linear(3, 3), Contained()

        def forward(self, x):
            self.inner_output = self.inner(self.inp(x))
            return self.inner_output

    Contained.kind = kind

    def loss(model, x):
        output = model(x)
        assert type(output) is type(CONTAINERS[kind][0](x))
        return CONTAINERS[kind][1](output).square().mean()

    try:
        lab.parity(Outer, path, policy={Contained}, sharding_strategy=strategy, loss=loss, steps=2)
    finally:
        Contained.kind = "tensor"


@pytest.mark.world(2)
@pytest.mark.covers("IO-03", "B133")
def test_packed_sequences(lab, path):
    class Recurrent(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn = nn.GRU(3, 4, batch_first=True)

        def forward(self, packed):
            assert isinstance(packed, nn.utils.rnn.PackedSequence)
            return self.rnn(packed)[0]

    def loss(model, x):
        packed = pack_padded_sequence(x, torch.tensor([3, 2]), batch_first=True)
        output = model(packed)
        return pad_packed_sequence(output, batch_first=True)[0].square().mean()

    reference = lab.make(Recurrent)
    model = lab.shard(copy.deepcopy(reference), path)
    x = lab.batch(shape=(2, 3, 3))
    if path == "flat":
        torch.testing.assert_close(loss(model, x), loss(reference, x), **lab.CLOSE)
        return
    loss(model, x).backward()
    for rank in range(lab.world.size):
        (loss(reference, lab.batch(rank=rank, shape=(2, 3, 3))) / lab.world.size).backward()
    lab.assert_grads(model, reference)


@pytest.mark.world(2)
@pytest.mark.covers("IO-01")
def test_inputs_arrive_unchanged(lab, path):
    met = []

    class Takes(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin = nn.Linear(3, 3)

        def forward(self, *args, **kwargs):
            met.append((args, kwargs))
            return self.lin(args[0])

    x = lab.batch()
    args = (x, [x, 1], (x,), Pair(x, 2), {"a": x})
    model = lab.shard(lab.make(Takes), path)
    model(*args, more={"b": Data(x)}, none=None)
    ((got, kwargs),) = met
    assert [type(value) for value in got] == [type(value) for value in args]
    assert got[0] is x
    assert got[3].second == 2
    assert kwargs["more"]["b"].note == "note"
    assert kwargs["none"] is None


@pytest.mark.world(2)
@pytest.mark.covers("RUN-13")
def test_an_optimizer_that_steps_in_backward(lab, orig_path):
    reference = lab.make()
    model = copy.deepcopy(reference)
    optims = {}

    def attach(m):
        for p in m.parameters():
            optims[p] = torch.optim.SGD([p], lr=0.1)

            def step(q):
                optims[q].step()
                q.grad = None

            p.register_post_accumulate_grad_hook(step)

    attach(model)
    attach(reference)
    model = lab.shard(model, orig_path, policy={lab.Block})
    for step in range(2):
        lab.loss(model, lab.batch(step)).backward()
        assert all(p.grad is None for p in model.parameters())
        (sum(lab.loss(reference, batch) for batch in lab.batches(step)) / lab.world.size).backward()
        lab.assert_params(model, reference)
