"""The words for a case: tokens of its operations and tags of everything else, for rules and reports."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase

from fsdp_testing.cases.drawing.layouts import cut_dimension
from fsdp_testing.cases.drawing.normal_form import needs_of_case
from fsdp_testing.cases.models.tree import has_alias, unit_of
from fsdp_testing.cases.models.tree_schema import SCHEMA, ParameterSpec, every, get, parameters, walk
from fsdp_testing.cases.operations import EditGradients
from fsdp_testing.cases.records import AXES, Case, Operation

NEW_MODEL = "@new_model"
NEW_OPTIMIZER = "@new_optimizer"


def tokens(case: Case) -> tuple[str, ...]:
    """Return the tokens of a program in order."""
    return tuple(operation.token() for operation in case.program)


def words_of(program: Sequence[Operation]) -> Iterator[frozenset[str]]:
    """Yield the words of each operation of a program: its own, and `@trained` for a step on gradients.

    A step without any gradient leaves an optimizer as new as it was.
    """
    gradients = False
    for operation in program:
        kept = gradients and not (_clears(operation) or operation.renews_model)
        gradients = kept or operation.runs_backward
        yield words(operation) | ({"@trained"} if gradients and operation.token() == "step" else set())


def _clears(operation: Operation) -> bool:
    """Whether it leaves no gradient."""
    return operation.token() == "zero_grad" or operation == EditGradients(("*",), "none")


def words(operation: Operation) -> frozenset[str]:
    """Return the token of an operation, and the words for what it does, which several operations share.

    `@forward` runs a forward that no backward follows; `@backward` runs backwards; `@local` leaves gradients that await
    their reduction; `@reduced` runs backwards after which none await it; `@new_model` leaves another model;
    `@optimizer_saved` saves the optimizer's state and loads it; `@new_optimizer` leaves one that has none of its state;
    `@skips` leaves out a branch of the model in a micro-batch, on some rank at least.
    """
    local, backward = operation.pending_after(False), operation.runs_backward
    reduced = backward and not local
    done = {"@backward": backward, "@local": local, "@reduced": reduced, NEW_MODEL: operation.renews_model}
    token = operation.token()
    done["@forward"] = operation.runs_forward_alone
    done["@optimizer_saved"] = operation.saves_optimizer
    done["@skips"] = any("unused_parameters" in batch.required() for batch in operation.batches())
    renewed = operation.renews_model and not operation.saves_optimizer
    done[NEW_OPTIMIZER] = renewed or token == "build_optimizer"
    return frozenset({token, *(word for word, does in done.items() if does)})


def tags(case: Case) -> frozenset[str]:
    """Return the tags of everything in a legal case except the kinds of its operations."""
    return frozenset(_tags(case))


def _tags(case: Case) -> Iterator[str]:
    for axis in AXES:
        yield from axis.tags(case)
    yield from _cut_tags(case)
    for need in needs_of_case(case):
        yield f"needs:{need}"
    yield from _batch_tags(case)
    if case.model.tree is None:
        yield f"zoo:{case.model.name}"
        # What a model of the zoo consists of is not known without building it: it may be anything.
        yield "empty_shard"
        if {"shared_parameters", "reused_modules"} <= needs_of_case(case):
            yield "alias"
        return
    yield from _tree_tags(case)


def _cut_tags(case: Case) -> Iterator[str]:
    """Parts of a tree that tensor parallelism leaves whole, or that FSDP2 cannot cut again along the same dimension."""
    ranks, layouts = case.world.tensor_parallel, dict(case.wrapping.layouts)
    if ranks == 1 or case.model.tree is None:
        return
    kinds = {place.fqn: place.node["kind"] for place in every(walk(case.model.tree))}
    for spec in parameters(case.model.tree):
        if spec.module not in layouts:
            yield "layout:none"
            continue
        dimension = cut_dimension(layouts[spec.module], spec.name, embeds=kinds[spec.module] == "embed")
        size = spec.shape[dimension] if dimension is not None else case.world.size
        if dimension == 0 and size % case.world.size:
            yield "cut:uneven_rows"
        if -(-size // ranks) * (ranks - 1) >= size:
            yield "cut:empty_part"


def _batch_tags(case: Case) -> Iterator[str]:
    for operation in case.program:
        for batch in operation.batches():
            if len(set(batch.rows)) > 1:
                yield "batch:uneven"
            if 0 in batch.rows:
                yield "batch:empty"
            if batch.rows == (1,):
                yield "batch:one_row"
            if batch.usage:
                yield "batch:usage"


def _tree_tags(case: Case) -> Iterator[str]:
    shards = case.world.mesh_shape[-1]
    rows = [spec.shape[0] for spec in parameters(case.model.tree) if spec.shape]
    # Equal chunks of so many rows leave the last rank without any.
    if any(-(-count // shards) * (shards - 1) >= count for count in rows):
        yield "empty_shard"
    if has_alias(case.model.tree["nodes"]):
        yield "alias"
    if 1 in _elements_of_units(case).values():
        yield "one_element_unit"
    if all(map(_frozen_at_some_time(case), parameters(case.model.tree))):
        yield "all_frozen"
    for place in every(walk(case.model.tree)):
        node = place.node
        yield f"node:{node['kind']}"
        if node["kind"] == "linear" and get(node, "dtype"):
            yield f"dtype_of_part:{get(node, 'dtype')}"
        if node["kind"] == "group":
            for field in ("residual", "view", "keeps", "dropped", "calls", "branch"):
                if get(node, field) != SCHEMA["group"][field]:
                    yield f"group:{field}"
            if get(node, "returns") != "tensor":
                yield f"returns:{get(node, 'returns')}"


def _optional_units(case: Case) -> frozenset[str]:
    groups = [place for place in every(walk(case.model.tree)) if place.node["kind"] == "group"]
    optional = [f"{g.fqn}." for g in groups if get(g.node, "branch") >= 0 or get(g.node, "dropped")]
    used = [spec.fqn for spec in parameters(case.model.tree) if not spec.fqn.startswith(tuple(optional))]
    return units_of_tree(case) - {unit_of(fqn, case.wrapping.units) for fqn in used}


def _frozen_units(case: Case) -> frozenset[str]:
    is_frozen = _frozen_at_some_time(case)
    trained = [spec.fqn for spec in parameters(case.model.tree) if not is_frozen(spec)]
    return units_of_tree(case) - {unit_of(fqn, case.wrapping.units) for fqn in trained}


def _frozen_at_some_time(case: Case) -> Callable[[ParameterSpec], bool]:
    changes = [change for operation in case.program if (change := operation.requires_grad_change())]
    frozen = [*case.model.freeze, *(pattern for patterns, flag in changes if not flag for pattern in patterns)]
    return lambda spec: spec.frozen or any(fnmatchcase(spec.fqn, pattern) for pattern in frozen)


def units_of_tree(case: Case) -> frozenset[str]:
    """Return the units of a tree that have parameters, by FQN; none where a policy makes them, or of another model."""
    return frozenset(() if case.model.tree is None else _elements_of_units(case))


UNITS: Mapping[str, Callable[[Case], frozenset[str]]] = {
    "optional": _optional_units,
    "frozen": _frozen_units,
    "one_element": lambda case: frozenset(unit for unit, size in _elements_of_units(case).items() if size == 1),
}
"""Units of a tree by what they have in common: inside a part that some micro-batches leave out, of parameters that are frozen
at some time, all of them, or of one element."""


def units_with(case: Case, word: str) -> frozenset[str] | None:
    """Return the units that a word of `UNITS` names; None where a case does not name its units."""
    return UNITS[word](case) if case.model.tree is not None and case.wrapping.policy is None else None


def _elements_of_units(case: Case) -> Counter[str]:
    """How many elements each unit has, by its FQN; which units a policy makes is not known."""
    elements: Counter[str] = Counter()
    for spec in parameters(case.model.tree) if case.wrapping.policy is None else ():
        elements[unit_of(spec.fqn, case.wrapping.units)] += math.prod(spec.shape)
    return elements
