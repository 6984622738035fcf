"""Scripts of findings: they compile for every drawn case they are written for, use nothing of ours, and tell the truth."""

from __future__ import annotations

import ast
import sys
import types
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from fuzz_cases import LINEAR, case, micro

from fsdp_testing.adapters import registry
from fsdp_testing.cases.drawing import CaseDrawer, Scope, SeededChoices
from fsdp_testing.cases.models.tree import tree_model
from fsdp_testing.cases.records import (
    Batch,
    Case,
    Clip,
    EditFullParameters,
    FailureKind,
    Forward,
    Measure,
    Overrun,
    Step,
    WrappingPlan,
)
from fsdp_testing.checks.findings.discovery import Discovery
from fsdp_testing.checks.findings.model_source import model_source
from fsdp_testing.checks.findings.script import script_for
from fsdp_testing.judging.signature import Signature, operation_kind
from fsdp_testing.search.campaign.writing import try_script, write_discovery

NAMES = ("torch-ddp", "torch-fsdp1", "torch-fsdp2")


def discovery(name: str, found: Case) -> Discovery:
    return Discovery(
        name, Signature(FailureKind.DIVERGED, "value", "step"), found, found, 'a "quoted" reason \\ with a slash'
    )


@pytest.mark.parametrize("name", NAMES)
def test_scripts_compile_and_import_nothing_of_ours(name: str):
    drawers = [CaseDrawer(Scope(registry.load(name).capabilities))] * 150
    if name == "torch-fsdp2":
        drawers += [CaseDrawer(Scope(registry.load(name).claimed(2), (4,), tensor_parallel=2))] * 20
    written = 0
    for seed, drawer in enumerate(drawers):
        script = script_for(discovery(name, drawer.draw(SeededChoices(seed))))
        if script is None:
            continue
        written += 1
        for node in ast.walk(ast.parse(script)):
            imported = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            imported += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not any(module.startswith("fsdp_testing") for module in imported)
    assert written > 40


def test_a_model_written_as_source_computes_what_the_tree_computes(monkeypatch: pytest.MonkeyPatch):
    drawer = CaseDrawer(Scope())
    compared = 0
    for seed in range(120):
        drawn = drawer.draw(SeededChoices(seed))
        if drawn.model.tree is None:
            continue
        header = (
            "from __future__ import annotations\nimport torch\nfrom dataclasses import dataclass\nfrom typing import NamedTuple\n"
            "from torch import nn\nfrom torch.nn import functional\n"
        )
        names = types.ModuleType("written_model").__dict__
        monkeypatch.setitem(sys.modules, "written_model", types.ModuleType("written_model"))  # dataclasses look there
        with torch.random.fork_rng(devices=[]):
            exec(header + model_source(drawn.model.tree), names)
        model = tree_model(drawn.model.tree)
        torch.set_default_dtype(torch.float64)
        try:
            written: torch.nn.Module = names["build"]()
        finally:
            torch.set_default_dtype(torch.float32)
        ours = model.build(1, torch.float64)
        buffers = dict(ours.named_buffers())
        for name, parameter in written.named_parameters():
            parameter.data.copy_(ours.get_parameter(name).data)
        for name, buffer in written.named_buffers():
            buffer.copy_(buffers[name])
        inputs = model.make_input(1, 0, 0, 3, torch.float64, use=(True, False, True))
        torch.manual_seed(3)
        expected = model.loss(ours(*inputs.args, **inputs.kwargs)).detach()
        torch.manual_seed(3)
        assert torch.allclose(model.loss(written(*inputs.args, **inputs.kwargs)).detach(), expected), drawn.model.tree
        compared += 1
    assert compared > 80


def test_what_cannot_be_told_with_torch_alone_gets_no_script():
    assert script_for(discovery("toy:UNBROKEN", case(micro(1)))) is None
    zoo = case(micro(1))
    assert script_for(discovery("torch-ddp", replace(zoo, model=replace(zoo.model, name="mlp", tree=None)))) is None
    assert script_for(discovery("torch-fsdp2", case(EditFullParameters(("*",), 0.5), strategy="full_shard"))) is None


