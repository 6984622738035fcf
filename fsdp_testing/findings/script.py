"""How does a finding become a script that anyone can run, with torch and the implementation and nothing of ours?

The script builds the model, runs the program on the ranks with the implementation and in one process without it, and
says where the two part. It is written for the implementations whose way of wrapping is known here, and only for what
can be told that way: `script_for` returns None for the rest. Values of parameters and inputs are not those of the case,
so a script is run before anyone is told that it reproduces.
"""

from __future__ import annotations

import re

from fsdp_testing.findings.discovery import Discovery
from fsdp_testing.findings.script_cost import Cost, cost_of
from fsdp_testing.findings.script_families import FAMILIES
from fsdp_testing.findings.script_template import TEMPLATE
from fsdp_testing.findings.source import model_source
from fsdp_testing.records import Case, plan
from fsdp_testing.records.schedule import builds_late


def script_for(found: Discovery) -> str | None:
    """Returns the script for a finding, or None if it cannot be told with torch alone."""
    case = found.case
    family = FAMILIES.get(found.implementation)
    if family is None or case.model.tree is None or case.wrapping.policy is not None or case.wrapping.ignored:
        return None
    cost = cost_of(found)
    if cost is None or not _can_be_written(case):
        return None
    imports, wrap, access = family(case)
    if "def full_parameters" not in access and any("summon_writeback" in o.required() for o in case.program):
        return None
    arguments = ", ".join(f"{key}={value!r}" for key, value in case.optimizer.arguments.items())
    kind = {"sgd": "SGD", "adam": "Adam", "adamw": "AdamW"}[case.optimizer.name]
    return TEMPLATE.substitute(
        sentence=_sentence(found),
        identity=case.identity,
        size=case.world.size,
        imports=imports,
        dtype=case.model.dtype,
        model=model_source(case.model.tree),
        wrap=wrap,
        width=case.model.tree["width"],
        early=not builds_late(case),
        optimizer=f"{kind}(self.model.parameters(), {arguments})",
        access=f"{access}\n\n\n{cost.source}" if cost.source else access,
        program=_program(case, cost),
        tolerance=_tolerance(case),
        gradients=not any(planned.pending for planned in list(plan(case))[-1:]),
    )


def _can_be_written(case: Case) -> bool:
    """Whether the script can do every operation; its own plain reload knows neither flags nor a later optimizer."""
    renews = any(operation.renews_model for operation in case.program)
    others = any(operation.requires_grad_change() or operation.builds_optimizer for operation in case.program)
    return not (renews and others) and all(operation.script_lines("") is not None for operation in case.program)


def _sentence(found: Discovery) -> str:
    return re.sub(r'[\\"]', "'", found.sentence())


def _tolerance(case: Case) -> str:
    if case.mixed_precision is not None:
        return "5e-2"  # the one process computes in full precision here
    return "1e-9" if case.model.dtype == "float64" else "1e-4"


def _program(case: Case, cost: Cost) -> str:
    lines: list[str] = [*cost.before, *cost.after] if cost.operation == -1 else []
    for planned in plan(case):
        operation = planned.operation
        measured = planned.index == cost.operation
        lines += cost.before if measured else ()
        if not planned.void:
            lines += operation.script_lines(f"{planned.index} {operation.kind}") or ()
        lines += cost.after if measured else ()
    return "\n".join(f"    {line}" for line in lines)
