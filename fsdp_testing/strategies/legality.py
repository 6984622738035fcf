"""What is the legal case nearest to one whose parts were deleted, and what must an implementation claim to run it?

One function decides for generator, mutator and shrinker. It never adds anything but what a case cannot be without.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

from fsdp_testing.records import (
    AssignData,
    BuildOptimizer,
    Case,
    Clip,
    EditFullParameters,
    Freeze,
    Interrupt,
    Move,
    Operation,
    OptimizerSpec,
    Reload,
    ReplaceParameters,
    Step,
    Thaw,
    UnshardFirst,
    WorldSpec,
    WrappingPlan,
    void_operations,
)
from fsdp_testing.zoo import MODELS
from fsdp_testing.zoo.tree import has_alias, needs_of, unit_names, unit_of
from fsdp_testing.zoo.tree_legality import ParameterSpec, every, get, legal_tree, parameters, walk

_CLASSES = ("TreeGroup", "TreeLinear")
_WIDE = ("float32", "float64")


def legal_case(case: Case, capabilities: frozenset[str] | None = None) -> Case:
    """Returns the case with everything dropped that has no meaning; a legal case comes back equal.

    Args:
        case: Of the right form (`Case.from_json` checks that).
        capabilities: What the implementation claims, where that decides which comparison is fair; None for all.
    """
    if case.model.tree is not None:
        tree = legal_tree(case.model.tree)
        if case.mixed_precision is not None:
            # Low precision is compared bit by bit, and a product of a transposed matrix may be rounded otherwise.
            tree = _without_strides(tree)
            # Activations that pass through a module which nobody casts are of a dtype that the next one may refuse.
            case = replace(case, wrapping=replace(case.wrapping, ignored=()))
            # Gathered parameters may be shown rounded, and what is made of them is then as rough.
            kept = tuple(operation for operation in case.program if not isinstance(operation, AssignData))
            case = replace(case, program=kept)
        case = replace(case, model=replace(case.model, tree=tree))
        wrapping = _legal_wrapping(case.wrapping, tree)
        case = replace(case, wrapping=wrapping, program=_legal_program(case.program, tree, wrapping))
        if _changes_ignored(case, tree):
            # Nobody averages gradients of what is ignored, or puts its numbers back after an edit.
            case = replace(case, wrapping=replace(wrapping, ignored=()))
    elif _may_share(case):
        kept = tuple(operation for operation in case.program if not isinstance(operation, ReplaceParameters))
        case = replace(case, program=kept)
    if any(isinstance(operation, (Reload, Interrupt, UnshardFirst, Move)) for operation in case.program):
        case = replace(case, program=_legal_state_operations(case))
    case = replace(case, world=_legal_world(case))
    if case.mixed_precision is not None and case.mixed_precision.buffer_dtype:
        # Buffers may be cast while wrapping or in the first forward: what is seen between is each one's own affair.
        first = next((place for place, o in enumerate(case.program) if o.batches()), len(case.program))
        case = replace(case, program=case.program[first:])
    if any(isinstance(o, Clip) and math.isinf(o.norm_type) for o in case.program) and _has_empty(case):
        # torch's own clipping of plain tensors knows no largest element of none.
        program = tuple(replace(o, norm_type=2.0) if isinstance(o, Clip) else o for o in case.program)
        case = replace(case, program=program)
    if capabilities is not None and "unused_gradient_is_none" not in capabilities and _leaves_unused(case):
        case = replace(case, optimizer=_stateless(case.optimizer))
    return case


def _without_strides(node: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: [_without_strides(inner) for inner in value] if key == "nodes" else value
        for key, value in node.items()
        if key != "strided"
    }


def _has_empty(case: Case) -> bool:
    if case.model.tree is None:
        model = MODELS.get(case.model.name)
        return model is not None and "empty" in model.traits
    return any(not spec.numel for spec in parameters(case.model.tree))


def _legal_wrapping(plan: WrappingPlan, tree: Mapping[str, Any]) -> WrappingPlan:
    names = set(unit_names(tree))
    frozen_only = {name for name in plan.ignored if name in names and _all_frozen(tree, name)}
    ignored = tuple(dict.fromkeys(name for name in plan.ignored if name in frozen_only))
    inside = tuple(f"{name}." for name in ignored)
    units = tuple(
        dict.fromkeys(n for n in plan.units if n in names and n not in ignored and not n.startswith(inside or (" ",)))
    )
    policy = plan.policy
    if policy is not None:
        units = ()
        if policy.kind == "module_class":
            present = {"TreeGroup" if _is_group(tree, name) else "" for name in names} | {"TreeLinear"}
            classes = tuple(name for name in policy.classes if name in present and _has_class(tree, name))
            policy = replace(policy, classes=classes) if classes else None
    return WrappingPlan(units, policy, ignored)


def _all_frozen(tree: Mapping[str, Any], module: str) -> bool:
    own = [s for s in parameters(tree) if s.module == module or s.module.startswith(f"{module}.")]
    return bool(own) and all(spec.frozen and not spec.tie for spec in own)


def _changes_ignored(case: Case, tree: Mapping[str, Any]) -> bool:
    """Whether an operation thaws a parameter that stays outside the implementation, or edits it for a while."""
    changing = [
        pattern
        for o in case.program
        if isinstance(o, Thaw) or (isinstance(o, EditFullParameters) and not o.writeback)
        for pattern in o.patterns
    ]
    inside = tuple(f"{module}." for module in case.wrapping.ignored)
    if not changing or not inside:
        return False
    names = [spec.fqn for spec in parameters(tree) if f"{spec.fqn}.".startswith(inside)]
    return any(fnmatchcase(name, pattern) for name in names for pattern in changing)


def _may_share(case: Case) -> bool:
    """Whether a parameter of a zoo model may be that of several modules, so that nobody may replace it in one of them."""
    model = MODELS.get(case.model.name)
    return model is None or bool({"shared_parameters", "reused_modules"} & (model.needs | model.traits))


def _has_class(tree: Mapping[str, Any], name: str) -> bool:
    kind = {"TreeGroup": "group", "TreeLinear": "linear"}.get(name)
    return any(_node_at(tree, unit)["kind"] == kind for unit in unit_names(tree))


def _is_group(tree: Mapping[str, Any], name: str) -> bool:
    return bool(_node_at(tree, name)["kind"] == "group")


def _node_at(tree: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    node: Mapping[str, Any] = tree
    for part in name.split("."):
        node = next(inner for inner in node["nodes"] if inner["name"] == part)
    return node


def _legal_program(
    program: Iterable[Operation], tree: Mapping[str, Any], wrapping: WrappingPlan
) -> tuple[Operation, ...]:
    names: list[str] | None = None
    kept: list[Operation] = []
    for operation in program:
        if isinstance(operation, (Freeze, Thaw, EditFullParameters, AssignData)):
            names = names if names is not None else _first_names(parameters(tree))
            patterns = tuple(p for p in operation.patterns if any(fnmatchcase(name, p) for name in names))
            if not patterns:
                continue
            operation = replace(operation, patterns=patterns)
            if isinstance(operation, AssignData):
                # Every unit runs, since one that does not may notice its new storage later.
                operation = replace(operation, batch=replace(operation.batch, usage=()))
        elif isinstance(operation, ReplaceParameters):
            patterns = tuple(_replaceable(operation.patterns, tree, wrapping.ignored))
            if not patterns:
                continue
            operation = replace(operation, patterns=patterns)
        elif isinstance(operation, Reload) and operation.units is not None:
            operation = replace(operation, units=_reload_units(operation.units, tree, wrapping))
        kept.append(operation)
    return tuple(kept)


def _replaceable(patterns: Iterable[str], tree: Mapping[str, Any], ignored: Iterable[str]) -> Iterator[str]:
    """Names of parameters that one module alone has, and that the implementation shards."""
    outside = tuple(f"{module}." for module in ignored)
    aliased = has_alias(tree["nodes"])
    for spec in parameters(tree):
        alone = not spec.tie and not aliased and not f"{spec.fqn}.".startswith(outside)
        if alone and any(fnmatchcase(spec.fqn, pattern) for pattern in patterns):
            yield spec.fqn


def _reload_units(units: tuple[str, ...], tree: Mapping[str, Any], wrapping: WrappingPlan) -> tuple[str, ...] | None:
    """Units of the new model; with a policy there is no plan by name to change."""
    if wrapping.policy is not None:
        return None
    return _legal_wrapping(replace(wrapping, units=units), tree).units


def _legal_state_operations(case: Case) -> tuple[Operation, ...]:
    """Leaves out what nothing could be said of: saved state that the ranks would have to agree about, and do not."""
    kept: list[Operation] = []
    # What a policy wraps is the implementation's affair; the root is a unit in any case.
    units = {"", *case.wrapping.units}
    void = void_operations(case)
    for index, operation in enumerate(case.program):
        if isinstance(operation, Move) and operation.dtype and (kept or not _may_be_cast(case, operation.dtype)):
            operation = Move()
        if isinstance(operation, Reload) and (_has_buffers_of_ranks(case) or case.mixed_precision is not None):
            continue
        if isinstance(operation, Reload) and operation.through is not None and _counts(case):
            # Every rank plays the one process, which computes with what its own ranks counted.
            operation = replace(operation, through=None)
        if isinstance(operation, Reload) and operation.units is not None and index not in void:
            units = {"", *operation.units}
        if isinstance(operation, UnshardFirst):
            operation = replace(operation, units=tuple(dict.fromkeys(u for u in operation.units if u in units)))
        if isinstance(operation, Interrupt) and len(operation.batch.usage) > 1:
            operation = replace(operation, batch=replace(operation.batch, usage=operation.batch.usage[:1]))
        kept.append(operation)
    return tuple(kept)


def _may_be_cast(case: Case, dtype: str) -> bool:
    """Whether a cast of the whole model to `dtype`, as the first thing done with it, has one meaning for everyone."""
    if case.mixed_precision is not None or case.model.tree is None or dtype not in _WIDE:
        return False
    if any(spec.dtype for spec in parameters(case.model.tree)) or any(isinstance(o, Reload) for o in case.program):
        return False
    # Whatever is built with the parameters that were there before would go on with those.
    built = next((place for place, o in enumerate(case.program) if isinstance(o, BuildOptimizer)), None)
    return built is not None and not any(isinstance(o, Step) for o in case.program[:built])


def _counts(case: Case) -> bool:
    """Whether a buffer may hold how often a rank ran a part."""
    if case.model.tree is None:
        return False  # models with buffers are not saved at all
    return any(p.node["kind"] == "buffer" and get(p.node, "style") == "counter" for p in every(walk(case.model.tree)))


def _has_buffers_of_ranks(case: Case) -> bool:
    """Whether a buffer may differ between ranks, or be lost by saving and loading."""
    if case.model.tree is None:
        model = MODELS.get(case.model.name)
        return model is None or "buffers" in model.needs | model.traits
    buffers = [place.node for place in every(walk(case.model.tree)) if place.node["kind"] == "buffer"]
    return any(
        get(n, "style") == "running" or (get(n, "style") == "counter" and not get(n, "persistent")) for n in buffers
    )


def _first_names(specs: Iterable[ParameterSpec]) -> list[str]:
    """Names of parameters, a tied one under its first name only."""
    seen: set[tuple[Any, ...]] = set()
    names = []
    for spec in specs:
        if not spec.tie or spec.tie not in seen:
            names.append(spec.fqn)
        seen.add(spec.tie)
    return names


def _legal_world(case: Case) -> WorldSpec:
    world = case.world
    hybrid = case.strategy.startswith("hybrid")
    if hybrid and (len(world.mesh) != 2 or world.mesh[0] * world.mesh[1] != world.size):
        return replace(world, mesh=(world.size // 2, 2) if world.size % 2 == 0 else (1, world.size))
    return world if hybrid or not world.mesh else replace(world, mesh=())


def _leaves_unused(case: Case) -> bool:
    """Whether some parameter may get no gradient on any rank while another of its unit does."""
    if case.model.tree is None:
        model = MODELS.get(case.model.name)
        # A loss that goes past a unit's output leaves the unit's last part without a gradient.
        leaving = {"unused_parameters", "loss_bypasses_output"}
        return model is None or bool(leaving & model.needs) or bool(model.traits & {"frozen", "unused"})
    if any("unused_parameters" in operation.required() for operation in case.program):
        return True
    if any(isinstance(operation, (Freeze, Thaw)) for operation in case.program):
        return True
    return "unused_parameters" in needs_of(case.model.tree, ())


def _stateless(optimizer: OptimizerSpec) -> OptimizerSpec:
    """Plain SGD, to which a gradient of zeros and none at all are the same."""
    if optimizer.name == "sgd" and set(optimizer.arguments) <= {"lr"}:
        return optimizer
    return OptimizerSpec("sgd", {"lr": optimizer.arguments.get("lr", 0.1)})


# ----------------------------------------------------------------------------------------------- needs


def needs_of_case(case: Case) -> frozenset[str]:
    """Returns every capability that a legal case needs: its operations', its model's and its plan's."""
    needs = set(case.required())
    if case.model.tree is None:
        return frozenset(needs | _needs_of_zoo(case))
    units = () if case.strategy == "no_shard" and not case.wrapping.units else case.wrapping.units
    if case.wrapping.policy is not None:
        # Which modules a policy takes is the implementation's affair: whatever could be needed is.
        needs |= needs_of(case.model.tree, unit_names(case.model.tree))
    needs |= needs_of(case.model.tree, units)
    for operation in case.program:
        if isinstance(operation, Reload) and operation.units is not None:
            needs |= needs_of(case.model.tree, operation.units)
    if any(isinstance(operation, (Freeze, Thaw)) for operation in case.program) and _mixes_frozen(case, units):
        needs.add("frozen_mixed_unit")
    return frozenset(needs)


