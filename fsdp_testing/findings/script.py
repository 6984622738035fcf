"""How does a finding become a script that anyone can run, with torch and the implementation and nothing of ours?

The script builds the model, runs the program on the ranks with the implementation and in one process without it, and
says where the two part. It is written for the implementations whose way of wrapping is known here, and only for what
can be told that way: `script_for` returns None for the rest. Values of parameters and inputs are not those of the case,
so a script is run before anyone is told that it reproduces.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from fsdp_testing.findings.discovery import Discovery
from fsdp_testing.findings.script_cost import Cost, cost_of
from fsdp_testing.findings.script_families import FAMILIES
from fsdp_testing.findings.script_template import TEMPLATE
from fsdp_testing.findings.source import model_source
from fsdp_testing.records import (
    Batch,
    BuildOptimizer,
    Case,
    Clip,
    EditFullParameters,
    Forward,
    ForwardBackward,
    Freeze,
    Move,
    Observe,
    Operation,
    Reload,
    SetLr,
    Step,
    Thaw,
    ZeroGrad,
    plan,
)


def script_for(found: Discovery) -> str | None:
    """Returns the script for a finding, or None if it cannot be told with torch alone."""
    case = found.case
    family = FAMILIES.get(found.implementation)
    if family is None or case.model.tree is None or case.wrapping.policy is not None or case.wrapping.ignored:
        return None
    if any(type(o) not in _WRITERS or (isinstance(o, Move) and o.dtype) for o in case.program):
        return None
    cost = cost_of(found)
    if cost is None or not _can_reload(case):
        return None
    imports, wrap, access = family(case)
    if "def full_parameters" not in access and any(isinstance(o, EditFullParameters) for o in case.program):
        return None
    arguments = ", ".join(f"{key}={value!r}" for key, value in case.optimizer.arguments.items())
    kind = {"sgd": "SGD", "adam": "Adam", "adamw": "AdamW"}[case.optimizer.name]
    late = any(isinstance(operation, BuildOptimizer) for operation in case.program)
    pending = _ends_pending(case)
    return TEMPLATE.substitute(
        sentence=_sentence(found),
        identity=case.identity,
        size=case.world.size,
        imports=imports,
        dtype=case.model.dtype,
        model=model_source(case.model.tree),
        wrap=wrap,
        width=case.model.tree["width"],
        early=not late,
        optimizer=f"{kind}(self.model.parameters(), {arguments})",
        access=f"{access}\n\n\n{cost.source}" if cost.source else access,
        program=_program(case, cost),
        tolerance=_tolerance(case),
        gradients=not pending,
    )


def _can_reload(case: Case) -> bool:
    """Whether every reload is one that the script's own, plain one can do."""
    reloads = [operation for operation in case.program if isinstance(operation, Reload)]
    others = any(isinstance(operation, (Freeze, Thaw, BuildOptimizer)) for operation in case.program)
    return not reloads or (not others and all(o.units is None and o.through is None for o in reloads))


def _sentence(found: Discovery) -> str:
    return re.sub(r'[\\"]', "'", found.sentence())


def _tolerance(case: Case) -> str:
    if case.mixed_precision is not None:
        return "5e-2"  # the one process computes in full precision here
    return "1e-9" if case.model.dtype == "float64" else "1e-4"


def _ends_pending(case: Case) -> bool:
    pending = False
    for operation in case.program:
        if isinstance(operation, ForwardBackward):
            pending = operation.no_sync
    return pending


def _program(case: Case, cost: Cost) -> str:
    lines: list[str] = [*cost.before, *cost.after] if cost.operation == -1 else []
    for planned in plan(case):
        operation = planned.operation
        measured = planned.index == cost.operation
        lines += cost.before if measured else ()
        if not planned.void:
            lines += _WRITERS[type(operation)](f"{planned.index} {operation.kind}", operation)
        lines += cost.after if measured else ()
    return "\n".join(f"    {line}" for line in lines)


def _batch(batch: Batch) -> str:
    return f"{batch.seed}, {batch.rows!r}, {batch.usage!r}, {batch.scale!r}"


def _write_forward_backward(name: str, operation: ForwardBackward) -> list[str]:
    sync = ", sync=False" if operation.no_sync else ""
    return [f"yield {name!r}, one.forward_backward({_batch(operation.batch)}{sync})"]


def _write_flags(flag: bool) -> Callable[[str, Freeze | Thaw], list[str]]:
    def write(_name: str, operation: Freeze | Thaw) -> list[str]:
        return [f"for p in matching(one.named(), {operation.patterns!r}):", f"    p.requires_grad_({flag})"]

    return write


_WRITERS: dict[type[Operation], Callable[..., list[str]]] = {
    ForwardBackward: _write_forward_backward,
    Forward: lambda name, o: [f"yield {name!r}, one.only_forward({_batch(o.batch)}, {o.mode!r})"],
    ZeroGrad: lambda _, o: [f"(one.optimizer or one.model).zero_grad(set_to_none={o.set_to_none})"],
    Step: lambda _, o: ["one.optimizer.step()"],
    BuildOptimizer: lambda _, o: ["one.optimizer = one.make_optimizer()"],
    SetLr: lambda _, o: ["for group in one.optimizer.param_groups:", f"    group['lr'] = {o.lr!r}"],
    Freeze: _write_flags(False),
    Thaw: _write_flags(True),
    Clip: lambda name, o: [f"yield {name!r}, one.clip({o.max_norm!r}, float({str(o.norm_type)!r}))"],
    EditFullParameters: lambda _, o: [f"one.edit({o.patterns!r}, {o.factor!r}, {o.writeback})"],
    Observe: lambda _, o: [],
    Move: lambda _, o: ['one.model.to("cpu")'],
    Reload: lambda _, o: [f"one.reload({o.form == 'full'}, {o.optimizer})"],
}
