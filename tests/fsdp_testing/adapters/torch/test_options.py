"""The options of torch's implementations that a case can set, read from the signatures of the torch that is installed."""

from __future__ import annotations

import ast
import inspect
from contextlib import suppress
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import fsdp
from torch.distributed.fsdp import (
    FSDPModule,
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    fully_shard,
)
from torch.nn.parallel import DistributedDataParallel

from fsdp_testing.adapters.protocol import Precision, Setup, WrapPolicy
from fsdp_testing.adapters.torch import ddp, fsdp1, fsdp2, named_axes
from fsdp_testing.cases.records.specs import SETTINGS
from fsdp_testing.errors import InvalidImplementation

MESH: Any = SimpleNamespace(ndim=1, mesh_dim_names=("shard",))
PLAIN = Setup(0, 2, torch.device("cpu"), mesh=MESH)
LOW = Precision(torch.bfloat16, torch.float32)
ASKED = (
    replace(PLAIN, strategy="shard_grad_op"),
    replace(PLAIN, strategy="hybrid_shard", shard_size=2),
    replace(PLAIN, precision=LOW),
    replace(PLAIN, precision=replace(LOW, buffer_dtype=torch.float16)),
    replace(PLAIN, precision=replace(LOW, output_dtype=torch.float32, cast_unit_inputs=True)),
    replace(PLAIN, precision=replace(LOW, cast_root_inputs=False, low_gradients=True)),
    replace(PLAIN, units=("0",), precision=LOW),
    replace(PLAIN, cpu_offload=True),
    replace(PLAIN, group=MESH),
    replace(PLAIN, ignored=("0",)),
    replace(PLAIN, ignored=("0",), settings=frozenset({"ignored_by_parameter"})),
    replace(PLAIN, sync_module_states=True),
    replace(PLAIN, init_module=lambda module: None),
    replace(PLAIN, forward_prefetch=True),
    replace(PLAIN, backward_prefetch="none"),
    replace(PLAIN, policy=WrapPolicy(classes=(nn.Linear,))),
    *(replace(PLAIN, settings=frozenset({name})) for name in SETTINGS),
)
"""Whatever `setup_of` can make of a case, one option at a time."""


def signature(owner: Any) -> set[str]:
    return set(inspect.signature(owner).parameters) - {"self", "module"}


_ELSEWHERE = "chooses where it runs, which here is the world's device and group"
_TUNING = "how much is sent at once, and when; the models here fit into one bucket of any size"
_ACCELERATOR = "has no effect without an accelerator"
_OLD_NAME = "an older name of another option"
_LATER = "of a torch later than the one that is judged"
_PIPELINES = "for schedules of pipelines, which end a backward by a call of their own"

NOT_SET: dict[str, dict[str, str]] = {
    "DistributedDataParallel": {
        "device_ids": _ELSEWHERE,
        "output_device": _ELSEWHERE,
        "dim": _ACCELERATOR,
        **({"broadcast_buffers": _OLD_NAME} if "forward_sync_buffers" in signature(DistributedDataParallel) else {}),
        "init_sync": "left on: without it ranks may begin apart, which is the user's own affair then",
        "bucket_cap_mb_list": _TUNING,
        "check_reduction": "deprecated, without effect",
        "lazy_bucket_allocation": _LATER,
        "require_manual_backward_finalization": _PIPELINES,
        "delay_all_reduce_named_params": "takes the model's parameters, which exist only while wrapping",
        "param_to_hook_all_reduce": "takes the model's parameters, which exist only while wrapping",
        "mixed_precision": "its type is private in torch",
    },
    "FullyShardedDataParallel": {
        "limit_all_gathers": _ACCELERATOR,
    },
    "fully_shard": {},
    "MixedPrecision": {
        "_module_classes_to_ignore": "private",
    },
    "MixedPrecisionPolicy": {"param_dtype_override_fn": _LATER},
    "FSDPModule": {
        "set_keep_unsharded_storage": _LATER,
        "set_manual_backward_finalization": _PIPELINES,
        "set_reduce_scatter_divide_factor": _OLD_NAME,
        "set_symm_mem_for_comm": _ACCELERATOR,
    },
}
"""What no case can set, with the reason. Names that this torch does not have may stand here for another one."""