def _needs_of_zoo(case: Case) -> set[str]:
    model = MODELS.get(case.model.name)
    if model is None:
        return set()
    needs = set(model.needs)
    plans = [case.wrapping.units]
    plans += [o.units for o in case.program if isinstance(o, Reload) and o.units is not None]
    if all(set(model.units) <= set(units) for units in plans):
        return needs
    # Parts that are units of their own in the plan that the zoo suggests may meet in one unit.
    needs |= {"mixed_dtype_units"} if "mixed_dtypes" in model.traits else set()
    return needs | ({"frozen_mixed_unit"} if "frozen" in model.traits else set())


@dataclass(slots=True)
class _Flags:
    flags: dict[str, bool]

    def set(self, patterns: tuple[str, ...], flag: bool) -> None:
        for name in self.flags:
            if any(fnmatchcase(name, pattern) for pattern in patterns):
                self.flags[name] = flag


def _mixes_frozen(case: Case, units: tuple[str, ...]) -> bool:
    specs = parameters(case.model.tree)
    held = _Flags({spec.fqn: not spec.frozen for spec in specs})
    members: dict[str, list[str]] = {}
    for spec in specs:
        members.setdefault(unit_of(spec.module, units), []).append(spec.fqn)
    for operation in case.program:
        if isinstance(operation, (Freeze, Thaw)):
            held.set(operation.patterns, isinstance(operation, Thaw))
            if any(len({held.flags[name] for name in names}) > 1 for names in members.values()):
                return True
    return False
