"""torch's adapters: what they show is what the implementation holds, and looking changes nothing.

Whether torch trains rightly is the suites' business; here it is whether the adapter tells the truth.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from fsdp_testing import run_ranks
from fsdp_testing.adapters import registry
from fsdp_testing.adapters.adapter import Adapter
from fsdp_testing.adapters.protocol import Precision, Setup, WrapPolicy
from fsdp_testing.adapters.shared import pieces
from fsdp_testing.cases.models import MODELS
from fsdp_testing.errors import InvalidImplementation

SHARDING = [
    ("torch-fsdp1", "full_shard"),
    ("torch-fsdp1", "shard_grad_op"),
    ("torch-fsdp1", "no_shard"),
    ("torch-fsdp1-flat", "full_shard"),
    ("torch-fsdp1-flat", "shard_grad_op"),
    ("torch-fsdp2", "full_shard"),
    ("torch-fsdp2", "shard_grad_op"),
    ("torch-ddp", "no_shard"),
]
EACH = pytest.mark.parametrize(("name", "strategy"), SHARDING)


def setup_of(strategy: str, **more) -> Setup:
    size = dist.get_world_size()
    mesh = init_device_mesh("cpu", (size,))
    return Setup(
        dist.get_rank(), size, torch.device("cpu"), group=dist.group.WORLD, mesh=mesh, strategy=strategy, **more
    )


def make(name: str, model_name: str, strategy: str) -> tuple[Adapter, nn.Module]:
    adapter, model = registry.load(name), MODELS[model_name]
    return adapter, adapter.wrap(model.build(0), setup_of(strategy, units=model.units))


def train(wrapped: nn.Module, model_name: str, step: int = 0) -> None:
    model = MODELS[model_name]
    inputs = model.make_input(0, dist.get_rank(), step, 3, torch.float64)
    model.loss(wrapped(*inputs.args, **inputs.kwargs)).backward()


def gathered_gradients(adapter: Adapter, wrapped: nn.Module) -> dict[str, torch.Tensor]:
    held = adapter.local_pieces(wrapped)
    grads = {
        fqn: tuple(dataclasses.replace(p, value=p.grad) for p in ps if p.grad is not None and p.reduced)
        for fqn, ps in held.items()
    }
    return pieces.gather({fqn: ps for fqn, ps in grads.items() if ps})


def shown_at_every_point(name: str, strategy: str, model_name: str) -> list[str]:
    """Compare the pieces with the plain model before, between and after forward, backward and step."""
    adapter, wrapped = make(name, model_name, strategy)
    plain = MODELS[model_name].build(0)
    optimizer = torch.optim.SGD([p for _, p in adapter.named_parameters(wrapped)], lr=0.1, momentum=0.9)
    own = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    wrong: list[str] = []

    def look(where: str) -> None:
        full = pieces.gather(adapter.local_pieces(wrapped))
        for fqn, parameter in plain.named_parameters():
            if not torch.allclose(full[fqn], parameter, rtol=0, atol=1e-12):
                wrong.append(f"{where}: {fqn}")

    look("before lazy initialisation")
    for step in range(2):
        model = MODELS[model_name]
        inputs = model.make_input(0, dist.get_rank(), step, 3, torch.float64)
        loss = model.loss(wrapped(*inputs.args, **inputs.kwargs))
        look("between forward and backward")
        loss.backward()
        for rank in range(dist.get_world_size()):
            theirs = model.make_input(0, rank, step, 3, torch.float64)
            (model.loss(plain(*theirs.args, **theirs.kwargs)) / dist.get_world_size()).backward()
        grads = gathered_gradients(adapter, wrapped)
        wrong += [
            f"gradient of {fqn}"
            for fqn, parameter in plain.named_parameters()
            if parameter.grad is not None and not torch.allclose(grads[fqn], parameter.grad, rtol=0, atol=1e-11)
        ]
        optimizer.step()
        own.step()
        look("after the step")
        state = {fqn: entry["momentum_buffer"] for fqn, entry in adapter.optimizer_pieces(wrapped, optimizer).items()}
        momentum = pieces.gather(state)
        wrong += [
            f"momentum of {fqn}"
            for fqn, parameter in plain.named_parameters()
            if parameter in own.state
            and not torch.allclose(momentum[fqn], own.state[parameter]["momentum_buffer"], rtol=0, atol=1e-11)
        ]
        optimizer.zero_grad()
        own.zero_grad()
    return wrong


@EACH
@pytest.mark.parametrize("model_name", ["uneven", "deep_nest", "tied_within", "moe"])
def test_pieces_are_the_parameters_gradients_and_state_at_every_point(name, strategy, model_name):
    assert run_ranks(shown_at_every_point, name, strategy, model_name, size=3) == [[]] * 3


def collectives_of_looking(name: str, strategy: str) -> list[str]:
    """What is called while pieces are read by rank 0 alone, at points where a unit is sharded and where it is not."""
    adapter, wrapped = make(name, "mlp", strategy)
    called: list[str] = []
    real = {n: getattr(dist, n) for n in dir(dist) if n.startswith(("all_", "reduce", "broadcast", "_all_", "barrier"))}

    def look() -> None:
        for key, function in real.items():
            if callable(function):
                setattr(dist, key, lambda *_a, _key=key, **_k: called.append(_key))
        try:
            if dist.get_rank() == 0:
                adapter.local_pieces(wrapped)
                adapter.optimizer_pieces(wrapped, optimizer)
        finally:
            for key, function in real.items():
                setattr(dist, key, function)

    optimizer = torch.optim.SGD([p for _, p in adapter.named_parameters(wrapped)], lr=0.1)
    look()
    wrapped(torch.ones(2, 8, dtype=torch.float64))
    look()
    train(wrapped, "mlp")
    look()
    return called


@EACH
def test_looking_needs_no_collective_and_no_other_rank(name, strategy):
    assert run_ranks(collectives_of_looking, name, strategy) == [[], []]


def kept_apart(name: str, strategy: str) -> list[tuple[bool, bool]]:
    """After a reduced and then a local micro-batch: is there a reduced part, is there a local part?"""
    adapter, wrapped = make(name, "mlp", strategy)
    train(wrapped, "mlp", 0)
    with adapter.no_sync(wrapped):
        train(wrapped, "mlp", 1)
    held = [piece for ps in adapter.local_pieces(wrapped).values() for piece in ps if piece.stop > piece.start]
    reduced = any(p.grad is not None and p.reduced for p in held)
    local = any(p.grad is not None and not p.reduced for p in held)
    return [(reduced, local)]


@pytest.mark.parametrize("name", ["torch-fsdp1", "torch-fsdp1-flat"])
def test_reduced_and_local_gradients_are_kept_apart(name):
    assert run_ranks(kept_apart, name, "full_shard") == [[(True, True)]] * 2


def strided_spans() -> list[str]:
    adapter, wrapped = make("torch-fsdp1", "strided", "full_shard")
    whole = dict(MODELS["strided"].build(0).named_parameters())
    wrong = []
    for fqn, ps in adapter.local_pieces(wrapped).items():
        flat = whole[fqn].detach().reshape(-1)
        wrong += [f"{fqn} {p.start}" for p in ps if not torch.equal(p.value.reshape(-1), flat[p.start : p.stop])]
    full = pieces.gather(adapter.local_pieces(wrapped))
    return wrong + [fqn for fqn, parameter in whole.items() if not torch.equal(full[fqn], parameter)]


def test_storage_order_is_told_in_row_major_order():
    assert run_ranks(strided_spans, size=3) == [[]] * 3


def edit(name: str, strategy: str, writeback: bool) -> float:
    adapter, wrapped = make(name, "uneven", strategy)
    with adapter.full_parameters(wrapped, writeback=writeback) as full, torch.no_grad():
        for tensor in full.values():
            tensor.mul_(2)
    before = dict(MODELS["uneven"].build(0).named_parameters())
    after = pieces.gather(adapter.local_pieces(wrapped))
    return max((after[fqn] / before[fqn]).max().item() for fqn in before)


@pytest.mark.parametrize(("name", "strategy"), [s for s in SHARDING if s[1] != "no_shard"])
@pytest.mark.parametrize(("writeback", "factor"), [(True, 2.0), (False, 1.0)])
def test_edits_are_written_back_when_asked(name, strategy, writeback, factor):
    assert run_ranks(edit, name, strategy, writeback) == pytest.approx([factor] * 2)


def state_round_trip(name: str, strategy: str) -> list[str]:
    """Save after a step, load into a fresh model and optimizer, compare."""
    adapter, wrapped = make(name, "uneven", strategy)
    optimizer = torch.optim.SGD([p for _, p in adapter.named_parameters(wrapped)], lr=0.1, momentum=0.9)
    train(wrapped, "uneven")
    optimizer.step()
    model_state = {fqn: t.detach().clone() for fqn, t in adapter.full_state_dict(wrapped).items()}
    optimizer_state = adapter.full_optimizer_state(wrapped, optimizer)
    other, fresh = make(name, "uneven", strategy)
    fresh_optimizer = torch.optim.SGD([p for _, p in other.named_parameters(fresh)], lr=0.1, momentum=0.9)
    with torch.no_grad():
        for _, parameter in other.named_parameters(fresh):
            parameter.zero_()
    other.load_full_state_dict(fresh, model_state)
    other.load_full_optimizer_state(fresh, fresh_optimizer, optimizer_state)
    wanted, found = pieces.gather(adapter.local_pieces(wrapped)), pieces.gather(other.local_pieces(fresh))
    wrong = [fqn for fqn in wanted if not torch.equal(wanted[fqn], found[fqn])]
    wrong += [fqn for fqn in wanted if not torch.equal(model_state[fqn], wanted[fqn])]
    states = []
    for which, module, opt in ((adapter, wrapped, optimizer), (other, fresh, fresh_optimizer)):
        entries = which.optimizer_pieces(module, opt)
        states.append(pieces.gather({fqn: entry["momentum_buffer"] for fqn, entry in entries.items()}))
    return wrong + [f"momentum of {fqn}" for fqn in states[0] if not torch.equal(states[0][fqn], states[1][fqn])]


@EACH
def test_state_goes_into_a_fresh_model(name, strategy):
    assert run_ranks(state_round_trip, name, strategy) == [[], []]


def units_of(name: str, policy: WrapPolicy) -> list[str]:
    model = registry.load(name).wrap(MODELS["deep_nest"].build(0), setup_of("full_shard", policy=policy))
    found = [n for n, module in model.named_modules() if type(module).__name__ == "FullyShardedDataParallel"]
    return sorted(n.replace("_fsdp_wrapped_module.", "").replace("._fsdp_wrapped_module", "") for n in found)


def test_policies_reach_fsdp1():
    linears = WrapPolicy(classes=(nn.Linear,))
    found = run_ranks(units_of, "torch-fsdp1", linears)[0]
    assert "inner.inner.inner.inner" in found
    assert "inner" not in found
    assert run_ranks(units_of, "torch-fsdp1", WrapPolicy(names=("inner",)))[0] == ["", "inner"]
    assert "inner" in run_ranks(units_of, "torch-fsdp1", WrapPolicy(min_numel=200))[0]


def refusal(name: str) -> str:
    strategy = "no_shard" if name == "torch-fsdp2" else "full_shard"
    with pytest.raises(InvalidImplementation) as caught:
        registry.load(name).wrap(MODELS["mlp"].build(0), setup_of(strategy))
    return str(caught.value)


@pytest.mark.parametrize("name", ["torch-fsdp2", "torch-ddp"])
def test_a_strategy_that_is_not_claimed_is_refused(name):
    assert all("Run only what it claims" in text for text in run_ranks(refusal, name))


@pytest.mark.parametrize(
    ("name", "precision", "size", "expected"),
    [
        ("torch-fsdp1", Precision(param_dtype=torch.bfloat16), 2, (2, 1.0, False)),
        ("torch-fsdp1", Precision(), 3, (2, 1.5, False)),
        ("torch-fsdp1", Precision(), 8, (4, 2.0, False)),
        ("torch-fsdp2", Precision(param_dtype=torch.bfloat16), 2, (1, 2, True)),
        ("torch-fsdp2", Precision(param_dtype=torch.float16), 4, (2, 2.0, False)),
        ("torch-ddp", Precision(), 3, (3, 1, False)),
    ],
)
def test_division_is_told_for_the_dtype_on_the_wire(name, precision, size, expected):
    division = registry.load(name).division(Setup(0, size, torch.device("cpu"), precision=precision))
    assert division is not None
    assert (division.before, division.after, division.mean_by_backend) == expected