class Recorder:
    """Stands for a class or function, and notes with which options it was called."""

    _set_params_and_buffers_to_ignore_for_model = staticmethod(lambda module, names: None)

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []

    def __call__(self, module: Any = None, **options: Any) -> Any:
        self.calls.append(options)
        return module if module is not None else object()

    @property
    def options(self) -> set[str]:
        return {name for options in self.calls for name in options}


@pytest.fixture
def recorded(monkeypatch) -> dict[str, Recorder]:
    owners = {
        "DistributedDataParallel": (ddp, DistributedDataParallel),
        "FullyShardedDataParallel": (fsdp1, FullyShardedDataParallel),
        "MixedPrecision": (fsdp, MixedPrecision),
        "fully_shard": (fsdp2, fully_shard),
        "MixedPrecisionPolicy": (fsdp2, MixedPrecisionPolicy),
    }
    made = {name: Recorder() for name in owners}
    for name, (owner, _) in owners.items():
        monkeypatch.setattr(owner, name, made[name])
    monkeypatch.setattr(named_axes, "distribute", lambda module, setup, ignored: setup)  # a mesh takes ranks
    return made


def wrap_all(setup: Setup) -> None:
    """Wrap a model with each implementation of torch that does not refuse the setup."""
    for buffers in (False, True):
        module = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2) if buffers else nn.Tanh())
        with suppress(InvalidImplementation):
            ddp.wrap(module, replace(setup, strategy="no_shard", leaves_unused=buffers))
    with suppress(InvalidImplementation):
        fsdp1.wrap(nn.Sequential(nn.Linear(2, 2)), setup, use_orig_params=True)
    with suppress(InvalidImplementation):
        fsdp2.wrap(nn.Sequential(nn.Linear(2, 2)), setup)


def test_a_plain_case_leaves_every_option_to_its_default(recorded):
    ddp.wrap(nn.Linear(2, 2), replace(PLAIN, strategy="no_shard"))
    fsdp1.wrap(nn.Linear(2, 2), PLAIN, use_orig_params=False)
    fsdp2.wrap(nn.Linear(2, 2), PLAIN)
    assert recorded["DistributedDataParallel"].calls == [{}]
    assert recorded["FullyShardedDataParallel"].calls == [{"device_id": PLAIN.device}]
    assert recorded["fully_shard"].calls == [{"mesh": MESH}]


def test_a_dtype_that_a_case_leaves_open_is_left_open(recorded):
    wrap_all(replace(PLAIN, precision=Precision(torch.bfloat16)))
    for name in ("MixedPrecision", "MixedPrecisionPolicy"):
        assert recorded[name].calls == [{"param_dtype": torch.bfloat16}]


@pytest.mark.parametrize("owner", [DistributedDataParallel, FullyShardedDataParallel, fully_shard, MixedPrecision,
                                   MixedPrecisionPolicy], ids=lambda owner: owner.__name__)  # fmt: skip
def test_what_no_case_sets_is_listed_with_its_reason(recorded, owner):
    for setup in (PLAIN, *ASKED):
        wrap_all(setup)
    name, known = owner.__name__, NOT_SET[owner.__name__]
    unset = signature(owner) - recorded[name].options
    assert unset <= set(known), "options that no case sets: make a case set them, or say why not"
    assert not recorded[name].options & set(known), "no longer true of these"


def test_setters_that_no_case_calls_are_listed_with_their_reason():
    setters = {name for name in dir(FSDPModule) if name.startswith("set_") and name not in dir(nn.Module)}
    tree = ast.parse(inspect.getsource(fsdp2))
    called = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)} & setters
    assert setters - called <= set(NOT_SET["FSDPModule"])
    assert not called & set(NOT_SET["FSDPModule"])


def test_every_reason_is_given():
    assert all(reason for listed in NOT_SET.values() for reason in listed.values())
