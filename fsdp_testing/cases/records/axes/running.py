"""Axes of how a case runs: dtypes, ranks, strategy, offload, optimizer, frozen parameters."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import astuple, fields, replace
from typing import TYPE_CHECKING, Any

from fsdp_testing.cases.records.axes.axis import Axis, Step, demand
from fsdp_testing.cases.records.specs import (
    DTYPES,
    OPTIMIZERS,
    STRATEGIES,
    MixedPrecisionSpec,
    OptimizerSpec,
    WorldSpec,
)

if TYPE_CHECKING:
    from fsdp_testing.cases.drawing.choices import Choices
    from fsdp_testing.cases.drawing.features import Swarm
    from fsdp_testing.cases.records.case import Case


class Numbers(Axis):
    """The dtype of the model, and mixed precision."""

    features = {
        "dtype.float32": (),
        "precision.param": ("mixed_precision",),
        "precision.reduce": ("reduce_dtype",),
        "precision.buffer": ("buffer_dtype",),
    }
    scripted = True

    def needs(self, case: Case) -> Iterable[str]:
        claims = {"mixed_precision": "param_dtype", "reduce_dtype": "reduce_dtype", "buffer_dtype": "buffer_dtype"}
        given = [claim for claim, name in claims.items() if getattr(case.mixed_precision, name, None)]
        # The hook claims for itself.
        return [claim for claim in given if claim != "reduce_dtype" or "compressing_hook" not in case.wrapping.settings]

    def problems(self, case: Case) -> Iterable[str]:
        yield from demand("model.dtype", case.model.dtype, DTYPES)
        for name, value in self._given(case):
            yield from demand(f"mixed_precision.{name}", value, DTYPES)

    def draw(self, case: Case, choices: Choices, swarm: Swarm) -> Case:
        precision = None
        if swarm.among(("precision.param", "precision.reduce", "precision.buffer")):
            small = ("bfloat16", "float16", "float32")
            drawn = {
                f"{name}_dtype": choices.pick(small)
                for name in ("param", "reduce", "buffer")
                if f"precision.{name}" in swarm
            }
            precision = MixedPrecisionSpec(**drawn)
        dtype = "float32" if precision is not None or "dtype.float32" in swarm else "float64"
        return replace(case, model=replace(case.model, dtype=dtype), mixed_precision=precision)

    def tags(self, case: Case) -> Iterable[str]:
        return (f"dtype:{case.model.dtype}", *(f"{name}:{value}" for name, value in self._given(case)))

    def simpler(self, case: Case) -> Iterable[Step]:
        if case.mixed_precision is None:
            if case.model.dtype != "float64":
                yield ("dtype",), self.plain(case)
            return
        yield ("precision",), self.plain(case)
        for name, _ in self._given(case):
            yield ("precision", name), replace(case, mixed_precision=replace(case.mixed_precision, **{name: None}))

    def plain(self, case: Case) -> Case:
        return replace(case, mixed_precision=None, model=replace(case.model, dtype="float64"))

    def text(self, case: Case) -> str:
        spec = case.mixed_precision
        return "" if spec is None else "mixed precision " + "/".join(dtype or "-" for dtype in astuple(spec))

    def _given(self, case: Case) -> list[tuple[str, str]]:
        spec = case.mixed_precision
        names = [item.name for item in fields(spec)] if spec is not None else []
        return [(name, value) for name in names if (value := getattr(spec, name)) is not None]


class World(Axis):
    """How many ranks there are, and how many of them share one model, which the scope of a campaign sets."""

    scripted = True

    def needs(self, case: Case) -> Iterable[str]:
        return ("tensor_parallel",) if case.world.tensor_parallel > 1 else ()

    def problems(self, case: Case) -> Iterable[str]:
        world = case.world
        if world.size < 1:
            yield f"world.size: expected at least 1, got {world.size}"
        if world.tensor_parallel < 1 or world.size % world.tensor_parallel:
            yield f"world.tensor_parallel: expected a divisor of {world.size} ranks, got {world.tensor_parallel}"
        elif world.mesh and math.prod(world.mesh) != world.replicas:
            yield f"world.mesh: expected {world.replicas} ranks in all, got shape {world.mesh}"

    def tags(self, case: Case) -> Iterable[str]:
        parts = case.world.tensor_parallel
        return (f"world:{case.world.size}", *((f"tensor_parallel:{parts}",) if parts > 1 else ()))

    def simpler(self, case: Case) -> Iterable[Step]:
        if case.world.tensor_parallel > 1:
            world = WorldSpec(case.world.replicas, case.world.backend, case.world.mesh)
            yield ("tensor_parallel",), replace(case, world=world)
        elif case.world.size > 2:
            yield ("world",), replace(case, world=WorldSpec(2, case.world.backend))

    def text(self, case: Case) -> str:
        parts = case.world.tensor_parallel
        return f"tensor parallelism over {parts}" if parts > 1 else ""


class Strategy(Axis):
    """The sharding strategy, and the mesh of a hybrid one; full_shard or the first that is claimed needs no feature."""

    features = {
        "strategy.shard_grad_op": ("shard_grad_op",),
        "strategy.no_shard": ("no_shard",),
        "strategy.hybrid": ("hybrid",),
    }
    scripted = True

    def needs(self, case: Case) -> Iterable[str]:
        return (STRATEGIES[case.strategy],)

    def problems(self, case: Case) -> Iterable[str]:
        return demand("strategy", case.strategy, STRATEGIES)

    def draw(self, case: Case, choices: Choices, swarm: Swarm) -> Case:
        claimed = [name for name, tag in STRATEGIES.items() if tag in swarm.scope.capabilities]
        on = [name for name in claimed if name == "full_shard" or f"strategy.{STRATEGIES[name]}" in swarm]
        strategy, size = choices.pick(on or claimed[:1]), case.world.replicas
        shapes = [(size // shards, shards) for shards in range(size, 0, -1) if size % shards == 0]
        mesh = choices.pick(shapes) if strategy.startswith("hybrid") else ()
        return replace(case, strategy=strategy, world=replace(case.world, mesh=mesh))

    def tags(self, case: Case) -> Iterable[str]:
        yield f"strategy:{case.strategy}"
        if case.world.mesh:
            yield "mesh:" + "x".join(map(str, case.world.mesh))
        if case.strategy == "no_shard" or case.world.mesh_shape[-1] == 1:
            yield "whole_parameters"
        if case.strategy in ("shard_grad_op", "hybrid_shard_zero2"):
            yield "gathered_until_backward"

    def simpler(self, case: Case) -> Iterable[Step]:
        if case.strategy != "full_shard":
            nearer = "hybrid_shard" if case.strategy == "hybrid_shard_zero2" else "full_shard"
            yield ("strategy",), replace(case, strategy="full_shard", world=replace(case.world, mesh=()))
            yield ("strategy", "nearer"), replace(case, strategy=nearer)

    def plain(self, case: Case) -> Case:
        strategy = "full_shard" if case.strategy != "no_shard" else "no_shard"
        return replace(case, strategy=strategy, world=replace(case.world, mesh=()))

    def for_oracle(self, case: Case) -> Case:
        world = WorldSpec(case.world.size, tensor_parallel=case.world.tensor_parallel)
        return replace(case, strategy="no_shard", world=world)

    def setup(self, case: Case) -> Mapping[str, Any]:
        shape = case.world.mesh_shape
        return {"strategy": case.strategy, "shard_size": shape[-1] if len(shape) == 2 else None}


class Offload(Axis):
    """Where parameters, gradients and optimizer state live."""

    features = {"offload": ("cpu_offload",)}
    rare = True
    scripted = True

    def needs(self, case: Case) -> Iterable[str]:
        return ("cpu_offload",) if case.cpu_offload else ()

    def draw(self, case: Case, choices: Choices, swarm: Swarm) -> Case:
        return replace(case, cpu_offload="offload" in swarm)

    def tags(self, case: Case) -> Iterable[str]:
        return ("offload",) if case.cpu_offload else ()

    def simpler(self, case: Case) -> Iterable[Step]:
        if case.cpu_offload:
            yield ("offload",), self.plain(case)

    def plain(self, case: Case) -> Case:
        return replace(case, cpu_offload=False)

    for_oracle = plain

    def text(self, case: Case) -> str:
        return "CPU offload" if case.cpu_offload else ""

    def setup(self, case: Case) -> Mapping[str, Any]:
        return {"cpu_offload": case.cpu_offload}


class Optimizer(Axis):
    """Which optimizer trains, and how."""

    features = {"optimizer.momentum": (), "optimizer.adamw": (), "optimizer.adam": ()}
    simplest = OptimizerSpec("sgd", {"lr": 0.1})

    def needs(self, case: Case) -> Iterable[str]:
        return ("whole_parameter_steps",) if case.optimizer.name == "lars" else ()

    def problems(self, case: Case) -> Iterable[str]:
        return demand("optimizer.name", case.optimizer.name, OPTIMIZERS)

    def draw(self, case: Case, choices: Choices, swarm: Swarm) -> Case:
        kinds = swarm.among(self.features)
        lr = choices.pick((0.05, 0.01))
        # Adam divides by |g| + eps: with a small eps, a gradient that is zero up to rounding makes a full-size step.
        options = {
            "": OptimizerSpec("sgd", {"lr": lr}),
            "optimizer.momentum": OptimizerSpec("sgd", {"lr": lr, "momentum": 0.9, "weight_decay": 0.01}),
            "optimizer.adamw": OptimizerSpec("adamw", {"lr": lr, "eps": 1e-3, "weight_decay": 0.1}),
            "optimizer.adam": OptimizerSpec("adam", {"lr": lr, "eps": 1e-3}),
        }
        return replace(case, optimizer=options[choices.pick(kinds) if kinds else ""])

    def tags(self, case: Case) -> Iterable[str]:
        momentum = "+momentum" if case.optimizer.arguments.get("momentum") else ""
        return (f"optimizer:{case.optimizer.name}{momentum}",)

    def simpler(self, case: Case) -> Iterable[Step]:
        if case.optimizer != self.simplest:
            yield ("optimizer",), self.plain(case)

    def plain(self, case: Case) -> Case:
        return replace(case, optimizer=self.simplest)


class Frozen(Axis):
    """Parameters that train from the start or not."""

    scripted = True

    def needs(self, case: Case) -> Iterable[str]:
        return ("frozen_parameters",) if case.model.freeze else ()

    def simpler(self, case: Case) -> Iterable[Step]:
        if case.model.freeze:
            yield ("freeze",), replace(case, model=replace(case.model, freeze=()))
