"""Modules that are cut over two ranks compute what they compute whole: outputs, and gradients of inputs and parameters."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from fsdp_testing import run_ranks
from fsdp_testing.cases.drawing.layouts import OF_KIND
from fsdp_testing.cases.models.tree import tree_model
from fsdp_testing.cases.records import UNIT_ROUNDOFF

NODES: list[dict[str, Any]] = [
    {"kind": "linear", "out": 4},
    {"kind": "linear", "out": 3, "bias": False},
    {"kind": "embed", "rows": 5},
    {"kind": "norm"},
    {"kind": "scale", "shape": "vector"},
    {"kind": "conv"},
    {"kind": "offset"},
]
CASES = [(node, (layout,)) for node in NODES for layout in OF_KIND[node["kind"]] if not layout.endswith("_cut")]
CASES += [
    ({"kind": "linear", "out": 6}, ("colwise_cut", "rowwise_cut")),
    ({"kind": "scale", "shape": "scalar"}, ("replicated",)),
]


# DTensor of torch 2.11 takes the whole gradient of a convolution that every rank has for a part of it, and adds them up.
ADDED_UP = [f"conv ('replicated',), {rows} rows: a.{name}" for rows in (3, 1) for name in ("weight", "bias")]
EXPECTED = ADDED_UP if torch.__version__.startswith("2.11.") else []


def computed(model: nn.Module, rows: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, 5, generator=generator, dtype=torch.float64).requires_grad_()
    output = model(x, ids=torch.arange(rows))
    output.square().sum().backward()
    grads = {name: parameter.grad for name, parameter in model.named_parameters()}
    return {"output": output.detach(), "input": x.grad, **grads}


def differences() -> list[str]:
    from torch.distributed.device_mesh import init_device_mesh

    from fsdp_testing.adapters.shared.module_layouts import cut_module

    mesh, wrong = init_device_mesh("cpu", (2,)), []
    for node, layouts in CASES:
        second = [{"kind": "linear", "name": "b"}] if len(layouts) > 1 else []
        tree = tree_model({"width": 5, "nodes": [{**node, "name": "a"}, *second]})
        for rows in (3, 1):  # more rows than ranks, and fewer
            whole, cut = (tree.build(0, torch.float64) for _ in range(2))
            for name, layout in zip("ab", layouts):
                cut_module(cut.get_submodule(name), mesh, layout)
            expected, found = computed(whole, rows), computed(cut, rows)
            for name, value in expected.items():
                got = found[name].full_tensor() if hasattr(found[name], "full_tensor") else found[name]
                # Sums of at most 5 products of sums of at most 5: some 20 roundings, of numbers no larger than a few units.
                bound = 4 * 20 * UNIT_ROUNDOFF["float64"] * max(1.0, float(value.abs().max()))
                if not torch.allclose(got, value, rtol=0, atol=bound):
                    wrong.append(f"{node['kind']} {layouts}, {rows} rows: {name}")
    return wrong


def test_what_is_cut_computes_what_is_whole():
    assert run_ranks(differences, size=2) == [EXPECTED, EXPECTED]
