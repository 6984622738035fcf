"""Small cases for the tests of the fuzzer."""

from __future__ import annotations

from typing import Any

from fsdp_testing.cases.records import Batch, Case, ForwardBackward, ModelSpec, Operation, WorldSpec

LINEAR: dict[str, Any] = {"kind": "linear", "name": "a", "out": 3}


def case(*program: Operation, nodes: tuple[dict[str, Any], ...] = (LINEAR,), width: int = 3, **fields: Any) -> Case:
    """A case on a tree of one layer."""
    model = ModelSpec("tree", dtype=fields.pop("dtype", "float64"), tree={"width": width, "nodes": list(nodes)})
    return Case(model, fields.pop("world", WorldSpec(2)), program, **{"strategy": "no_shard", **fields})


def micro(seed: int, **batch: Any) -> ForwardBackward:
    """A micro-batch."""
    return ForwardBackward(Batch(seed, **batch))
