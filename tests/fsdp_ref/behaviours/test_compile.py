"""`torch.compile` around a sharded model compiles the user's modules, and nothing of the reference."""

from __future__ import annotations

import contextlib
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import fsdp_ref
from fsdp_ref import ShardingStrategy
from fsdp_ref.runtime import backward, forward


@pytest.mark.world(2)
@pytest.mark.parametrize(
    "strategy",
    [ShardingStrategy.FULL_SHARD, pytest.param(ShardingStrategy.SHARD_GRAD_OP, marks=pytest.mark.slow)],
    ids=lambda s: s.name,
)
@pytest.mark.parametrize("around", ["model", "function"])
def test_a_compiled_model_trains_as_in_one_process(lab, path, strategy, around):
    torch.compiler.reset()  # warm ranks have compiled the test before, and torch gives up after eight versions of a function
    compiled, files = {}, set()

    def backend(graph, inputs):
        for node in graph.graph.nodes:
            files.update(re.findall(r'File "([^"]+)"', node.stack_trace or ""))
        return graph.forward

    def loss(model, x):
        if not lab.units(model):
            return lab.loss(model, x)
        if not compiled:
            compiled["model"] = torch.compile(model, backend=backend)
            compiled["function"] = torch.compile(lambda x: lab.loss(model, x), backend=backend)
        return lab.loss(compiled["model"], x) if around == "model" else compiled["function"](x)

    lab.parity(path=path, policy={lab.Block}, sharding_strategy=strategy, loss=loss)
    assert inspect.getfile(lab.Block) in files
    assert not [name for name in files if name.startswith(str(Path(fsdp_ref.__file__).parent))]


@pytest.mark.world(2)
def test_what_the_runtime_calls_is_not_compiled(lab, path, monkeypatch):
    """Streams of a vendor's device are Python, and outside of every package that the compiler leaves alone."""
    torch.compiler.reset()
    functions, called = set(), []

    def backend(graph, inputs):
        for node in graph.graph.nodes:
            functions.update(re.findall(r", in (\w+)", node.stack_trace or ""))
        return graph.forward

    def of_a_vendor(event, unit):
        called.append(torch.ones(2) * 3)
        return contextlib.nullcontext()

    monkeypatch.setattr(forward, "labelled", of_a_vendor)
    monkeypatch.setattr(backward, "labelled", of_a_vendor)

    def loss(model, x):
        if lab.units(model):
            model.compile(backend=backend)
        return lab.loss(model, x)

    lab.parity(path=path, policy={lab.Block}, loss=loss)
    assert called and any("forward" in name for name in functions)
    assert "of_a_vendor" not in functions


def test_wrapping_imports_no_compiler_which_is_told_when_it_comes() -> None:
    script = """
import sys
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore
from fsdp_ref import fully_shard
dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
compiler = "torch._dynamo" in sys.modules
model = nn.Sequential(nn.Linear(2, 2))
fully_shard(model[0])
fully_shard(model)
print(compiler, "torch._dynamo" in sys.modules)
import torch._dynamo.trace_rules as rules
print(sum("fsdp_ref" in folder for folder in rules.SKIP_DIRS))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout.split() == ["False", "False", "1"], done.stdout + done.stderr
