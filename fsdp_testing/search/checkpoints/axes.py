"""The axes of saved states: layouts (strategy, mesh, units), subjects (what is trained) and ways of storing a state."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from fsdp_testing.adapters.adapter import Adapter
from fsdp_testing.cases.drawing import needs_of_case
from fsdp_testing.cases.records import (
    Batch,
    Case,
    ForwardBackward,
    ModelSpec,
    Operation,
    OptimizerSpec,
    Step,
    Thaw,
    WorldSpec,
    WrappingPlan,
    ZeroGrad,
)
from fsdp_testing.oracle.setup import fitted

UNITS: Mapping[str, tuple[str, ...]] = {
    "root": (),
    "beside": ("first", "outer"),
    "nested": ("outer", "outer.inner"),
}
"""Which modules are units; the root always is one."""

WAYS = ("memory", "file", "dcp", "async")
"""Full state passed on as objects; full state by `torch.save` and `torch.load(weights_only=True)`; a directory of
`torch.distributed.checkpoint`, with shards if the implementation gives shards; the same by `async_save`, while training changes
the numbers.
"""


@dataclass(frozen=True, slots=True, order=True)
class Layout:
    """How a model is spread over ranks.

    Attributes:
        strategy: One of `cases.records.STRATEGIES`.
        mesh: Ranks in a row (`3`), or replicas x shards (`2x2`).
        units: One of `UNITS`.
    """

    strategy: str
    mesh: str
    units: str

    @property
    def name(self) -> str:
        """Return all three, as reports name the layout."""
        return f"{self.strategy}/{self.mesh}/{self.units}"

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(map(int, self.mesh.split("x")))

    @property
    def size(self) -> int:
        return math.prod(self.shape)


LAYOUTS = (
    Layout("no_shard", "2", "root"),
    Layout("no_shard", "3", "nested"),
    Layout("full_shard", "2", "root"),
    Layout("full_shard", "3", "nested"),
    Layout("full_shard", "4", "beside"),
    Layout("shard_grad_op", "2", "beside"),
    Layout("hybrid_shard", "2x2", "nested"),
    Layout("hybrid_shard_zero2", "2x2", "root"),
)
"""Widths of 3 and 5 leave uneven shards on 2 ranks and empty ones on 4; half of the groups of 2x2 are without rank 0."""


def layouts_of(adapter: Adapter) -> list[Layout]:
    """Return the layouts of an implementation, without inner units for one that does not claim any."""
    nested = "nested_wrapping" in adapter.capabilities
    return list(dict.fromkeys(layout if nested else replace(layout, units="root") for layout in LAYOUTS))


def _linear(name: str, **fields: Any) -> dict[str, Any]:
    return {"kind": "linear", "name": name, "out": 3, **fields}


def _tree(first: Mapping[str, Any], tie: str = "") -> dict[str, Any]:
    inner = [_linear("w", tie=tie), _linear("again", tie=tie)] if tie else [_linear("w")]
    outer = [
        _linear("w"),
        {"kind": "scale", "name": "one", "shape": "one"},
        {"kind": "group", "name": "inner", "nodes": inner},
    ]
    running = {"kind": "buffer", "name": "seen", "style": "running"}
    return {
        "width": 5,
        "nodes": [
            {"kind": "group", "name": "first", "nodes": [_linear("w", **first), running]},
            {"kind": "group", "name": "outer", "nodes": outer},
        ],
    }


@dataclass(frozen=True, slots=True)
class Subject:
    """What is trained, saved and loaded.

    Attributes:
        tree: The model (`cases/models/tree_schema.py`).
        optimizer: What the saved optimizer was built with.
        fresh: What the loading optimizer is built with: other settings, so that a setting that is not loaded shows.
        first: Settings of a separate group for the parameters of `first`; one group for all if there are none.
        thawed: Patterns of parameters that are frozen until the state was saved or loaded.
        built_first: The loading optimizer is built before the model is loaded, not after.
        dtype: Dtype of parameters and buffers.
        scheduled: A schedule changes the learning rates; it is saved too, and with it the state of each rank's random numbers.
    """

    tree: Mapping[str, Any]
    optimizer: OptimizerSpec
    fresh: OptimizerSpec
    first: Mapping[str, Any] = field(default_factory=dict)
    thawed: tuple[str, ...] = ()
    built_first: bool = False
    dtype: str = "float64"
    scheduled: bool = False


_ADAMW = OptimizerSpec("adamw", {"lr": 0.05, "betas": (0.8, 0.9), "eps": 1e-6, "weight_decay": 0.1})
_FRESH_ADAMW = OptimizerSpec("adamw", {"lr": 0.7, "betas": (0.5, 0.6), "eps": 1e-3, "weight_decay": 0.4})

SUBJECTS: Mapping[str, Subject] = {
    "adamw, two groups": Subject(_tree({}), _ADAMW, _FRESH_ADAMW, first={"lr": 0.02, "weight_decay": 0.0}),
    "momentum, shared weight": Subject(
        _tree({}, tie="t"),
        OptimizerSpec("sgd", {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.1, "nesterov": True}),
        OptimizerSpec("sgd", {"lr": 0.7, "momentum": 0.3, "weight_decay": 0.4, "nesterov": True}),
        built_first=True,
    ),
    "no state": Subject(
        _tree({}),
        OptimizerSpec("sgd", {"lr": 0.05, "weight_decay": 0.1}),
        OptimizerSpec("sgd", {"lr": 0.7, "weight_decay": 0.4}),
    ),
    "frozen part": Subject(_tree({"frozen": "all"}), _ADAMW, _FRESH_ADAMW),
    "thawed afterwards": Subject(_tree({"frozen": "all"}), _ADAMW, _FRESH_ADAMW, thawed=("first.*",), built_first=True),
    "bfloat16, moments in float32": Subject(
        _tree({}),
        OptimizerSpec("adam_in_float32", {"lr": 0.05, "betas": (0.8, 0.9), "eps": 1e-6}),
        OptimizerSpec("adam_in_float32", {"lr": 0.7, "betas": (0.5, 0.6), "eps": 1e-3}),
        dtype="bfloat16",
    ),
    "schedule, random numbers": Subject(
        _tree({}), _ADAMW, _FRESH_ADAMW, first={"lr": 0.02, "weight_decay": 0.0}, built_first=True, scheduled=True
    ),
}


def schedule_of(subject: Subject, optimizer: Any) -> Any:
    """Return the schedule of the optimizer's learning rates; None if the subject has none.

    Each rate follows from the previous one, so a rate or a step count that was not restored shows in all later rates.
    """
    return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=6, eta_min=0.001) if subject.scheduled else None


def case_of(subject: Subject, layout: Layout, adapter: Adapter) -> Case:
    """Return the two steps that come before saving; all ranks have the same inputs, and so the same buffers."""
    program: list[Operation] = []
    for seed in (1, 2):
        program += [ForwardBackward(Batch(seed, (2,), alike=True)), Step(), ZeroGrad()]
    mesh = layout.shape if len(layout.shape) == 2 else ()
    case = Case(
        ModelSpec("tree", tree=subject.tree, dtype=subject.dtype),
        WorldSpec(layout.size, mesh=mesh),
        tuple(program),
        wrapping=WrappingPlan(UNITS[layout.units]),
        strategy=layout.strategy,
        optimizer=subject.optimizer,
    )
    return fitted(case, adapter)


def further(subject: Subject, case: Case) -> Case:
    """Return the step that comes after saving or loading; every rank has inputs of its own."""
    thaw = (Thaw(subject.thawed),) if subject.thawed else ()
    return replace(case, program=(*thaw, ForwardBackward(Batch(7, (2,))), Step()))


def missing(subject: Subject, layout: Layout, adapter: Adapter) -> frozenset[str]:
    """Return the capabilities that the subject needs and the implementation does not claim."""
    case = case_of(subject, layout, adapter)
    needs = needs_of_case(case) | needs_of_case(further(subject, case)) | {"full_state_dict"}
    # If only whole units can be separated, parameters of one unit cannot be in different groups.
    needs |= {"frozen_mixed_unit"} if subject.first else set()
    return frozenset(needs - adapter.capabilities)
