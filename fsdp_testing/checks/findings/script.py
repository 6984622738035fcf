"""Turns a finding into a script that anyone can run with torch and the implementation, without fsdp-testing.

The script builds the model, runs the program on ranks with the implementation and in one process without it, and says where the
two differ. The common text of all scripts comes from the modules of `script_parts`, which are linted and tested themselves;
only the model, the wrapping and the program are written for a case. Excess memory and communication, which no number shows, are
measured and yielded like results. `script_for` returns None for a finding that cannot be shown that way. Parameters and inputs
have other values than in the case, so a script must run before it counts as a reproduction.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType

from fsdp_testing.adapters.shared import module_layouts
from fsdp_testing.adapters.shared.fsdp_options import STRATEGIES
from fsdp_testing.cases.models.model import loss_of, tensors_in
from fsdp_testing.cases.models.tree import unit_of
from fsdp_testing.cases.models.tree_schema import parameters
from fsdp_testing.cases.records import AXES, Case, FailureKind, Measure, Overrun, plan
from fsdp_testing.cases.records.schedule import builds_late
from fsdp_testing.checks.findings.discovery import Discovery
from fsdp_testing.checks.findings.model_source import model_source, shared_again
from fsdp_testing.checks.findings.script_parts import ddp, fsdp1, fsdp2, side_by_side, wire
from fsdp_testing.judging.checkers.overruns import budget_of
from fsdp_testing.judging.signature import operation_kind


@dataclass(frozen=True, slots=True)
class Measurement:
    """The measurement of a script.

    Attributes:
        operation: The operation; None where nothing is measured.
        before: Lines before it, where collectives are counted.
        after: Lines after it.
    """

    operation: int | None = None
    before: tuple[str, ...] = ()
    after: tuple[str, ...] = ()


def measurement_of(found: Discovery) -> Measurement | None:
    """Return the measurement of a finding's script; None if torch alone cannot measure it."""
    if found.signature.kind not in (FailureKind.KEPT, FailureKind.EXCESS):
        return Measurement()
    overrun = found.overrun
    if overrun is None:
        return None
    where = f"{overrun.operation} {operation_kind(found.case, overrun.operation)}"
    if overrun.measure is Measure.KEPT_PARAMETERS:
        if not FAMILIES[found.implementation].measures:
            return None
        units = tuple(unit for unit, _ in overrun.units)
        line = f"one.beyond(0, lambda: Access.unsharded_bytes(one.model, {units!r}))"
        return Measurement(
            overrun.operation, (), (f"yield {f'{where}, bytes of full parameters that stay'!r}, {line}",)
        )
    what, measured = _WIRE[overrun.measure]
    limit = _limit(found.case, overrun)
    if limit is None:
        return None
    line = f"one.beyond({limit}, lambda: {measured})"
    return Measurement(overrun.operation, ("WIRE.clear()",), (f"yield {f'{where}, {what} beyond {limit}'!r}, {line}",))


_WIRE = {
    Measure.GATHERED_BYTES: ("bytes gathered", 'sum(WIRE.sent["gathers"])'),
    Measure.UNIT_GATHERS: ("gathers", 'len(WIRE.sent["gathers"])'),
    Measure.REDUCTIONS: ("reductions", 'len(WIRE.sent["reductions"])'),
}


def _limit(case: Case, overrun: Overrun) -> int | None:
    """The sufficient amount; for gathers of all units as in torch, where the root stays gathered until backward."""
    if overrun.measure is not Measure.UNIT_GATHERS:
        return overrun.limit
    budget = budget_of(case)
    kind = operation_kind(case, overrun.operation)
    if budget is None or kind not in ("forward", "forward_backward"):
        return None
    units = {unit_of(spec.module, case.wrapping.units) for spec in parameters(case.model.tree)}
    twice = kind == "forward_backward" and case.strategy in ("full_shard", "hybrid_shard")
    return budget.uses * sum(2 if twice and unit else 1 for unit in units)


_DDP = "return DistributedDataParallel(model, broadcast_buffers=False, find_unused_parameters=True)"
_MESH = "from torch.distributed.device_mesh import init_device_mesh"


@dataclass(frozen=True, slots=True)
class Family:
    """How scripts use one implementation.

    Attributes:
        part: Module that clips, gathers, ...; its text goes into the script.
        wrap: Gives import lines, and the lines of a function that wraps `model`.
        edits: Full parameters can be edited.
        measures: The part knows how many bytes stay unsharded.
    """

    part: ModuleType
    wrap: Callable[[Case], tuple[list[str], list[str]]]
    edits: bool
    measures: bool