@pytest.mark.parametrize(
    ("name", "program", "reproduces"),
    [
        ("torch-ddp", (micro(1), Clip(0.5), Step(), micro(2)), False),
        pytest.param("torch-fsdp2", (micro(1), Step(), micro(2), Step()), False, marks=pytest.mark.slow),
        ("torch-fsdp2", (micro(1), Forward(Batch(2)), Step(), micro(3)), True),
    ],
)
def test_a_script_says_whether_it_reproduces(name: str, program: tuple[object, ...], reproduces: bool, tmp_path: Path):
    strategy = "no_shard" if name == "torch-ddp" else "full_shard"
    found = discovery(name, case(*program, strategy=strategy, nodes=(LINEAR,)))  # type: ignore[arg-type]  # operations
    folder = write_discovery(found, tmp_path)
    found_out = try_script(folder)
    output = (folder / "script_output.txt").read_text()
    assert found_out is reproduces, output
    assert output.startswith("reproduces" if reproduces else "does not reproduce")


def costly(name: str, found: Case, overrun: Overrun) -> str:
    signature = Signature(FailureKind(overrun.kind), overrun.quantity, operation_kind(found, overrun.operation))
    script = script_for(Discovery(name, signature, found, found, overrun.sentence, overrun=overrun))
    assert script is not None
    return script


def run_script(script: str, folder: Path) -> tuple[bool | None, str]:
    (folder / "reproduce.py").write_text(script)
    return try_script(folder), (folder / "script_output.txt").read_text()


TWO = ({"kind": "linear", "name": "a", "out": 2}, {"kind": "linear", "name": "b", "out": 2})
IN_VAIN = case(
    Forward(Batch(1)), micro(2), nodes=TWO, width=2, strategy="full_shard", wrapping=WrappingPlan(("a", "b"))
)
THRICE = Overrun(Measure.UNIT_GATHERS, 1, 0, 3, 2, (("b", 0),))


def test_a_gather_for_nothing_is_shown_without_us(tmp_path: Path):
    reproduces, said = run_script(costly("torch-fsdp2", IN_VAIN, THRICE), tmp_path)
    assert reproduces, said
    assert "1 forward_backward, gathers beyond 4: 1.0, one process gives 0.0" in said


KEPT = Overrun(Measure.KEPT_PARAMETERS, 0, 0, 144, 0, (("", 96), ("b", 48)))
BYTES = Overrun(Measure.GATHERED_BYTES, 0, 0, 470, 8)


def reduced(limit: int) -> Overrun:
    return Overrun(Measure.REDUCTIONS, 0, 0, 3, limit)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "overrun", "shown"),
    [
        ("torch-fsdp1", KEPT, "full parameters that stay:"),
        ("torch-fsdp2", KEPT, "full parameters that stay:"),
        ("torch-fsdp1", BYTES, "bytes gathered beyond 8:"),
        ("torch-fsdp2", reduced(0), "reductions beyond 0: 1.0"),
        ("torch-fsdp1", reduced(1), "agree"),
    ],
)
def test_what_a_script_measures_is_there_and_no_more(name: str, overrun: Overrun, shown: str, tmp_path: Path):
    # A forward leaves the root gathered, and has gathered it; a micro-batch reduces once.
    first = micro(1) if overrun.measure is Measure.REDUCTIONS else Forward(Batch(1))
    asked = case(first, nodes=TWO, width=2, strategy="full_shard")
    reproduces, said = run_script(costly(name, asked, overrun), tmp_path)
    assert reproduces == (shown != "agree"), said
    assert shown in said


@pytest.mark.parametrize(
    ("name", "overrun"),
    [
        ("torch-ddp", KEPT),
        ("torch-fsdp2", None),
        ("torch-fsdp2", Overrun(Measure.UNIT_GATHERS, 2, 0, 3, 2, (("b", 0),))),
    ],
)
def test_a_cost_without_a_measure_gets_no_script(name: str, overrun: Overrun | None):
    found = case(*IN_VAIN.program, Step(), nodes=TWO, strategy="full_shard")
    kind = FailureKind.EXCESS if overrun is None else FailureKind(overrun.kind)
    assert script_for(Discovery(name, Signature(kind, "gathers", "step"), found, found, "?", overrun=overrun)) is None


def test_a_reworded_sentence_changes_no_script():
    """Scripts are written from fields; nothing reads the reason but people."""
    message = Discovery("torch-fsdp2", Signature(FailureKind.EXCESS, "gathers"), IN_VAIN, IN_VAIN, "", overrun=THRICE)
    script, other = script_for(message), script_for(replace(message, reason="said quite differently"))
    assert script is not None
    assert other is not None
    assert script.splitlines()[1:] == other.splitlines()[1:]
    again = Discovery.from_json(message.to_json(), "here")
    assert again == message
