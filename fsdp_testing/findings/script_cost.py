"""How does a script show what no number shows? It measures one operation: memory that stays, or what goes on the wire.

What is measured beyond what would do is yielded like a result, so that a script tells it as it tells a wrong number.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from string import Template

from fsdp_testing.findings.discovery import Discovery
from fsdp_testing.judging.communication_budget import budget_of
from fsdp_testing.judging.signature import operation_kind
from fsdp_testing.records import Case
from fsdp_testing.zoo.tree import unit_of
from fsdp_testing.zoo.tree_schema import parameters

_FSDP1_HELD = """def held(model, units):
    total = 0
    for name, module in model.named_modules():
        flat = module._handle.flat_param if isinstance(module, FSDP) and module._handle is not None else None
        for whole in ("_full_param_padded", "_full_prec_full_param_padded"):
            if clean(name) in units and getattr(flat, whole, None) is not None:
                total += getattr(flat, whole).untyped_storage().size()
    return total"""

_FSDP2_HELD = """def held(model, units):
    total = 0
    for name, module in model.named_modules():
        if isinstance(module, FSDPModule) and name in units:
            state = module._get_fsdp_state()
            for group in getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]:
                for parameter in group.fsdp_params if group is not None else ():
                    total += sum(whole.untyped_storage().size() for whole in parameter.all_gather_outputs)
    return total"""

_HELD = {"torch-fsdp1": _FSDP1_HELD, "torch-fsdp2": _FSDP2_HELD}

_COUNTER = """SENT = {"gathers": [], "reductions": []}


def watch(method, kind, place):
    original = getattr(dist.ProcessGroup, method, None)
    if original is None:
        return

    def call(group, *arguments, **options):
        tensors = arguments[place]
        while isinstance(tensors, (list, tuple)) and isinstance(tensors[0], (list, tuple)):
            tensors = tensors[0]
        tensors = tensors if isinstance(tensors, (list, tuple)) else [tensors]
        size = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        if size > 16:  # less is a flag or a norm
            SENT[kind].append(size)
        return original(group, *arguments, **options)

    setattr(dist.ProcessGroup, method, call)


for method in ("_allgather_base", "all_gather_single", "allgather"):
    watch(method, "gathers", 0)
for method in ("_reduce_scatter_base", "reduce_scatter_single", "reduce_scatter"):
    watch(method, "reductions", 1)
watch("allreduce", "reductions", 0)"""

_MEASURE = Template("""$source


def beyond(one):
    measured = $measured if isinstance(one, Ranks) else 0
    return [torch.tensor(float(max(0, measured - $limit)))]""")


@dataclass(frozen=True, slots=True)
class Cost:
    """What a script measures.

    Attributes:
        source: Functions that measure, to stand before the program.
        before: Lines before the operation.
        after: Lines after it.
        operation: Which operation; None where nothing is measured.
    """

    source: str = ""
    before: tuple[str, ...] = ()
    after: tuple[str, ...] = ()
    operation: int | None = None


def cost_of(found: Discovery) -> Cost | None:
    """Returns what the script of a finding measures, nothing where numbers show it, and None where it cannot be told."""
    if found.signature.kind not in ("kept", "excess"):
        return Cost()
    operation = _operation(found)
    if operation is None:
        return None
    if found.signature.kind == "kept":
        return _kept(found, operation)
    return _excess(found, operation)


def _operation(found: Discovery) -> int | None:
    """The operation that the signature names: a shrunk case fails in the last one of that kind; -1 for wrapping."""
    kinds = [operation_kind(found.case, index) for index in range(-1, len(found.case.program))]
    places = [place - 1 for place, kind in enumerate(kinds) if kind == found.signature.operation]
    return places[-1] if places else None


def _kept(found: Discovery, operation: int) -> Cost | None:
    told = re.search(r"stay gathered on rank \d+: (.*)", found.reason)
    held = _HELD.get(found.implementation)
    if told is None or held is None:
        return None
    names = (part.removeprefix("(root)").partition(" (")[0] for part in told[1].split(", "))
    units = tuple(name.strip() for name in names)
    source = _MEASURE.substitute(source=held, measured=f"held(one.model, {units!r})", limit=0)
    label = f"{operation} {found.signature.operation}, bytes of full parameters that stay"
    return Cost(source, (), (f"yield {label!r}, beyond(one)",), operation)


def _excess(found: Discovery, operation: int) -> Cost | None:
    bytes_told = re.search(r"bytes are gathered on rank \d+, (\d+) with", found.reason)
    count_told = re.search(r"reductions are issued on rank \d+, (\d+) would", found.reason)
    if bytes_told is not None:
        what, measured, limit = "bytes gathered", 'sum(SENT["gathers"])', int(bytes_told[1])
    elif count_told is not None:
        what, measured, limit = "reductions", 'len(SENT["reductions"])', int(count_told[1])
    else:
        most = _gathers(found.case, found.signature.operation)
        if most is None:
            return None
        what, measured, limit = "gathers", 'len(SENT["gathers"])', most
    source = _MEASURE.substitute(source=_COUNTER, measured=measured, limit=limit)
    label = f"{operation} {found.signature.operation}, {what} beyond {limit}"
    clear = "[sizes.clear() for sizes in SENT.values()]"
    return Cost(source, (clear,), (f"yield {label!r}, beyond(one)",), operation)


def _gathers(case: Case, kind: str) -> int | None:
    """How many gathers one pass takes with one for each unit, as torch does it: the root stays between the directions."""
    budget = budget_of(case)
    if budget is None or kind not in ("forward", "forward_backward"):
        return None
    units = {unit_of(spec.module, case.wrapping.units) for spec in parameters(case.model.tree)}
    twice = kind == "forward_backward" and case.strategy in ("full_shard", "hybrid_shard")
    return budget.uses * sum(2 if twice and unit else 1 for unit in units)
