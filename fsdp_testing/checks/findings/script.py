"""How does a finding become a script that anyone can run, with torch and the implementation and nothing of ours?

The script builds the model, runs the program on the ranks with the implementation and in one process without it, and
says where the two part. What scripts have in common is the text of the modules of `script_parts`, which are linted and
tested as they stand; only the model, the wrapping and the program are written for a case. `script_for` returns None for
what cannot be shown that way. Values of parameters and inputs are not those of the case, so a script is run before
anyone says that it reproduces.
"""

from __future__ import annotations

import ast
import inspect
import re
from types import ModuleType

from fsdp_testing.adapters.shared import module_layouts
from fsdp_testing.cases.models.model import loss_of, tensors_in
from fsdp_testing.cases.records import AXES, Case, plan
from fsdp_testing.cases.records.schedule import builds_late
from fsdp_testing.checks.findings.discovery import Discovery
from fsdp_testing.checks.findings.measurement import Measurement, measurement_of
from fsdp_testing.checks.findings.model_source import model_source
from fsdp_testing.checks.findings.script_parts import side_by_side, wire
from fsdp_testing.checks.findings.wrapping_source import FAMILIES

_MODEL_IMPORTS = (
    "from collections.abc import Mapping",
    "from dataclasses import dataclass",
    "from typing import NamedTuple",
    "from torch.nn import functional",
)


def script_for(found: Discovery) -> str | None:
    """Return the script for a finding, or None if it cannot be shown with torch alone."""
    case = found.case
    family = FAMILIES.get(found.implementation)
    if family is None or case.model.tree is None:
        return None
    measurement = measurement_of(found)
    # The script's own plain reload knows neither flags nor a later optimizer.
    renews = any(operation.renews_model for operation in case.program)
    others = any(operation.requires_grad_change() or operation.builds_optimizer for operation in case.program)
    unwritten = any(operation.script_lines("") is None for operation in case.program)
    unknown = any(list(axis.needs(case)) for axis in AXES if not axis.scripted)
    if measurement is None or unwritten or unknown or (renews and others):
        return None
    if case.world.tensor_parallel > 1 and measurement.before:
        return None  # the script counts what goes over both axes
    if not family.edits and any("summon_writeback" in operation.required() for operation in case.program):
        return None
    imports, wrap = family.wrap(case)
    parts = [_text(side_by_side), _text(family.part)]
    if case.world.tensor_parallel > 1:
        parts.append(_text(module_layouts))
    if measurement.before:
        imported, body = _text(wire)
        parts.append((imported, f"{body}\n\n\nWIRE.watch()"))
    imports = sorted({*imports, *_MODEL_IMPORTS, *(line for part in parts for line in part[0])})
    own = [model_source(case.model.tree), _function("wrap(model)", wrap), *_program_functions(case, measurement)]
    shared = [inspect.getsource(tensors_in).strip(), inspect.getsource(loss_of).strip(), *(body for _, body in parts)]
    return "\n\n\n".join([_introduction(found), "\n".join(imports), *own, *shared, _task(case)]) + "\n"


def _text(part: ModuleType) -> tuple[list[str], str]:
    """The imports of a module, and what is left of its text without them and what it says of itself."""
    source = inspect.getsource(part)
    lines = source.splitlines()
    imports: list[str] = []
    for node in reversed(ast.parse(source).body):
        is_import = isinstance(node, (ast.Import, ast.ImportFrom))
        if not is_import and not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)):
            continue
        text = "\n".join(lines[node.lineno - 1 : node.end_lineno])
        del lines[node.lineno - 1 : node.end_lineno]
        if is_import and "fsdp_testing" not in text and "__future__" not in text:
            imports.append(text)
    return imports, "\n".join(lines).strip()


def _introduction(found: Discovery) -> str:
    case, sentence = found.case, re.sub(r'[\\"]', "'", found.sentence())
    return f'''"""{sentence}

Runs on {case.world.size} ranks (gloo, CPU) and in one process; exits with 1 where the two part, with 0 where they agree.
Uses torch and the implementation alone. Written by fsdp-testing from case {case.identity}.
"""

from __future__ import annotations'''


def _function(head: str, lines: list[str]) -> str:
    return "\n".join([f"def {head}:", *(f"    {line}" for line in lines)])


def _program_functions(case: Case, measurement: Measurement) -> list[str]:
    arguments = ", ".join(f"{key}={value!r}" for key, value in case.optimizer.arguments.items())
    kind = {"sgd": "SGD", "adam": "Adam", "adamw": "AdamW"}[case.optimizer.name]
    return [
        _function("make_optimizer(parameters)", [f"return torch.optim.{kind}(parameters, {arguments})"]),
        _function("program(one)", [*_program(case, measurement), 'yield "the end", []']),
    ]


def _task(case: Case) -> str:
    fields = {
        "size": case.world.size,
        "parts": case.world.tensor_parallel,
        "width": case.model.tree["width"],
        "dtype": f"torch.{case.model.dtype}",
        "build": "build",
        "wrap": "wrap",
        "access": "Access",
        "optimizer": "make_optimizer",
        "optimizer_first": not builds_late(case),
        "program": "program",
        "tolerance": "1e-9" if case.model.dtype == "float64" else "1e-4",
        "gradients": not any(planned.pending for planned in list(plan(case))[-1:]),
    }
    if case.mixed_precision is not None:
        fields["tolerance"] = "5e-2"  # the one process computes in full precision here
    arguments = [f"    {name}={value}," for name, value in fields.items()]
    main = 'if __name__ == "__main__":\n    sys.exit(main(TASK))'
    return "\n".join(["TASK = Task(", *arguments, ")", "", main])


def _program(case: Case, measurement: Measurement) -> list[str]:
    around = measurement
    lines: list[str] = [*around.before, *around.after] if around.operation == -1 else []
    for planned in plan(case):
        operation = planned.operation
        measured = planned.index == around.operation
        lines += around.before if measured else ()
        if not planned.void:
            lines += operation.script_lines(f"{planned.index} {operation.kind}") or ()
        lines += around.after if measured else ()
    return lines
