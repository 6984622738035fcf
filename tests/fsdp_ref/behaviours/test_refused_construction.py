"""A call that is refused leaves everything as it was: the module, its tensors, its hooks, the process groups.

Each case is refused for one reason; what can be seen of the model is compared before and after, then the corrected
call is made on the same model and must train as one process does.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.distributed_c10d import _world

from fsdp_ref import MixedPrecision, ShardingStrategy
from fsdp_ref.composable import replicate
from fsdp_ref.wrap import CustomPolicy, ModuleWrapPolicy

HOOKS = [name for name in vars(nn.Module()) if name.endswith("_hooks")]


def seen(model: nn.Module) -> dict[str, Any]:
    """Return everything that a refused call might have changed, by name; tensors by identity and by value."""
    found: dict[str, Any] = {"groups": len(_world.pg_map)}
    for name, module in model.named_modules():
        found[f"{name}: itself"] = (id(module), type(module), module.training, sorted(vars(module)))
        found[f"{name}: hooks"] = {hooks: list(getattr(module, hooks).values()) for hooks in HOOKS}
        for kind in (module._parameters, module._buffers):
            for key, tensor in kind.items():
                facts = (id(tensor), tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.device)
                values = None if tensor.is_meta else tensor.detach().clone().tolist()
                found[f"{name}: {key}"] = (facts, tensor.requires_grad, sorted(vars(tensor)), values)
    return found


class Net(nn.Module):
    """Two blocks, of which the policy makes units, and a layer of the root's."""

    def __init__(self, device: str | None = None) -> None:
        super().__init__()
        self.inp = nn.Linear(3, 4, device=device)
        self.blocks = nn.ModuleList(Block(device) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inp(x)
        for block in self.blocks:
            x = block(x)
        return x


class Block(nn.Module):
    def __init__(self, device: str | None = None) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 4, device=device)
        self.bare = nn.Parameter(torch.ones(4, device=device))
        self.register_buffer("scale", torch.ones(1, device=device))

    def reset_parameters(self) -> None:
        with torch.no_grad():
            self.bare.fill_(1)
            self.scale.fill_(1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.lin(x).tanh() * self.bare * self.scale


class Mute(Block):
    reset_parameters = None


def nothing(model: nn.Module) -> None:
    """Leave the model as it is made."""


def half_bias(model: nn.Module) -> None:
    model.inp.bias = nn.Parameter(model.inp.bias.detach().float())


def double_bias(model: nn.Module) -> None:
    model.inp.bias = nn.Parameter(model.inp.bias.detach().double())


def half_bias_inside(model: nn.Module) -> None:
    model.blocks[0].bare = nn.Parameter(model.blocks[0].bare.detach().float())


def double_bias_inside(model: nn.Module) -> None:
    model.blocks[0].bare = nn.Parameter(model.blocks[0].bare.detach().double())


def freeze_inside(model: nn.Module) -> None:
    model.blocks[1].bare.requires_grad_(False)


def thaw_inside(model: nn.Module) -> None:
    model.blocks[1].bare.requires_grad_(True)


def hook(model: nn.Module) -> None:
    model.inp.weight.register_hook(lambda grad: grad * 2)
    model.blocks[1].bare.register_post_accumulate_grad_hook(lambda param: param.grad.mul_(2))


def unhook(model: nn.Module) -> None:
    for param in model.parameters():
        param._backward_hooks, param._post_accumulate_grad_hooks = None, None


def mute(model: nn.Module) -> None:
    model.blocks[1].__class__ = Mute


def unmute(model: nn.Module) -> None:
    model.blocks[1].__class__ = Block


def fails_late(model: nn.Module) -> Callable[[nn.Module], None]:
    """Return a function that initializes modules until it comes to the last block."""

    def init(module: nn.Module) -> None:
        if module is model.blocks[1]:
            raise OSError("a file of weights is missing")
        for child in (module,):
            child.to_empty(device="cpu", recurse=False)
        if getattr(module, "reset_parameters", None):
            module.reset_parameters()

    return init


def initializes_in_two_dtypes(model: nn.Module) -> Callable[[nn.Module], None]:
    def init(module: nn.Module) -> None:
        module.to_empty(device="cpu", recurse=False)
        if getattr(module, "reset_parameters", None):
            module.reset_parameters()
        if module is model.inp:
            module.bias = nn.Parameter(torch.zeros(4, dtype=torch.bfloat16))

    return init


def overriding(**options: Any) -> Callable[[nn.Module], CustomPolicy]:
    """Make a policy that wraps blocks and gives the first one options of its own."""
    return lambda model: CustomPolicy(lambda m: options if m is model.blocks[0] else isinstance(m, Block))


@dataclass
class Case:
    """One reason to refuse.

    Attributes:
        options: What is asked for; a function of the model where it must name something in it.
        match: What the message says.
        spoil, mend: Change the model before the refused, and before the corrected call.
        meta: The model is on the meta device.
        corrected: Options of the corrected call.
        paths: Ways to shard that refuse it.
    """

    options: dict[str, Any]
    match: str
    spoil: Callable[[nn.Module], None] = nothing
    mend: Callable[[nn.Module], None] = nothing
    meta: bool = False
    corrected: dict[str, Any] = field(default_factory=dict)
    paths: tuple[str, ...] = ("wrapper", "flat", "composable")


CASES = {
    "dtypes in the root": Case({}, "uniform dtype", half_bias, double_bias),
    "dtypes in a nested unit": Case({}, "uniform dtype", half_bias_inside, double_bias_inside),
    "half frozen unit": Case({}, "requires_grad", freeze_inside, thaw_inside, paths=("flat",)),
    "half frozen root": Case(
        {"policy": None}, "requires_grad", freeze_inside, thaw_inside, paths=("flat",), corrected={"policy": None}
    ),
    "hooks that would never run": Case({}, "without hooks.*got hooks on inp.weight", hook, unhook, paths=("flat",)),
    "hooks in the root": Case(
        {"policy": None}, r"hooks on inp\.weight, blocks\.1\.bare", hook, unhook, paths=("flat",)
    ),
    "option of one module": Case({"policy": overriding(mixed_precision=torch.float16)}, "expected a MixedPrecision"),
    "offload of one module": Case({"policy": overriding(cpu_offload=True)}, "expected a CPUOffload"),
    "prefetch of one module": Case(
        {"policy": overriding(backward_prefetch="pre")}, "expected a member of BackwardPref"
    ),
    "device of one module": Case({"policy": overriding(device_id="disk:0")}, "device_id: expected an int, a string"),
    "unknown option": Case({"policy": overriding(offload=True)}, "options of a unit: expected some of"),
    "no policy": Case({"policy": lambda model: 3}, "policy"),
    "precision": Case({"mixed_precision": torch.float16}, "expected a MixedPrecision"),
    "strategy": Case({"sharding_strategy": "FULL_SHARD"}, "expected a member of ShardingStrategy"),
    "device": Case({"device_id": 4711}, "device_id=4711: expected"),
    "device type": Case({"device_id": [0]}, "device_id: expected an int, a string"),
    "meta as device": Case({"device_id": "meta"}, "that holds values, got 'meta'"),
    "group": Case({"process_group": dist.GroupMember.NON_GROUP_MEMBER}, "ProcessGroup that this rank belongs to"),
    "group and mesh": Case(
        {"process_group": lambda model: dist.group.WORLD, "device_mesh": lambda model: mesh()}, "Cannot pass both"
    ),
    "hybrid over one group": Case(
        {"sharding_strategy": ShardingStrategy.HYBRID_SHARD, "process_group": lambda model: dist.group.WORLD},
        "None or Tuple",
    ),
    "hybrid groups by host": Case(
        {"sharding_strategy": ShardingStrategy.HYBRID_SHARD}, "uniform dtype", half_bias, double_bias
    ),
    "ignored modules": Case({"ignored_modules": ["blocks.0"]}, "ignored_modules expects nn.Module"),
    "ignored modules that are none": Case({"ignored_modules": 3}, "`ignored_modules` should be an iterable"),
    "init that is none": Case({"param_init_fn": 3}, "to be callable", meta=True),
    "no way to initialize": Case({}, "reset_parameters", mute, unmute, meta=True),
    "init that fails": Case({"param_init_fn": fails_late}, "a file of weights is missing", meta=True),
    "init that makes two dtypes": Case({"param_init_fn": initializes_in_two_dtypes}, "uniform dtype", meta=True),
    "dtypes on the meta device": Case({}, "uniform dtype", half_bias, double_bias, meta=True),
}


def mesh() -> Any:
    from torch.distributed.device_mesh import DeviceMesh

    return DeviceMesh.from_group(dist.group.WORLD, "cpu")


def resolved(options: dict[str, Any], model: nn.Module) -> dict[str, Any]:
    options = {"policy": ModuleWrapPolicy({Block}), **options}
    made = {key: value(model) if callable(value) and key != "policy" else value for key, value in options.items()}
    if callable(options["policy"]) and not isinstance(options["policy"], ModuleWrapPolicy):
        made["policy"] = options["policy"](model)
    return made


@pytest.mark.world(2)
@pytest.mark.covers("CTOR-06", "COMP-16")
@pytest.mark.filterwarnings("ignore:Unable to call `reset_parameters:UserWarning")
@pytest.mark.parametrize(("path", "name"), [(path, name) for name, case in CASES.items() for path in case.paths])
def test_a_refused_call_changes_nothing_and_the_corrected_one_works(lab, path, name):
    case = CASES[name]
    torch.manual_seed(0)
    model = Net("meta" if case.meta else None).double()
    case.spoil(model)
    before = seen(model)
    options = resolved(case.options, model)
    with pytest.raises((ValueError, TypeError, RuntimeError, AttributeError, OSError), match=case.match):
        lab.shard(model, path, **options)
    after = seen(model)
    assert after == before, {name for name in before | after if before.get(name) != after.get(name)}
    case.mend(model)
    torch.manual_seed(5)
    sharded = lab.shard(model, path, **resolved(case.corrected, model))
    reference = Net().double()
    reference.load_state_dict(lab.params(sharded) | {f"blocks.{i}.scale": torch.ones(1) for i in range(2)})
    lab.loss(sharded, lab.batch()).backward()
    torch.optim.SGD(sharded.parameters(), lr=0.1).step()
    lab.reference_step(reference, lab.batches(), optim=torch.optim.SGD(reference.parameters(), lr=0.1))
    lab.assert_params(sharded, reference)


@pytest.mark.world(2)
def test_a_refusal_over_units_made_by_hand(lab, orig_path):
    """Units that an earlier call made, and what replication marked, are as they were too."""
    model = lab.make(Net)
    model.blocks[0] = lab.shard(model.blocks[0], orig_path)
    replicate(model.blocks[1])
    half_bias(model)
    model.inp.weight.register_hook(lambda grad: grad)
    before = seen(model)
    with pytest.raises(ValueError, match="uniform dtype|not already have FSDP applied"):
        lab.shard(model, orig_path, policy=CustomPolicy(lambda m: m is model.inp))
    assert seen(model) == before


@pytest.mark.world(2)
def test_each_warning_comes_once_for_a_call(lab, path):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        lab.shard(lab.make(Net), path, policy=ModuleWrapPolicy({Block}), sharding_strategy=ShardingStrategy.NO_SHARD)
    assert [str(each.message).split(" is ")[0] for each in caught] == ["The `NO_SHARD` sharding strategy"]
    model = copy.deepcopy(lab.make(Net))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        lab.shard(model, path, policy=ModuleWrapPolicy({Block}), mixed_precision=MixedPrecision())
    assert not caught