def _innermost_first(case: Case) -> list[str]:
    return sorted(case.wrapping.units, key=lambda name: -name.count("."))


def _fsdp2(case: Case) -> tuple[list[str], list[str]]:
    options, names = ["mesh=mesh"], ["fully_shard"]
    shape = case.world.mesh_shape
    axes = ', mesh_dim_names=("replicate", "shard")' if len(shape) == 2 else ""
    cut: list[str] = []
    if case.world.tensor_parallel > 1:
        data = ("replicate", "shard") if case.world.mesh else ("data",)
        shape = (*(case.world.mesh or (case.world.replicas,)), case.world.tensor_parallel)
        axes = f", mesh_dim_names={(*data, 'tensor')!r}".replace("'", '"')
        cut = [f'cut_module(model.{fqn}, mesh["tensor"], {layout!r})' for fqn, layout in case.wrapping.layouts]
        cut += shared_again(case.model.tree)
        options = ["mesh=mesh[" + ", ".join(f'"{name}"' for name in data) + "]"]
    if case.strategy in ("shard_grad_op", "hybrid_shard_zero2"):
        options.append("reshard_after_forward=False")
    if case.mixed_precision is not None:
        spec = case.mixed_precision
        # Until torch 2.14 an unset `reduce_dtype` means `param_dtype`, from 2.15 on the parameter's own dtype.
        given = {"param_dtype": spec.param_dtype, "reduce_dtype": spec.reduce_dtype or spec.param_dtype}
        dtypes = [f"{key}=torch.{value}" for key, value in given.items() if value]
        options.append(f"mp_policy=MixedPrecisionPolicy({', '.join(dtypes)})")
        names.append("MixedPrecisionPolicy")
    if case.cpu_offload:
        options.append("offload_policy=CPUOffloadPolicy(pin_memory=False)")
        names.append("CPUOffloadPolicy")
    lines = [f"mesh = init_device_mesh('cpu', {shape!r}{axes})", *cut]
    lines += [f"fully_shard(model.{name}, {', '.join(options)})" for name in _innermost_first(case)]
    lines += [f"fully_shard(model, {', '.join(options)})", "return model"]
    return [_MESH, f"from torch.distributed.fsdp import {', '.join(sorted(names))}"], lines


def _fsdp1(case: Case) -> tuple[list[str], list[str]]:
    options = [
        f"sharding_strategy=ShardingStrategy.{STRATEGIES[case.strategy]}",
        'device_id=torch.device("cpu")',
        "use_orig_params=True",
    ]
    names = ["ShardingStrategy"]
    imports: list[str] = []
    lines: list[str] = []
    if case.strategy.startswith("hybrid"):
        imports.append(_MESH)
        lines.append(
            f"mesh = init_device_mesh('cpu', {case.world.mesh_shape!r}, mesh_dim_names=('replicate', 'shard'))"
        )
        options.append("device_mesh=mesh")
    if case.mixed_precision is not None:
        keys = ("param_dtype", "reduce_dtype", "buffer_dtype")
        given = {key: getattr(case.mixed_precision, key) for key in keys}
        dtypes = [f"{key}=torch.{value}" for key, value in given.items() if value]
        options.append(f"mixed_precision=MixedPrecision({', '.join(dtypes)})")
        names.append("MixedPrecision")
    lines += [f"model.{name} = FSDP(model.{name}, {', '.join(options)})" for name in _innermost_first(case)]
    lines.append(f"return FSDP(model, {', '.join(options)})")
    return [*imports, f"from torch.distributed.fsdp import {', '.join(sorted(names))}"], lines


FAMILIES = {
    "torch-ddp": Family(ddp, lambda _: ([], [_DDP]), edits=True, measures=False),
    "torch-fsdp1": Family(fsdp1, _fsdp1, edits=True, measures=True),
    "torch-fsdp2": Family(fsdp2, _fsdp2, edits=False, measures=True),
}


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
    # The script's plain reload supports neither flags nor a later optimizer.
    renews = any(operation.renews_model for operation in case.program)
    others = any(operation.requires_grad_change() or operation.builds_optimizer for operation in case.program)
    unwritten = any(operation.script_lines("") is None for operation in case.program)
    unknown = any(list(axis.needs(case)) for axis in AXES if not axis.scripted)
    if measurement is None or unwritten or unknown or (renews and others):
        return None
    if case.world.tensor_parallel > 1 and measurement.before:
        return None  # the script counts the collectives of both axes
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
    """The imports of a module, and its text without imports and docstring."""
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

Runs on {case.world.size} ranks (gloo, CPU) and in one process; exits with 1 if they differ, with 0 if they agree.
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
